"""`KVBatchMeta`: row selection, joining, and that no method changes the meta it is called on."""

import copy
import dataclasses
import pickle

import pytest

from nemo_rl.data_plane import KVBatchMeta


def make_meta(**changes: object) -> KVBatchMeta:
    meta = KVBatchMeta(
        partition_id="train",
        task_name="train",
        sample_ids=["a", "b", "c", "d"],
        fields=["input_ids"],
        sequence_lengths=[5, 6, 7, 8],
        extra_info={"pad_to_multiple": 8},
        tags=[{"source_id": name} for name in "abcd"],
    )
    return dataclasses.replace(meta, **changes)


def test_subset_slice_and_drop_select_rows_with_their_lengths_and_tags() -> None:
    meta = make_meta()
    picked = meta.subset([3, 1])
    assert (picked.sample_ids, picked.sequence_lengths) == (["d", "b"], [8, 6])
    assert picked.tags == [{"source_id": "d"}, {"source_id": "b"}]
    assert meta.slice(1, 3).sample_ids == ["b", "c"]
    assert meta.slice(2, 99).sample_ids == ["c", "d"]
    rest = meta.drop([0, -1])
    assert rest is not None
    assert rest.sample_ids == ["b", "c"]
    assert meta.drop(range(4)) is None
    assert meta.subset([]).size == 0


def test_concat_keeps_lengths_and_tags_only_where_all_have_them() -> None:
    meta = make_meta()
    joined = meta.slice(0, 1).concat(meta.slice(1, 2).with_fields(["values"]), meta.slice(2, 3))
    assert joined.sample_ids == ["a", "b", "c"]
    assert joined.sequence_lengths == [5, 6, 7]
    assert joined.fields == ["input_ids", "values"]
    assert joined.tags == [{"source_id": name} for name in "abc"]
    bare = dataclasses.replace(meta.slice(3, 4), sequence_lengths=None, tags=None, extra_info={"x": 1})
    joined = meta.slice(0, 1).concat(bare)
    assert joined.sequence_lengths is None
    assert joined.tags is None
    assert joined.extra_info == {"pad_to_multiple": 8}
    with pytest.raises(ValueError, match="'train' and 'other'"):
        meta.concat(make_meta(partition_id="other"))


def test_stamp_tags_adds_to_each_row() -> None:
    stamped = make_meta().stamp_tags({"weight_version": [1, 2, 3, 4]})
    assert stamped.tags is not None
    assert stamped.tags[2] == {"source_id": "c", "weight_version": 3}
    assert make_meta(tags=None).stamp_tags({"v": [0, 1, 2, 3]}).tags == [{"v": n} for n in range(4)]
    with pytest.raises(ValueError, match="3 values for 4 rows"):
        make_meta().stamp_tags({"weight_version": [1, 2, 3]})


def test_with_fields_keeps_order_without_duplicates() -> None:
    assert make_meta().with_fields(["values", "input_ids", "values"]).fields == ["input_ids", "values"]
    assert make_meta(fields=None).with_fields(["values"]).fields == ["values"]


def test_no_method_changes_its_meta_and_results_share_no_list() -> None:
    meta = make_meta()
    before = copy.deepcopy(meta)
    for result in (
        meta.subset([0, 1, 2, 3]),
        meta.slice(0, 4),
        meta.drop([0]),
        meta.concat(meta),
        meta.with_fields(["values"]),
        meta.stamp_tags({"x": [1, 2, 3, 4]}),
    ):
        assert result is not None
        assert result.tags is not None
        assert result.sequence_lengths is not None
        assert result.fields is not None
        result.sample_ids.append("z")
        result.fields.append("z")
        result.sequence_lengths.append(0)
        result.tags[0]["source_id"] = "changed"
        result.extra_info["changed"] = True
    assert meta == before


def test_construction_and_pickling() -> None:
    with pytest.raises(ValueError, match="1 tags for 2 sample ids"):
        KVBatchMeta("p", None, ["a", "b"], tags=[{}])
    with pytest.raises(dataclasses.FrozenInstanceError):
        make_meta().task_name = "x"
    assert pickle.loads(pickle.dumps(make_meta())) == make_meta()

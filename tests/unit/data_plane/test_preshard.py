"""Cutting metas against the cut of the tensors they stand for, and against simple arithmetic."""

import copy
import random

import pytest
import torch

from nemo_rl.data_plane.interfaces import KVBatchMeta
from nemo_rl.data_plane.preshard import deal_meta_by_length, shard_meta_for_dp, stamp_common_width
from nemo_rl.distributed.batched_data_dict import BatchedDataDict

PACKING = {
    "algorithm": "modified_first_fit_decreasing",
    "input_lengths_key": "input_lengths",
    "sequence_length_pad_multiple": 1,
    "max_tokens_per_microbatch": 64,
}
DYNAMIC = {
    "input_lengths_key": "input_lengths",
    "sequence_length_round": 4,
    "max_tokens_per_microbatch": 64,
}


def make_meta(rows: int, seed: int = 0) -> KVBatchMeta:
    lengths = [random.Random(seed + row).randint(3, 40) for row in range(rows)]
    return KVBatchMeta(
        partition_id="p",
        task_name="train",
        sample_ids=[f"r{row}" for row in range(rows)],
        fields=["input_ids"],
        sequence_lengths=lengths,
        extra_info={"global_forward_pad_seqlen": 40},
        tags=[{"source_id": f"s{row}"} for row in range(rows)],
    )


def test_plain_shards_take_contiguous_parts_of_each_global_batch() -> None:
    metas, positions = shard_meta_for_dp(make_meta(8), dp_world=2, batch_size=4)
    assert [meta.sample_ids for meta in metas] == [["r0", "r1", "r4", "r5"], ["r2", "r3", "r6", "r7"]]
    assert positions == [0, 1, 4, 5, 2, 3, 6, 7]
    metas, positions = shard_meta_for_dp(make_meta(8), dp_world=2)
    assert [meta.sample_ids for meta in metas] == [["r0", "r1", "r2", "r3"], ["r4", "r5", "r6", "r7"]]
    assert positions is None


@pytest.mark.parametrize("args", [{}, {"sequence_packing_args": PACKING}, {"dynamic_batching_args": DYNAMIC}])
@pytest.mark.parametrize(("dp_world", "batch_size"), [(1, None), (2, None), (4, None), (2, 12), (3, 12)])
def test_rows_keep_their_length_and_tag_and_are_dealt_once(args: dict, dp_world: int, batch_size: int | None) -> None:
    meta = make_meta(24)
    before = copy.deepcopy(meta)
    metas, positions = shard_meta_for_dp(meta, dp_world=dp_world, batch_size=batch_size, **args)
    assert meta == before
    assert len(metas) == dp_world
    assert meta.sequence_lengths is not None
    assert meta.tags is not None
    order = [sample_id for part in metas for sample_id in part.sample_ids]
    assert sorted(order) == sorted(meta.sample_ids)
    if positions is not None:
        assert [order[position] for position in positions] == meta.sample_ids
    else:
        assert order == meta.sample_ids
    for part in metas:
        rows = [int(sample_id[1:]) for sample_id in part.sample_ids]
        assert part.sequence_lengths == [meta.sequence_lengths[row] for row in rows]
        assert part.tags == [meta.tags[row] for row in rows]
        assert (part.partition_id, part.task_name, part.fields) == ("p", "train", ["input_ids"])
        assert part.extra_info["global_forward_pad_seqlen"] == 40
        assert ("micro_batch_indices" in part.extra_info) == bool(args)
    if args:  # unequal counts of microbatches would leave some ranks waiting in a collective
        counts = {tuple(len(batch) for batch in part.extra_info["micro_batch_indices"]) for part in metas}
        assert len(counts) == 1


@pytest.mark.parametrize("args", [{}, {"sequence_packing_args": PACKING}, {"dynamic_batching_args": DYNAMIC}])
def test_metas_are_cut_as_their_tensors_are(args: dict) -> None:
    meta = make_meta(24)
    tensors = BatchedDataDict(
        {
            "input_ids": torch.zeros(24, 64, dtype=torch.int64),
            "input_lengths": torch.tensor(meta.sequence_lengths),
            "row": torch.arange(24),
        }
    )
    cut = tensors.shard_by_batch_size(2, batch_size=12, **args)
    shards = cut[0] if isinstance(cut, tuple) else cut
    metas, _ = shard_meta_for_dp(meta, dp_world=2, batch_size=12, **args)
    for part, shard in zip(metas, shards, strict=True):
        assert part.sample_ids == [f"r{row}" for row in shard["row"].tolist()]
        for key in ("micro_batch_indices", "micro_batch_lengths", "elem_counts_per_gb"):
            assert part.extra_info.get(key) == getattr(shard, key), key


def test_refusals() -> None:
    meta = make_meta(4)
    with pytest.raises(ValueError, match="no rows"):
        shard_meta_for_dp(meta.subset([]), dp_world=2)
    with pytest.raises(ValueError, match="None entries for 4 rows"):
        shard_meta_for_dp(KVBatchMeta("p", None, list("abcd")), dp_world=2)
    with pytest.raises(ValueError, match="1 entries for 4 rows"):
        shard_meta_for_dp(KVBatchMeta("p", None, list("abcd"), sequence_lengths=[1]), dp_world=2)
    with pytest.raises(ValueError, match="exclude each other"):
        shard_meta_for_dp(meta, dp_world=2, sequence_packing_args=PACKING, dynamic_batching_args=DYNAMIC)
    with pytest.raises(AssertionError, match="4 rows do not divide over 3 shards"):
        shard_meta_for_dp(meta, dp_world=3)


def test_common_width() -> None:
    one = KVBatchMeta("p0", "train", ["a"], sequence_lengths=[5], extra_info={"pad_to_multiple": 4})
    two = KVBatchMeta("p1", "train", ["b", "c"], sequence_lengths=[9, 2])
    stamped = stamp_common_width([one, two])
    assert [meta.extra_info["global_forward_pad_seqlen"] for meta in stamped] == [12, 12]
    assert stamp_common_width([two], multiple=8)[0].extra_info == {"global_forward_pad_seqlen": 16}
    assert "global_forward_pad_seqlen" not in one.extra_info
    with pytest.raises(ValueError, match="'p2'"):
        stamp_common_width([one, KVBatchMeta("p2", None, ["a"])])


@pytest.mark.parametrize(
    ("rows", "dp_world", "batch_size"), [(24, 2, None), (24, 3, 8), (7, 2, None), (7, 4, 7), (2, 4, 1)]
)
def test_dealing_by_length_keeps_steps_apart_and_token_totals_close(
    rows: int, dp_world: int, batch_size: int | None
) -> None:
    meta = make_meta(rows)
    meta.extra_info["micro_batch_indices"] = [[[0, 1]]]  # a plan of another stage
    before = copy.deepcopy(meta)
    metas = deal_meta_by_length(meta, dp_world=dp_world, batch_size=batch_size)
    assert meta == before
    assert len(metas) == dp_world
    assert meta.sequence_lengths is not None
    assert meta.tags is not None
    chunk = batch_size or rows
    for start in range(0, rows, chunk):
        step = start // chunk
        totals, dealt = [], []
        for part in metas:
            counts = part.extra_info["elem_counts_per_gb"]
            first = sum(counts[:step])
            mine = [int(name[1:]) for name in part.sample_ids[first : first + counts[step]]]
            assert mine == sorted(mine)
            assert [part.tags[first + i] for i in range(len(mine))] == [meta.tags[row] for row in mine]
            dealt += mine
            totals.append(sum(meta.sequence_lengths[row] for row in mine))
        assert sorted(dealt) == list(range(start, start + chunk))
        # The rank with most would not have got its last row if another had had less by more than that row.
        assert max(totals) - min(totals) <= max(meta.sequence_lengths[start : start + chunk])
    for part in metas:
        assert part.extra_info.keys() == {"global_forward_pad_seqlen", "elem_counts_per_gb"}
        assert (part.partition_id, part.task_name, part.fields) == ("p", "train", ["input_ids"])


def test_dealing_by_length_beats_contiguous_parts() -> None:
    meta = KVBatchMeta("p", None, list("abcdef"), sequence_lengths=[100, 90, 10, 10, 10, 10])
    metas = deal_meta_by_length(meta, dp_world=2)
    assert [sum(part.sequence_lengths or ()) for part in metas] == [120, 110]


def test_dealing_refusals() -> None:
    for meta, size, message in (
        (make_meta(4).subset([]), None, "no rows"),
        (KVBatchMeta("p", None, ["a"]), None, "None entries for 1 rows"),
        (make_meta(7), 5, "7 rows do not divide into steps of 5 rows"),
        (make_meta(7), 0, "steps of 0 rows"),
    ):
        with pytest.raises(ValueError, match=message):
            deal_meta_by_length(meta, dp_world=2, batch_size=size)

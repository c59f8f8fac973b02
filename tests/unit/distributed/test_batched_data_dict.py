"""BatchedDataDict against plain Python lists of rows."""

import pickle

import pytest
import torch

from nemo_rl.distributed.batched_data_dict import BatchedDataDict, SlicedDataDict

LENGTHS = [3, 1, 4, 1, 5, 2, 2, 3]


def make_batch(lengths: list[int] = LENGTHS) -> BatchedDataDict:
    width = max(lengths)
    ids = torch.zeros(len(lengths), width, dtype=torch.int64)
    for row, length in enumerate(lengths):
        ids[row, :length] = torch.arange(length) + 10 * (row + 1)
    return BatchedDataDict(
        {"input_ids": ids, "input_lengths": torch.tensor(lengths), "name": [f"row{i}" for i in range(len(lengths))]}
    )


def rows_of(batch: BatchedDataDict) -> list[tuple[str, list[int]]]:
    """Each row as (name, its ids without padding)."""
    lengths = batch["input_lengths"].tolist()
    return [(name, ids[:n].tolist()) for name, ids, n in zip(batch["name"], batch["input_ids"], lengths, strict=True)]


def test_size_and_plain_access() -> None:
    batch = make_batch()
    assert batch.size == 8 and BatchedDataDict().size == 0 and BatchedDataDict({"a": []}).size == 0
    assert set(batch.get_dict()) == {"input_ids", "input_lengths", "name"} and type(batch.get_dict()) is dict


def test_from_batches_pads_to_the_widest() -> None:
    batches = [make_batch([2, 1]), make_batch([5]), make_batch([1])]
    joined = BatchedDataDict.from_batches(batches, pad_value_dict={"input_ids": -1})
    assert rows_of(joined) == [row for batch in batches for row in rows_of(batch)]
    assert joined["input_ids"].shape == (4, 5)
    # make_batch pads its own rows with 0; only what from_batches adds is -1.
    assert joined["input_ids"].tolist()[1] == [20, 0, -1, -1, -1]
    assert joined["input_ids"].dtype == torch.int64


def test_from_batches_keeps_bits_and_pads_more_than_one_dimension() -> None:
    a = {"x": torch.tensor([[[1.5]]], dtype=torch.bfloat16)}
    b = {"x": torch.tensor([[[float("nan"), -0.0], [2.0, 3.0]]], dtype=torch.bfloat16)}
    joined = BatchedDataDict.from_batches([a, b])["x"]
    assert joined.shape == (2, 2, 2) and joined.dtype == torch.bfloat16
    assert joined[0].tolist() == [[1.5, 0.0], [0.0, 0.0]]
    assert torch.equal(joined[1:].view(torch.int16), b["x"].view(torch.int16))


def test_from_batches_refuses_other_columns() -> None:
    with pytest.raises(ValueError, match="batch 1"):
        BatchedDataDict.from_batches([{"a": [1]}, {"b": [1]}])
    assert BatchedDataDict.from_batches([]).size == 0


def test_plain_shards() -> None:
    batch = make_batch()
    shards = batch.shard_by_batch_size(2, batch_size=4)
    assert isinstance(shards, list)
    everything = rows_of(batch)
    assert rows_of(shards[0]) == [everything[i] for i in (0, 1, 4, 5)]
    assert rows_of(shards[1]) == [everything[i] for i in (2, 3, 6, 7)]
    shards[0]["input_ids"].fill_(-1)
    assert rows_of(batch) == everything, "shards copy"


@pytest.mark.parametrize(
    ("shards", "options", "says"),
    [
        (2, {"batch_size": 3}, "do not divide into chunks"),
        (3, {}, "do not divide over 3 shards"),
        (3, {"batch_size": 4}, "do not divide over 3 shards"),
        (2, {"batch_size": 4, "allow_uneven_shards": True}, "exclude"),
        (2, {"batch_size": 0}, "chunks of 0"),
    ],
)
def test_refused_shards(shards: int, options: dict, says: str) -> None:
    with pytest.raises(AssertionError, match=says):
        make_batch().shard_by_batch_size(shards, **options)


def test_columns_of_unequal_length_are_refused() -> None:
    with pytest.raises(AssertionError, match="'b': 3"):
        BatchedDataDict({"a": [1, 2], "b": [1, 2, 3]}).shard_by_batch_size(1)


def test_uneven_shards_hold_every_row_once() -> None:
    batch = make_batch()
    shards = batch.shard_by_batch_size(3, allow_uneven_shards=True)
    assert [shard.size for shard in shards] == [3, 3, 2]
    assert [row for shard in shards for row in rows_of(shard)] == rows_of(batch)


PLANS = {
    "dynamic_batching_args": {
        "input_lengths_key": "input_lengths",
        "max_tokens_per_microbatch": 8,
        "sequence_length_round": 2,
    },
    "sequence_packing_args": {
        "input_lengths_key": "input_lengths",
        "max_tokens_per_microbatch": 8,
        "sequence_length_pad_multiple": 1,
        "algorithm": "first_fit_decreasing",
    },
}


@pytest.mark.parametrize("kind", list(PLANS))
def test_planned_shards_can_be_put_back(kind: str) -> None:
    batch = make_batch()
    shards, original = batch.shard_by_batch_size(2, batch_size=4, **{kind: PLANS[kind]})
    back = BatchedDataDict.from_batches(shards)
    assert [rows_of(batch)[i] for i in original] == rows_of(back)
    back.reorder_data(original)
    assert rows_of(back) == rows_of(batch)


@pytest.mark.parametrize("kind", list(PLANS))
def test_planned_microbatches_cover_each_chunk(kind: str) -> None:
    batch = make_batch()
    shards, _ = batch.shard_by_batch_size(2, batch_size=4, **{kind: PLANS[kind]})
    seen = []
    for shard in shards:
        for index in range(2):
            chunk = shard.get_batch(index)
            if kind == "dynamic_batching_args":
                found = list(chunk.make_microbatch_iterator_with_dynamic_shapes())
                assert all(
                    (m["input_ids"].numel() <= 8 and m["input_ids"].shape[1] % 2 == 0) or m.size == 1 for m in found
                )
            else:
                found = list(chunk.make_microbatch_iterator_for_packable_sequences())
                assert all(int(m["input_lengths"].sum()) <= 8 for m in found)
            assert [row for m in found for row in rows_of(m)] == rows_of(chunk)
            seen += [(index, row) for m in found for row in rows_of(m)]
    everything = rows_of(batch)
    assert sorted(seen) == sorted((i // 4, row) for i, row in enumerate(everything))


def test_both_plans_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="exclude"):
        make_batch().shard_by_batch_size(2, **PLANS)


def test_iterators_need_one_planned_chunk() -> None:
    with pytest.raises(ValueError, match="no microbatches are planned"):
        next(make_batch().make_microbatch_iterator_with_dynamic_shapes())
    shards, _ = make_batch().shard_by_batch_size(2, batch_size=4, sequence_packing_args=PLANS["sequence_packing_args"])
    with pytest.raises(ValueError, match="2 chunks"):
        next(shards[0].make_microbatch_iterator_for_packable_sequences())
    with pytest.raises(ValueError, match="batch_size is needed"):
        make_batch().get_batch(0)


def test_contiguous_cuts_share_memory() -> None:
    batch = make_batch()
    everything = rows_of(batch)
    part = batch.slice(2, 5)
    assert isinstance(part, SlicedDataDict) and rows_of(part) == everything[2:5]
    assert rows_of(batch.chunk(1, 4)) == everything[2:4]
    assert rows_of(batch.get_batch(1, 3)) == everything[3:6]
    assert [rows_of(m) for m in batch.make_microbatch_iterator(4)] == [everything[:4], everything[4:]]
    part["input_ids"].zero_()
    assert batch["input_ids"][2:5].count_nonzero() == 0
    for cut in (lambda: batch.make_microbatch_iterator(3), lambda: batch.chunk(0, 3)):
        with pytest.raises(ValueError, match="do not divide"):
            cut()


def test_selections_copy() -> None:
    batch = make_batch()
    everything = rows_of(batch)
    assert rows_of(batch.select_indices([5, 0, 0])) == [everything[5], everything[0], everything[0]]
    assert rows_of(batch.select_indices(torch.tensor([7]))) == [everything[7]]
    assert rows_of(batch.repeat_interleave(2)) == [row for row in everything for _ in range(2)]


def test_truncate_cuts_only_what_is_wider() -> None:
    batch = BatchedDataDict({"a": torch.ones(2, 5), "b": torch.ones(2, 2), "c": torch.ones(2), "d": [1, 2]})
    batch.truncate_tensors(1, 3)
    assert [tuple(batch[name].shape) for name in "abc"] == [(2, 3), (2, 2), (2,)] and batch["d"] == [1, 2]


def test_pickling_keeps_columns_and_plan() -> None:
    shards, _ = make_batch().shard_by_batch_size(2, dynamic_batching_args=PLANS["dynamic_batching_args"])
    copy = pickle.loads(pickle.dumps(shards[1]))
    assert rows_of(copy) == rows_of(shards[1])
    assert copy.micro_batch_indices == shards[1].micro_batch_indices
    assert copy.micro_batch_lengths == shards[1].micro_batch_lengths
    assert copy.to("cpu") is copy

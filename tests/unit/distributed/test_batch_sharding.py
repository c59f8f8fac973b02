"""Shard plans against their invariants on random lengths, and against small examples done by hand."""

import random

import pytest

from nemo_rl.distributed.batch_sharding import Shard, dynamic_shards, even_shards, packed_shards

DYNAMIC = {"max_tokens_per_microbatch": 64, "sequence_length_round": 4}
PACKING = {"max_tokens_per_microbatch": 64, "sequence_length_pad_multiple": 4, "algorithm": "first_fit_decreasing"}


def microbatches(shard: Shard) -> list[list[list[int]]]:
    """The original rows of each microbatch of each chunk."""
    chunks, start = [], 0
    for count, cuts in zip(shard.elem_counts_per_gb, shard.micro_batch_indices, strict=True):
        rows = shard.rows[start : start + count]
        assert [cut[0] for cut in cuts] == [0, *(cut[1] for cut in cuts[:-1])] and cuts[-1][1] == count
        chunks.append([rows[first:end] for first, end in cuts])
        start += count
    assert start == len(shard.rows)
    return chunks


def test_even_shards_take_contiguous_parts_of_each_chunk() -> None:
    assert [shard.rows for shard in even_shards(8, 2, 4)] == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert [shard.rows for shard in even_shards(5, 3, 5)] == [[0, 1], [2, 3], [4]]
    assert [shard.rows for shard in even_shards(1, 2, 1)] == [[0], []]


def test_dynamic_shards_by_hand() -> None:
    # Sorted: rows 1, 3, 2, 0 of lengths 3, 5, 9, 20. Dealt: [1, 2] and [3, 0]. Widths 8 and 20, both fit 40 tokens.
    args = {"max_tokens_per_microbatch": 40, "sequence_length_round": 4}
    first, second = dynamic_shards([20, 3, 9, 5], 2, 4, args)
    assert (first.rows, second.rows) == ([1, 2], [3, 0])
    assert first.micro_batch_indices == second.micro_batch_indices == [[[0, 2]]]
    assert first.micro_batch_lengths == second.micro_batch_lengths == [[20]]
    # One token less, and each row is its own microbatch.
    first, _ = dynamic_shards([20, 3, 9, 5], 2, 4, {**args, "max_tokens_per_microbatch": 39})
    assert first.micro_batch_indices == [[[0, 1], [1, 2]]] and first.micro_batch_lengths == [[8, 20]]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("make", ["dynamic", "packed"])
def test_invariants(make: str, seed: int) -> None:
    rng = random.Random(seed)
    num_shards, chunks = rng.choice([1, 2, 4]), rng.choice([1, 3])
    chunk = num_shards * rng.randint(2, 8)
    lengths = [rng.randint(1, 64) for _ in range(chunk * chunks)]
    if make == "dynamic":
        shards = dynamic_shards(lengths, num_shards, chunk, DYNAMIC)
    else:
        shards = packed_shards(lengths, num_shards, chunk, PACKING)
    plans = [microbatches(shard) for shard in shards]
    assert sorted(row for shard in shards for row in shard.rows) == list(range(len(lengths)))
    for c in range(chunks):
        counts = {len(plan[c]) for plan in plans}
        assert len(counts) == 1, "every shard runs as many microbatches"
        for shard, plan in zip(shards, plans, strict=True):
            for rows, tokens in zip(plan[c], shard.micro_batch_lengths[c], strict=True):
                assert all(c * chunk <= row < (c + 1) * chunk for row in rows), "chunks never mix"
                padded = [-(-lengths[row] // 4) * 4 for row in rows]
                if make == "dynamic":
                    assert max(padded) <= tokens and tokens * len(rows) <= 64
                else:
                    assert sum(padded) == tokens <= 64
        if make == "dynamic":
            shapes = {
                tuple((len(rows), n) for rows, n in zip(p[c], s.micro_batch_lengths[c], strict=True))
                for s, p in zip(shards, plans, strict=True)
            }
            assert len(shapes) == 1, "microbatch k has one shape on all shards"


def test_a_row_over_the_budget_is_refused() -> None:
    with pytest.raises(ValueError, match="max_tokens_per_microbatch=64"):
        dynamic_shards([65, 1], 2, 2, DYNAMIC)
    with pytest.raises(ValueError, match="68"):
        packed_shards([65, 1], 2, 2, PACKING)


def test_fewer_rows_than_shards_can_not_be_packed() -> None:
    with pytest.raises(ValueError):
        packed_shards([5, 5], 4, 2, PACKING)

"""Cutting the meta of a batch into one meta per data-parallel rank. Pure functions of metadata, without I/O."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from nemo_rl.data_plane.interfaces import KVBatchMeta
from nemo_rl.data_plane.schema import (
    ELEM_COUNTS_PER_GB,
    GLOBAL_FORWARD_PAD_SEQLEN,
    INPUT_LENGTHS,
    PACKING_KEYS,
    PAD_TO_MULTIPLE,
)

if TYPE_CHECKING:
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict

_ROW = "row"


def round_up(value: int, multiple: int) -> int:
    """The least multiple of `multiple` that is not below `value`."""
    return -(-value // multiple) * multiple


def shard_meta_for_dp(
    meta: KVBatchMeta,
    *,
    dp_world: int,
    batch_size: int | None = None,
    sequence_packing_args: Mapping[str, Any] | None = None,
    dynamic_batching_args: Mapping[str, Any] | None = None,
) -> tuple[list[KVBatchMeta], list[int] | None]:
    """The rows of `meta` per data-parallel rank, cut as `BatchedDataDict.shard_by_batch_size` cuts their tensors.

    Each rank's meta has the partition, task, columns and tags of its rows; the packing plan, where there is one, is
    added to `extra_info`. The plan gives every rank the same number of microbatches: collectives would hang otherwise.
    The caller's meta is not changed.

    Args:
        dp_world: number of data-parallel ranks.
        batch_size: rows per optimizer step over all ranks; None takes all rows as one batch (inference).

    Returns:
        The metas in rank order, and where row `i` of `meta` is in their concatenation; None when nothing moved.

    Raises:
        ValueError: no rows, no length for each row, both kinds of packing, or a row over the token budget.
        AssertionError: rows that do not divide; the sizes are checked where a run starts.
    """
    # The batch container does the cutting; a controller that only places rows never loads its tensor library.
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict

    lengths = _row_lengths(meta)
    if sequence_packing_args is not None and dynamic_batching_args is not None:
        raise ValueError("sequence packing and dynamic batching exclude each other")
    skeleton = BatchedDataDict({INPUT_LENGTHS: lengths, _ROW: list(range(meta.size))})
    sharded = skeleton.shard_by_batch_size(
        dp_world,
        batch_size=batch_size,
        sequence_packing_args=sequence_packing_args,
        dynamic_batching_args=dynamic_batching_args,
    )
    shards = sharded[0] if isinstance(sharded, tuple) else sharded
    rows = [shard[_ROW] for shard in shards]
    metas = [_rank_meta(meta, part, shard) for part, shard in zip(rows, shards, strict=True)]
    return metas, _positions([row for part in rows for row in part])


def deal_meta_by_length(meta: KVBatchMeta, *, dp_world: int, batch_size: int | None = None) -> list[KVBatchMeta]:
    """The rows of `meta` per data-parallel rank, those of each step dealt so that all get about equally many tokens.

    For an engine that plans its own microbatches and divides by global counts: the ranks may get different numbers of
    rows, and a rank may get none. Longest row first, each to the rank with the fewest tokens so far; on a rank rows
    keep the order of `meta`. `extra_info` says under `elem_counts_per_gb` how many rows of each step a rank has. The
    caller's meta is not changed.

    Args:
        dp_world: number of data-parallel ranks.
        batch_size: rows per optimizer step over all ranks; None takes all rows as one batch (inference).

    Raises:
        ValueError: no rows, no length for each row, or rows that do not divide into steps.
    """
    lengths = _row_lengths(meta)
    chunk = meta.size if batch_size is None else batch_size
    if chunk < 1 or meta.size % chunk:
        raise ValueError(f"partition {meta.partition_id!r}: {meta.size} rows do not divide into steps of {chunk} rows")
    rows: list[list[int]] = [[] for _ in range(dp_world)]
    counts: list[list[int]] = [[] for _ in range(dp_world)]
    for start in range(0, meta.size, chunk):
        heap = [(0, rank) for rank in range(dp_world)]
        mine: list[list[int]] = [[] for _ in range(dp_world)]
        for row in sorted(range(start, start + chunk), key=lambda row: -lengths[row]):
            tokens, rank = heap[0]
            mine[rank].append(row)
            heapq.heapreplace(heap, (tokens + lengths[row], rank))
        for rank in range(dp_world):
            rows[rank] += sorted(mine[rank])
            counts[rank].append(len(mine[rank]))
    metas = []
    for part, per_step in zip(rows, counts, strict=True):
        extra = {key: value for key, value in meta.extra_info.items() if key not in PACKING_KEYS}
        metas.append(replace(meta.subset(part), extra_info={**extra, ELEM_COUNTS_PER_GB: per_step}))
    return metas


def stamp_common_width(metas: Sequence[KVBatchMeta], *, multiple: int = 1) -> list[KVBatchMeta]:
    """The metas with one padded width, in tokens, for all: that of the longest row, rounded up.

    Rounded to the largest of `multiple` and the `pad_to_multiple` of each meta. Ranks that run collectives per token
    need equal widths.

    Raises:
        ValueError: a meta without lengths.
    """
    without = [meta.partition_id for meta in metas if not meta.sequence_lengths]
    if without:
        raise ValueError(f"partitions {without}: no sequence_lengths to compute a width from")
    multiple = max([multiple, *(int(meta.extra_info.get(PAD_TO_MULTIPLE, 1)) for meta in metas)])
    longest = max(length for meta in metas for length in meta.sequence_lengths or ())
    width = {GLOBAL_FORWARD_PAD_SEQLEN: round_up(longest, multiple)}
    return [replace(meta.subset(range(meta.size)), extra_info={**meta.extra_info, **width}) for meta in metas]


def _row_lengths(meta: KVBatchMeta) -> list[int]:
    lengths = meta.sequence_lengths
    if not meta.sample_ids:
        raise ValueError(f"partition {meta.partition_id!r}: no rows to shard")
    if lengths is None or len(lengths) != meta.size:
        count = None if lengths is None else len(lengths)
        raise ValueError(f"partition {meta.partition_id!r}: sequence_lengths has {count} entries for {meta.size} rows")
    return lengths


def _rank_meta(meta: KVBatchMeta, rows: list[int], shard: BatchedDataDict) -> KVBatchMeta:
    part = meta.subset(rows)
    plan = {key: value for key in PACKING_KEYS if (value := getattr(shard, key)) is not None}
    part.extra_info.update(plan)
    return part


def _positions(rows: list[int]) -> list[int] | None:
    if rows == sorted(rows):
        return None
    position = [0] * len(rows)
    for where, row in enumerate(rows):
        position[row] = where
    return position

"""Which row of a batch goes to which shard and microbatch. Pure: lengths in, row indices out.

Invariants
- every row is in exactly one shard and, where there are microbatches, in exactly one of them;
- all shards have the same number of microbatches in each chunk, since their ranks meet in collectives;
- a chunk is one optimizer step: its rows never mix with those of another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nemo_rl.data.packing import get_packer


@dataclass
class Shard:
    """The rows of one shard, in their order in the shard.

    Attributes:
        rows: indices into the original batch.
        micro_batch_indices: per chunk, `[start, end)` of each microbatch, counted from the chunk's first row here.
        micro_batch_lengths: per chunk, the length of each microbatch in tokens: its width when padded (dynamic
            batching), or the sum of its padded rows (packing).
        elem_counts_per_gb: per chunk, the number of rows here.
    """

    rows: list[int] = field(default_factory=list)
    micro_batch_indices: list[list[list[int]]] = field(default_factory=list)
    micro_batch_lengths: list[list[int]] = field(default_factory=list)
    elem_counts_per_gb: list[int] = field(default_factory=list)

    def add_chunk(self, microbatches: Sequence[Sequence[int]], lengths: Sequence[int]) -> None:
        """Append one chunk's microbatches, given as lists of row indices."""
        ends, end = [], 0
        for microbatch in microbatches:
            ends.append([end, end + len(microbatch)])
            end += len(microbatch)
            self.rows.extend(microbatch)
        self.micro_batch_indices.append(ends)
        self.micro_batch_lengths.append(list(lengths))
        self.elem_counts_per_gb.append(end)


def even_shards(num_rows: int, num_shards: int, chunk_size: int) -> list[Shard]:
    """Each chunk cut into contiguous parts, shard `i` getting the i-th of every chunk; sizes differ by 1 at most."""
    shards = [Shard() for _ in range(num_shards)]
    for start in range(0, num_rows, chunk_size):
        share, rest = divmod(min(chunk_size, num_rows - start), num_shards)
        for i, shard in enumerate(shards):
            count = share + (i < rest)
            shard.rows.extend(range(start, start + count))
            start += count
    return shards


def dynamic_shards(lengths: Sequence[int], num_shards: int, chunk_size: int, args: Mapping[str, Any]) -> list[Shard]:
    """Rows sorted by length, dealt round-robin, and cut into padded microbatches of equal shape on all shards.

    Args:
        lengths: tokens per row.
        args: `max_tokens_per_microbatch`, and `sequence_length_round`, which widths are rounded up to.

    Raises:
        ValueError: a row that is longer than the microbatch budget after rounding.
    """
    budget, multiple = args["max_tokens_per_microbatch"], args["sequence_length_round"]
    shards = [Shard() for _ in range(num_shards)]
    for start in range(0, len(lengths), chunk_size):
        order = sorted(range(start, min(start + chunk_size, len(lengths))), key=lambda row: lengths[row])
        dealt = [order[i::num_shards] for i in range(num_shards)]
        # The width of column k: the longest of the k-th rows over the shards. Sorted, so widths never shrink.
        widths = [_round_up(max(lengths[row] for row in column), multiple) for column in zip(*dealt, strict=True)]
        cuts = _cut(widths, budget)
        for shard, rows in zip(shards, dealt, strict=True):
            shard.add_chunk([rows[first:end] for first, end in cuts], [widths[end - 1] for _, end in cuts])
    return shards


def packed_shards(lengths: Sequence[int], num_shards: int, chunk_size: int, args: Mapping[str, Any]) -> list[Shard]:
    """Rows packed into bins of a token budget, dealt round-robin; a bin is a microbatch.

    Args:
        lengths: tokens per row.
        args: `algorithm`, `max_tokens_per_microbatch`, and `sequence_length_pad_multiple`, which each row is rounded
            up to inside its bin.

    Raises:
        ValueError: a row longer than the budget, or a chunk with fewer rows than shards.
    """
    packer = get_packer(
        args["algorithm"],
        args["max_tokens_per_microbatch"],
        min_bin_count=num_shards,
        bin_count_multiple=num_shards,
    )
    padded = [_round_up(length, args["sequence_length_pad_multiple"]) for length in lengths]
    shards = [Shard() for _ in range(num_shards)]
    for start in range(0, len(lengths), chunk_size):
        bins = [[start + i for i in bin_] for bin_ in packer.pack(padded[start : start + chunk_size])]
        for i, shard in enumerate(shards):
            mine = bins[i::num_shards]
            shard.add_chunk(mine, [sum(padded[row] for row in bin_) for bin_ in mine])
    return shards


def _cut(widths: Sequence[int], budget: int) -> list[tuple[int, int]]:
    """Greedy `[start, end)` cuts such that rows times width stays within the budget; `widths` never shrink."""
    cuts, start = [], 0
    for k, width in enumerate(widths):
        if width > budget:
            raise ValueError(f"a row of {width} tokens, rounded up, is over max_tokens_per_microbatch={budget}")
        if (k + 1 - start) * width > budget:
            cuts.append((start, k))
            start = k
    cuts.append((start, len(widths)))
    return cuts


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple

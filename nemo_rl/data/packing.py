"""Put rows into bins of a token capacity: pure scheduling, lengths in and row indices out.

Invariants of every packer
- each index of `lengths` is in exactly one bin, and no bin is empty;
- the lengths of a bin sum to at most the capacity;
- there are at least `min_bin_count` bins, and their number is a multiple of `bin_count_multiple`;
- the same lengths give the same bins.
"""

import random
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from nemo_rl.utils.errors import UserError

Bin = list[int]
"""Indices of the rows that share one pack."""


class PackingAlgorithm(Enum):
    """How rows are placed."""

    CONCATENATIVE = "concatenative"
    """In order; a row that doesn't fit opens the next bin."""

    FIRST_FIT_DECREASING = "first_fit_decreasing"
    """Longest first, each into the first bin with room: at most 11/9 of the best bin count, plus 6/9 (Dósa, 2007)."""

    FIRST_FIT_SHUFFLE = "first_fit_shuffle"
    """In random order, each into the first bin with room: close to the count of the above, with mixed lengths."""

    MODIFIED_FIRST_FIT_DECREASING = "modified_first_fit_decreasing"
    """As decreasing, but bins with a row over half the capacity are completed first, with one row over a third or a
    pair over a sixth: at most 71/60 of the best bin count, plus 1 (Johnson and Garey, 1985)."""


@dataclass(frozen=True)
class PackingMetrics:
    """How full the bins of one call are.

    Attributes:
        num_rows: rows packed.
        num_bins: bins made.
        num_tokens: sum of the lengths.
        fill: `num_tokens` over the capacity of all bins, 0 to 1; 1 without bins.
    """

    num_rows: int
    num_bins: int
    num_tokens: int
    fill: float


class Packer(ABC):
    """Packs rows by length; see the invariants above.

    `metrics` describes the latest `pack` where they are collected, and is None otherwise.
    """

    def __init__(
        self,
        bin_capacity: int,
        collect_metrics: bool = False,
        min_bin_count: int | None = None,
        bin_count_multiple: int | None = None,
    ):
        if bin_capacity < 1:
            raise UserError(f"bin_capacity is {bin_capacity}, at least 1 token is needed")
        if min_bin_count is not None and min_bin_count < 0:
            raise UserError(f"min_bin_count is {min_bin_count}, at least 0 is needed")
        if bin_count_multiple is not None and bin_count_multiple < 1:
            raise UserError(f"bin_count_multiple is {bin_count_multiple}, at least 1 is needed")
        self.bin_capacity = bin_capacity
        self.collect_metrics = collect_metrics
        self.min_bin_count = min_bin_count or 0
        self.bin_count_multiple = bin_count_multiple or 1
        self.metrics: PackingMetrics | None = None

    def pack(self, lengths: Sequence[int]) -> list[Bin]:
        """Bins of row indices.

        Raises:
            UserError: a length is below 0 or over the capacity (names the row and both numbers), or there are fewer
                rows than bins are needed.
        """
        for index, length in enumerate(lengths):
            if not 0 <= length <= self.bin_capacity:
                raise UserError(f"row {index} has {length} tokens, a pack holds 0 to {self.bin_capacity}")
        bins = self._place(lengths) if lengths else []
        wanted = max(len(bins), self.min_bin_count)
        wanted += -wanted % self.bin_count_multiple
        if wanted > len(lengths):
            raise UserError(
                f"{len(lengths)} rows can't fill {wanted} packs; at least {self.min_bin_count} packs in multiples of "
                f"{self.bin_count_multiple} are asked for"
            )
        _split_fullest(bins, wanted, lengths)
        if self.collect_metrics:
            num_tokens = sum(lengths)
            fill = num_tokens / (len(bins) * self.bin_capacity) if bins else 1.0
            self.metrics = PackingMetrics(len(lengths), len(bins), num_tokens, fill)
        return bins

    @abstractmethod
    def _place(self, lengths: Sequence[int]) -> list[Bin]:
        """Bins within the capacity, as many as the algorithm makes of at least one row."""


class ConcatenativePacker(Packer):
    """See `PackingAlgorithm.CONCATENATIVE`."""

    def _place(self, lengths: Sequence[int]) -> list[Bin]:
        bins: list[Bin] = [[]]
        used = 0
        for index, length in enumerate(lengths):
            if used + length > self.bin_capacity:
                bins.append([])
                used = 0
            bins[-1].append(index)
            used += length
        return bins


class FirstFitDecreasingPacker(Packer):
    """See `PackingAlgorithm.FIRST_FIT_DECREASING`."""

    def _place(self, lengths: Sequence[int]) -> list[Bin]:
        return _first_fit(lengths, _longest_first(lengths), self.bin_capacity)


class FirstFitShufflePacker(Packer):
    """See `PackingAlgorithm.FIRST_FIT_SHUFFLE`. The order depends on nothing but the number of rows."""

    def _place(self, lengths: Sequence[int]) -> list[Bin]:
        order = list(range(len(lengths)))
        random.Random(len(lengths)).shuffle(order)
        return _first_fit(lengths, order, self.bin_capacity)


class ModifiedFirstFitDecreasingPacker(Packer):
    """See `PackingAlgorithm.MODIFIED_FIRST_FIT_DECREASING`."""

    def _place(self, lengths: Sequence[int]) -> list[Bin]:
        capacity = self.bin_capacity
        rest = sorted((length, index) for index, length in enumerate(lengths))
        first_large = bisect_right(rest, (capacity // 2, len(lengths)))
        large = rest[first_large:][::-1]
        del rest[first_large:]
        bins = [[index] for _, index in large]
        room = [capacity - length for length, _ in large]

        def put(number: int, position: int) -> None:
            length, index = rest.pop(position)
            bins[number].append(index)
            room[number] -= length

        def longest_within(limit: int) -> int:
            """The position in `rest` of the longest row of at most `limit` tokens, -1 without one."""
            return bisect_right(rest, (limit, len(lengths))) - 1

        # Forward: the longest row over a third of the capacity that fits.
        for number in range(len(bins)):
            position = longest_within(room[number])
            if position >= 0 and 3 * rest[position][0] > capacity:
                put(number, position)
        # Backward, where none did: the shortest row over a sixth and beside it the longest that fits, up to a third.
        for number in reversed(range(len(bins))):
            shortest = bisect_right(rest, (capacity // 6, len(lengths)))
            if len(bins[number]) > 1 or shortest + 1 >= len(rest):
                continue
            partner = longest_within(min(room[number] - rest[shortest][0], capacity // 3))
            if partner > shortest:
                put(number, partner)
                put(number, shortest)
        # Forward: whatever fits, longest first.
        for number in range(len(bins)):
            while (position := longest_within(room[number])) >= 0:
                put(number, position)
        return bins + _first_fit(lengths, [index for _, index in reversed(rest)], capacity)


_PACKERS: dict[PackingAlgorithm, type[Packer]] = {
    PackingAlgorithm.CONCATENATIVE: ConcatenativePacker,
    PackingAlgorithm.FIRST_FIT_DECREASING: FirstFitDecreasingPacker,
    PackingAlgorithm.FIRST_FIT_SHUFFLE: FirstFitShufflePacker,
    PackingAlgorithm.MODIFIED_FIRST_FIT_DECREASING: ModifiedFirstFitDecreasingPacker,
}


def get_packer(
    algorithm: PackingAlgorithm | str,
    bin_capacity: int,
    collect_metrics: bool = False,
    min_bin_count: int | None = None,
    bin_count_multiple: int | None = None,
) -> Packer:
    """The packer of an algorithm, given as a member of `PackingAlgorithm` or its name in any case.

    Args:
        algorithm: how rows are placed.
        bin_capacity: tokens that a bin holds, at least 1.
        collect_metrics: keep `packer.metrics` of the latest call.
        min_bin_count: the least number of bins; fuller bins are split to reach it.
        bin_count_multiple: the number of bins is a multiple of this.

    Raises:
        UserError: an unknown name (lists the known ones) or a count out of range.
    """
    if isinstance(algorithm, str):
        known = {member.name.lower(): member for member in PackingAlgorithm}
        if algorithm.lower() not in known:
            raise UserError(f"packing algorithm {algorithm!r} is unknown; known are {', '.join(known)}")
        algorithm = known[algorithm.lower()]
    return _PACKERS[algorithm](bin_capacity, collect_metrics, min_bin_count, bin_count_multiple)


def _longest_first(lengths: Sequence[int]) -> list[int]:
    """Indices by falling length; equal lengths keep their order."""
    return sorted(range(len(lengths)), key=lambda index: -lengths[index])


def _first_fit(lengths: Sequence[int], order: Sequence[int], capacity: int) -> list[Bin]:
    """Each row of `order` into the first bin with room for it."""
    bins: list[Bin] = []
    room: list[int] = []
    for index in order:
        length = lengths[index]
        number = next((number for number, left in enumerate(room) if left >= length), None)
        if number is None:
            bins.append([index])
            room.append(capacity - length)
        else:
            bins[number].append(index)
            room[number] -= length
    return bins


def _split_fullest(bins: list[Bin], wanted: int, lengths: Sequence[int]) -> None:
    """Add bins up to `wanted`, each with the longest row of the fullest bin that holds several.

    Taking the longest leaves the smaller of the possible maxima of what stays and what goes.
    """
    while len(bins) < wanted:
        fullest = max((bin_ for bin_ in bins if len(bin_) > 1), key=lambda bin_: sum(lengths[i] for i in bin_))
        longest = max(fullest, key=lambda index: lengths[index])
        fullest.remove(longest)
        bins.append([longest])

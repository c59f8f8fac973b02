"""Rows that lie with their replicas, evened out: which of them change places so that no replica has far more tokens.

Replicas draw their own rows, so their token counts differ, and every step takes as long as the fullest of them. A few
rows that change places even that out. Pure functions of metadata; the workers move the rows, see
`distributed/row_exchange`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from nemo_rl.data_plane.interfaces import KVBatchMeta
from nemo_rl.data_plane.schema import ROW_MOVES

# A difference of less than this part of a replica's tokens is left as it is.
_TOLERANCE = 0.01
# Each round pairs the fullest replica with the emptiest, the second with the last but one, and so on.
_ROUNDS = 4


@dataclass(frozen=True)
class RowMove:
    """Row number `row` of replica `source` is computed by replica `target`."""

    source: int
    row: int
    target: int


def plan_moves(lengths: Sequence[Sequence[int]]) -> list[RowMove]:
    """Moves after which the replicas have about equally many tokens; each row moves at most once.

    In a pair of replicas one row changes sides, or two change places: what leaves the smallest difference. Grows with
    n log n in rows and replicas. The same lengths give the same moves.

    Args:
        lengths: tokens of each row, by replica.
    """
    loads = [sum(rows) for rows in lengths]
    tolerance = _TOLERANCE * sum(loads) / max(1, len(loads))
    unmoved = [sorted((length, row) for row, length in enumerate(rows)) for rows in lengths]
    moves: list[RowMove] = []
    for _ in range(_ROUNDS):
        order = sorted(range(len(loads)), key=lambda replica: loads[replica])
        before = len(moves)
        for light, heavy in zip(order[: len(order) // 2], reversed(order), strict=False):
            gap = loads[heavy] - loads[light]
            if gap <= tolerance:
                break
            found = _best_exchange(unmoved[heavy], unmoved[light], gap)
            if found is None:
                continue
            for source, target, at in ((heavy, light, found[0]), (light, heavy, found[1])):
                if at is not None:
                    length, row = unmoved[source].pop(at)
                    loads[source] -= length
                    loads[target] += length
                    moves.append(RowMove(source, row, target))
        if len(moves) == before:
            break
    return moves


def _best_exchange(
    heavy: list[tuple[int, int]], light: list[tuple[int, int]], gap: int
) -> tuple[int, int | None] | None:
    """Places in both lists, sorted by length, whose exchange halves `gap` best; the second is None to give nothing.

    None where every exchange would leave the difference as great as it is, or greater.
    """
    best, best_left = None, gap
    for at, (length, _) in enumerate(heavy):
        for back, difference in _partners(light, length, gap):
            left = abs(gap - 2 * difference)
            if left < best_left:
                best, best_left = (at, back), left
    return best


def _partners(light: list[tuple[int, int]], length: int, gap: int) -> Iterator[tuple[int | None, int]]:
    """What may go back for a row of `length`, and by how much the load then falls: nothing, or what fits best."""
    yield None, length
    at = bisect_left(light, (length - gap // 2, 0))
    for place in (at - 1, at):
        if 0 <= place < len(light):
            yield place, length - light[place][0]


def level_placed_rows(metas: Sequence[KVBatchMeta]) -> list[KVBatchMeta]:
    """The metas of all replicas, each with the same moves under `row_moves` in `extra_info`, where there are any.

    Raises:
        ValueError: a meta without lengths.
    """
    without = [meta.partition_id for meta in metas if meta.sequence_lengths is None]
    if without:
        raise ValueError(f"partitions {without}: no sequence_lengths to level by")
    moves = plan_moves([meta.sequence_lengths or [] for meta in metas])
    if not moves:
        return list(metas)
    return [replace(meta, extra_info={**meta.extra_info, ROW_MOVES: moves}) for meta in metas]

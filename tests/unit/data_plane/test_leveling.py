"""Which rows change replicas, against exhaustive search and simple arithmetic."""

import copy
import itertools
import random

import pytest

from nemo_rl.data_plane.interfaces import KVBatchMeta
from nemo_rl.data_plane.leveling import RowMove, level_placed_rows, plan_moves


def loads_after(lengths: list[list[int]], moves: list[RowMove]) -> list[int]:
    loads = [sum(rows) for rows in lengths]
    for move in moves:
        loads[move.source] -= lengths[move.source][move.row]
        loads[move.target] += lengths[move.source][move.row]
    return loads


def skewed(rng: random.Random, rows: int) -> list[int]:
    return [int(min(1024, 64 + rng.expovariate(1 / 60))) for _ in range(rows)]


@pytest.mark.parametrize(
    ("lengths", "moves"),
    [
        ([[100, 50], [50, 100]], []),
        ([[100], [100, 1]], []),  # within the tolerance
        ([[10, 30, 20], [10]], [RowMove(0, 2, 1)]),
        ([[90, 10], [10, 10]], [RowMove(0, 1, 1)]),  # the long row would only change the sides
        ([[90, 30], [10, 30]], [RowMove(0, 1, 1)]),
        ([[70], [20]], []),
        ([[60, 60], [40, 40]], [RowMove(0, 0, 1), RowMove(1, 0, 0)]),  # two change places
        ([[5, 5, 5]], []),
        ([], []),
        ([[4, 4, 4], []], [RowMove(0, 0, 1)]),
    ],
)
def test_by_hand(lengths: list[list[int]], moves: list[RowMove]) -> None:
    found = plan_moves(lengths)
    assert loads_after(lengths, found) == loads_after(lengths, moves)
    assert len(found) == len(moves)


def test_one_exchange_between_two_replicas_is_the_best_there_is() -> None:
    rng = random.Random(3)
    for _ in range(200):
        heavy, light = ([rng.randint(1, 50) for _ in range(rng.randint(1, 6))] for _ in range(2))
        if sum(heavy) < sum(light):
            heavy, light = light, heavy
        gap = sum(heavy) - sum(light)
        best = min(
            [abs(gap - 2 * (i - j)) for i, j in itertools.product(heavy, [0, *light])],
            default=gap,
        )
        loads = loads_after([heavy, light], plan_moves([heavy, light]))
        tolerance = 0.01 * (sum(heavy) + sum(light)) / 2
        assert abs(loads[0] - loads[1]) <= max(min(best, gap), tolerance)


@pytest.mark.parametrize("replicas", [2, 3, 8, 64])
def test_a_row_moves_at_most_once_and_the_fullest_replica_has_little_more_than_the_mean(replicas: int) -> None:
    rng = random.Random(replicas)
    before, after = [], []
    for _ in range(20):
        lengths = [skewed(rng, 16) for _ in range(replicas)]
        moves = plan_moves(lengths)
        assert moves == plan_moves(copy.deepcopy(lengths))
        assert len({(move.source, move.row) for move in moves}) == len(moves)
        assert all(move.source != move.target for move in moves)
        loads = loads_after(lengths, moves)
        mean = sum(loads) / replicas
        assert sum(loads) == sum(map(sum, lengths))
        before.append(max(map(sum, lengths)) / mean)
        after.append(max(loads) / mean)
    assert max(after) < 1.03, "one of 20 steps"
    assert sum(after) < sum(before)


def test_the_metas_carry_the_same_moves_and_stay_as_they_were() -> None:
    def meta(replica: int, lengths: list[int] | None) -> KVBatchMeta:
        ids = [f"p{replica}_{row}" for row in range(3)]
        return KVBatchMeta(f"p{replica}", "train", ids, sequence_lengths=lengths, extra_info={"width": 40})

    metas = [meta(0, [10, 30, 20]), meta(1, [2, 2, 2])]
    kept = copy.deepcopy(metas)
    leveled = level_placed_rows(metas)
    assert metas == kept
    moves = plan_moves([[10, 30, 20], [2, 2, 2]])
    assert [part.extra_info for part in leveled] == [{"width": 40, "row_moves": moves}] * 2
    assert [part.sample_ids for part in leveled] == [part.sample_ids for part in metas]
    assert level_placed_rows([meta(0, [7, 7, 7]), meta(1, [7, 7, 7])]) == [meta(0, [7, 7, 7]), meta(1, [7, 7, 7])]
    with pytest.raises(ValueError, match="'p1'"):
        level_placed_rows([metas[0], meta(1, None)])

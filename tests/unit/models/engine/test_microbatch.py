"""Packs against the rows they were made of."""

import pytest
import torch
from tiny import make_rows

from nemo_rl.models.engine.attention import DocumentGroup
from nemo_rl.models.engine.microbatch import build_pack, plan_packs


@pytest.mark.parametrize("budget", [5, 40, 64, 10_000])
def test_plan_places_every_row_once_and_keeps_the_budget(budget: int) -> None:
    lengths = [7, 30, 7, 12, 1, 40, 30, 64]
    groups = plan_packs(lengths, budget)
    assert sorted(i for group in groups for i in group) == list(range(len(lengths)))
    for group in groups:
        assert sum(lengths[i] for i in group) <= budget or len(group) == 1
        assert [lengths[i] for i in group] == sorted(lengths[i] for i in group)


def test_plan_of_nothing_is_empty() -> None:
    assert plan_packs([], 10) == []


def test_b07_borders_positions_and_targets() -> None:
    batch = {"input_ids": torch.tensor([[11, 12, 13], [21, 22, 0]]), "input_lengths": torch.tensor([3, 2])}
    targets = torch.tensor([[False, True, True], [False, True, False]])
    pack = build_pack(batch, [0, 1], targets)
    assert pack.input_ids.tolist() == [[11, 12, 13, 21, 22]]
    assert pack.position_ids.tolist() == [[0, 1, 2, 0, 1]]
    assert pack.documents.groups == (DocumentGroup(0, 3, 1), DocumentGroup(3, 5, 1))
    assert pack.targets.tolist() == [12, 13, 22]  # never 13 -> 21
    # Token mean 2.0 of the per-target losses A [0.5, 1.5] and B [4.0].
    rows = pack.to_rows(torch.tensor([0.5, 1.5, 4.0]), 3)
    assert rows.tolist() == [[0.0, 0.5, 1.5], [0.0, 4.0, 0.0]]
    assert rows.sum().item() / 3 == 2.0


def test_a_rounded_pack_has_the_same_targets() -> None:
    batch = {"input_ids": torch.tensor([[11, 12, 13], [21, 22, 0]]), "input_lengths": torch.tensor([3, 2])}
    targets = torch.tensor([[False, True, True], [False, True, False]])
    pack, plain = build_pack(batch, [0, 1], targets, 4), build_pack(batch, [0, 1], targets)
    assert pack.input_ids.tolist() == [[11, 12, 13, 21, 22, 0, 0, 0]]
    assert pack.position_ids.tolist() == [[0, 1, 2, 0, 1, 0, 0, 0]]
    assert pack.head_positions.tolist() == [*plain.head_positions.tolist(), 0]
    assert pack.targets.tolist() == plain.targets.tolist()
    assert pack.documents.groups == plain.documents.groups


def test_b03_pad_equal_to_eos_is_masked_by_position() -> None:
    batch = {"input_ids": torch.tensor([[5, 6, 7, 2, 2, 2]]), "input_lengths": torch.tensor([4])}
    wanted = torch.tensor([[False, False, True, True, True, True]])  # a mask by value would stop at the real end
    pack = build_pack(batch, [0], wanted)
    assert pack.head_positions.tolist() == [1, 2]
    assert pack.targets.tolist() == [7, 2]


def test_pack_equals_rows_end_to_end() -> None:
    rows = make_rows(9, seed=3)
    mask = rows["token_mask"] > 0
    order = sorted(range(9), key=lambda i: int(rows["input_lengths"][i]))
    pack = build_pack(rows, order, mask)
    at = 0
    targets = []
    for i in order:
        length = int(rows["input_lengths"][i])
        assert pack.input_ids[0, at : at + length].tolist() == rows["input_ids"][i, :length].tolist()
        assert pack.position_ids[0, at : at + length].tolist() == list(range(length))
        targets += [int(rows["input_ids"][i, t]) for t in range(length) if mask[i, t]]
        at += length
    assert pack.targets.tolist() == targets
    assert sum(group.count for group in pack.documents.groups) == 9

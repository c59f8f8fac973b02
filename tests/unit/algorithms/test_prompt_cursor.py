"""Where a run stands: the next prompt, and the counters that a checkpoint keeps.

Not covered: the prompts themselves (`tests/unit/data/test_prompts.py`).
"""

import json
import pickle
from dataclasses import asdict, fields
from typing import Any

import pytest

from nemo_rl.algorithms.single_controller_utils.prompt_cursor import PromptCursor
from nemo_rl.algorithms.single_controller_utils.state import SaveState
from nemo_rl.experience.interfaces import GroupOrder


def cursor(**more: Any) -> PromptCursor:
    return PromptCursor(**{"num_prompts": 5, "num_generations": 3, "seed": 1, "shuffle": True, "max_epochs": 4, **more})


def take(one: PromptCursor, count: int) -> list[GroupOrder]:
    return [one.next(weight_version=2, target_step=None) for _ in range(count)]


@pytest.mark.parametrize("num_prompts", [1, 5, 17])
def test_each_prompt_comes_once_per_pass_and_each_pass_has_an_order_of_its_own(num_prompts: int) -> None:
    one = cursor(num_prompts=num_prompts)
    passes = [[order.prompt_index for order in take(one, num_prompts)] for _ in range(4)]
    assert all(sorted(order) == list(range(num_prompts)) for order in passes)
    if num_prompts > 1:
        assert len({tuple(order) for order in passes}) > 1


def test_without_shuffling_prompts_come_as_they_stand_in_the_file() -> None:
    assert [order.prompt_index for order in take(cursor(shuffle=False), 12)] == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1]


def test_the_border_of_passes() -> None:
    one = cursor(max_epochs=2)
    seen = []
    for _ in range(10):
        seen.append((one.epoch, one.is_exhausted))
        take(one, 1)
    assert seen == [(0, False)] * 5 + [(1, False)] * 5
    assert (one.epoch, one.is_exhausted, one.position) == (2, True, 10)


def test_an_order_depends_on_seed_and_position_alone() -> None:
    whole = take(cursor(), 20)
    for position in range(20):
        assert take(cursor(position=position), 20 - position) == whole[position:]
    assert take(cursor(seed=2), 20) != whole
    assert take(cursor(num_generations=4), 1)[0].seed == whole[0].seed


@pytest.mark.parametrize("taken", [0, 3, 5, 7])
def test_a_pickled_cursor_goes_on_where_it_was(taken: int) -> None:
    one = cursor()
    take(one, taken)
    again = pickle.loads(pickle.dumps(one))
    assert take(again, 9) == take(one, 9)


def test_an_order_holds_what_was_asked_for() -> None:
    order = cursor().next(weight_version=6, target_step=8)
    assert (order.num_generations, order.weight_version, order.target_step) == (3, 6, 8)
    assert GroupOrder(**json.loads(json.dumps(asdict(order)))) == order


def test_seeds_differ_and_are_no_larger_than_a_random_generator_takes() -> None:
    seeds = [order.seed for order in take(cursor(num_prompts=1000, max_epochs=99), 20_000)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**56 for seed in seeds)


@pytest.mark.parametrize("position", [0, 9, 99_998, 10**9 - 3, 10**11])
def test_group_ids_sort_as_they_are_handed_out(position: int) -> None:
    names = [order.group_id for order in take(cursor(num_prompts=7, position=position, max_epochs=10**12), 6)]
    assert names == sorted(names)
    assert len(set(names)) == 6
    assert take(cursor(position=0), 1)[0].group_id < names[-1]


def test_counters_go_through_json() -> None:
    state = SaveState(
        total_steps=3,
        policy_updates=5,
        consumed_samples=24,
        total_valid_tokens=99,
        prompts_ordered=20,
        ordered_steps=5,
        dropped_prompts=1,
        skipped_in_a_row=2,
        dropped={"stale": 4},
        skipped_steps={"non_finite_gradient": 2},
    )
    assert all(getattr(state, one.name) for one in fields(state))
    assert SaveState.restore(json.loads(json.dumps(asdict(state)))) == state


def test_keys_of_a_checkpoint_that_are_no_counters_are_ignored() -> None:
    saved = {"total_steps": 7, "val:val_reward": 0.5, "identity": {"seed": 1}, "of_a_later_version": [1]}
    assert SaveState.restore(saved) == SaveState(total_steps=7)
    assert SaveState.restore(None) == SaveState.restore({}) == SaveState()
    assert SaveState().dropped is not SaveState().dropped


def test_dropped_samples_are_added_by_reason() -> None:
    state = SaveState()
    for reason, count in (("stale", 2), ("overlong", 1), ("stale", 3), ("mask_sample", 0)):
        state.count_dropped(reason, count)
    assert state.dropped == {"stale": 5, "overlong": 1}

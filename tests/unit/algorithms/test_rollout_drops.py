"""Prompts whose rollout fails, with scripted workers: steps shrink, prompts are replaced, limits end the run.

Not covered: why a rollout fails (`tests/unit/experience`).
"""

import asyncio
import itertools

import pytest
from unit.algorithms.good_rl_config import ppo_config
from unit.algorithms.scripted_rollouts import Run, failing, failure, ids

from nemo_rl.experience.interfaces import GroupOrder
from nemo_rl.utils.errors import RunError


def test_a_prompt_that_fails_ends_the_run_by_default() -> None:
    run = Run(failure(), fate=failing(5))
    with pytest.raises(RunError, match=r"dropped for reward_error; 1 are more than .*max_skipped_prompts allows \(0\)"):
        run.go()
    assert run.state.dropped == {"reward_error": 1}


def test_a_step_shrinks_by_what_fails() -> None:
    run = Run(failure(max_skipped_prompts=3, min_step_batch_fraction=0.5), fate=failing(1, 6, 7)).go()
    assert run.steps == [
        ["g000000000000", "g000000000002", "g000000000003"],
        ["g000000000004", "g000000000005"],
        ids(8, 4),
        ids(12, 4),
        ids(16, 4),
    ]
    assert (run.state.dropped, run.state.dropped_prompts) == ({"reward_error": 3}, 3)


def test_the_limit_counts_over_the_run() -> None:
    run = Run(failure(max_skipped_prompts=2, min_step_batch_fraction=0.5), fate=failing(1, 6, 9))
    with pytest.raises(RunError, match=r"3 are more than .*max_skipped_prompts allows \(2\)"):
        run.go()
    assert len(run.steps) == 2


def test_a_step_with_too_few_left_ends_the_run() -> None:
    run = Run(failure(max_skipped_prompts=9, min_step_batch_fraction=0.75), fate=failing(4, 6))
    with pytest.raises(RunError, match=r"step 2: 2 of 4 prompts were dropped .*min_step_batch_fraction"):
        run.go()


@pytest.mark.parametrize(
    ("fraction", "prompts", "least"), [(0.55, 100, 55), (0.9, 10, 9), (0.07, 100, 7), (0.01, 4, 1)]
)
def test_the_least_share_is_exact(fraction: float, prompts: int, least: int) -> None:
    """In floating point 0.55 * 100 is more than 55."""
    config = ppo_config(
        ppo__num_prompts_per_step=prompts,
        async_rl__rollout_failure={"max_skipped_prompts": 1000, "min_step_batch_fraction": fraction},
    )
    pump = Run(config).pump
    pump._missing[3] = prompts - least
    assert pump.groups_of_step(3) == least
    assert pump.groups_of_step(2) == prompts
    pump._missing[3] += 1
    with pytest.raises(RunError, match="step 4"):
        pump.groups_of_step(3)


def test_a_whole_step_is_never_left_out() -> None:
    run = Run(failure(max_skipped_prompts=9, min_step_batch_fraction=0.01), fate=failing(0, 1, 2, 3))
    with pytest.raises(RunError, match="step 1: 4 of 4"):
        run.go()


@pytest.mark.parametrize("lookahead", [0, 1])
def test_a_prompt_that_fails_is_replaced_for_the_same_step(lookahead: int) -> None:
    """Also while no further step is admitted: the trainer waits for the replacement, and the gate for the trainer."""
    config = ppo_config(
        async_rl__sampler={"max_lookahead_versions": lookahead},
        async_rl__rollout_failure={"on_dropped_prompt": "replace"},
    )
    failed: set[int] = set()

    def fate(order: GroupOrder) -> str | None:
        if order.target_step in (1, 4) and order.target_step not in failed:
            failed.add(order.target_step)
            return "timeout"
        return None

    run = Run(config, fate=fate).go()
    assert [len(step) for step in run.steps] == [4] * 5
    assert (run.state.dropped, run.state.dropped_prompts, run.state.prompts_ordered) == ({"timeout": 2}, 0, 22)
    by_name = {order.group_id: order for order in run.orders}
    for number, step in enumerate(run.steps):
        assert [by_name[name].target_step for name in step] == [number] * 4
        assert step == sorted(step)
    assert len({order.prompt_index for order in run.orders}) == 22  # a new prompt each time, as it is the first pass


def test_a_replacement_may_fail_as_often_as_is_allowed() -> None:
    """Prompt 2 and two in its place fail; then the step shrinks, which counts once."""
    rule = {
        "on_dropped_prompt": "replace",
        "max_replacement_attempts": 2,
        "max_skipped_prompts": 1,
        "min_step_batch_fraction": 0.5,
    }
    left = iter(range(3))
    run = Run(
        failure(**rule), fate=lambda order: "x" if order.target_step == 0 and next(left, None) is not None else None
    )
    # One at a time, or the three that fail would be the first three prompts.
    run.pump._max_inflight = 1
    run.go()
    assert [len(step) for step in run.steps] == [4, 4, 4, 4, 4]
    chains = itertools.count()
    bad = {*ids(0, 1)}

    def fate(order: GroupOrder) -> str | None:
        replaced = int(order.group_id[1:]) >= 4 and order.target_step == 0
        return "x" if order.group_id in bad or (replaced and next(chains) < 2) else None

    run = Run(failure(**rule), fate=fate).go()
    assert [len(step) for step in run.steps] == [3, 4, 4, 4, 4]
    assert (run.state.dropped, run.state.dropped_prompts) == ({"x": 3}, 1)
    assert run.pump._replacing == {}


def test_too_many_failures_in_a_row_end_the_run_though_each_is_replaced() -> None:
    rule = {"on_dropped_prompt": "replace", "max_replacement_attempts": 99, "max_consecutive_dropped_prompts": 3}
    run = Run(failure(**rule), fate=lambda order: "engine_down" if int(order.group_id[1:]) >= 8 else None)
    with pytest.raises(RunError, match=r"4 prompts in a row were dropped, the last for engine_down"):
        run.go()
    assert run.state.dropped == {"engine_down": 4}


def test_failures_with_a_good_group_between_them_are_not_in_a_row() -> None:
    rule = {"on_dropped_prompt": "replace", "max_consecutive_dropped_prompts": 1, "max_skipped_prompts": 0}
    config = failure(**rule).model_copy(deep=True)
    config.async_rl.max_inflight_prompts = 1
    run = Run(config, workers=1, fate=failing(1, 6, 11)).go()
    assert run.state.dropped == {"reward_error": 3}
    assert [len(step) for step in run.steps] == [4] * 5


def test_the_last_prompts_of_a_step_fail_after_a_chunk_of_it_was_taken() -> None:
    """Then the groups that were taken are the step, and the pump says so."""
    wait = set(ids(2, 2))
    config = ppo_config(
        async_rl__min_groups_for_streaming_train=2,
        async_rl__rollout_failure={"max_skipped_prompts": 2, "min_step_batch_fraction": 0.5},
    )
    run = Run(config, max_steps=2, fate=failing(2, 3), holds=lambda order: order.group_id in wait)

    async def body() -> None:
        first = await run.next_chunk(chunk=2)
        assert first is not None
        assert first.size == 4
        assert run.pump.groups_of_step(0) == 4
        wait.clear()
        while run.state.dropped_prompts < 2:
            await asyncio.sleep(0.001)
        assert await run.next_chunk(have=2) is None
        run.state.total_steps = 1
        await run.train(chunk=2)

    run.go(body)
    assert sorted(run.steps[0]) == ids(4, 4)
    assert run.pump.buffer.size() == 0

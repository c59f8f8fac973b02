"""The controller's side of the rollouts with scripted workers: order, limits, and groups that get too old.

Prompts that fail are in `test_rollout_drops.py`, resuming in `test_rollout_resume.py`. Not covered: rows, Ray, and how
the controller calls the pumps.
"""

import asyncio
import time
from collections import Counter
from typing import Any

import pytest
from unit.algorithms.good_rl_config import ppo_config
from unit.algorithms.scripted_rollouts import Run, ids

from nemo_rl.experience.interfaces import GroupOrder
from nemo_rl.utils.errors import RunError

SAMPLERS: dict[str, dict[str, Any]] = {
    "in_order": {"name": "in_order", "max_lookahead_versions": 1},
    "ready_first": {"name": "ready_first", "max_staleness_versions": 1},
    "weight_fifo": {"name": "weight_fifo", "max_staleness_versions": 1},
    "windowed": {"name": "windowed", "max_staleness_versions": 1},
}


# -- in order ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("chunk", [None, 1, 3])
@pytest.mark.parametrize("lookahead", [0, 1, 2])
def test_each_step_trains_its_own_prompts_in_their_order(lookahead: int, chunk: int | None, workers: int) -> None:
    config = ppo_config(
        async_rl__sampler={"max_lookahead_versions": lookahead}, async_rl__min_groups_for_streaming_train=chunk
    )
    run = Run(config, workers=workers)

    async def body() -> None:
        while len(run.orders) < 4 * (lookahead + 1):
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.02)
        assert len(run.orders) == 4 * (lookahead + 1)
        await run.train(chunk=chunk)

    run.go(body)
    if chunk is None:
        assert run.steps == [ids(4 * step, 4) for step in range(5)]
    else:  # chunks are made of what is ready
        assert [sorted(step) for step in run.steps] == [ids(4 * step, 4) for step in range(5)]
    assert [order.group_id for order in sorted(run.orders, key=lambda order: order.group_id)] == ids(0, 20)
    assert (min(run.ahead), max(run.ahead)) == (0, lookahead)
    assert (run.state.ordered_steps, run.state.prompts_ordered, run.state.dropped) == (5, 20, {})
    assert run.cleared == []


def test_without_lookahead_every_sample_is_drawn_with_the_weights_that_it_trains() -> None:
    run = Run(ppo_config(async_rl__sampler={"max_lookahead_versions": 0})).go()
    for step, chunks in enumerate(run.chunks):
        assert {tag["weight_version"] for meta in chunks for tag in meta.tags or ()} == {step}


def test_prompts_come_once_per_pass_over_the_border_of_passes() -> None:
    run = Run(ppo_config(), prompts=7, max_steps=7).go()
    prompts = [order.prompt_index for order in sorted(run.orders, key=lambda order: order.group_id)]
    assert len(prompts) == 28
    for at in range(0, 28, 7):
        assert sorted(prompts[at : at + 7]) == list(range(7))
    assert run.cursor.epoch == 4


# -- limits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize(("max_inflight", "max_buffered"), [(1, None), (3, 9), (None, None), (50, 8)])
def test_limits_are_kept_and_every_step_comes(sampler: str, max_inflight: int | None, max_buffered: int | None) -> None:
    config = ppo_config(
        async_rl__sampler=SAMPLERS[sampler],
        async_rl__max_inflight_prompts=max_inflight,
        async_rl__max_buffered_rollouts=max_buffered,
    )
    run = Run(config, workers=3, max_steps=6)

    async def body() -> None:
        await asyncio.sleep(0.1)  # a trainer that is slower than the workers
        await run.train()

    run.go(body)
    capacity = max_buffered or 8
    assert run.most_in_work <= min(max_inflight or capacity, capacity)
    assert run.most_held <= capacity
    assert [len(step) for step in run.steps] == [4] * 6
    assert run.most_in_work == 1 if max_inflight == 1 else run.most_in_work > 1


def test_work_is_dealt_to_the_workers_with_the_least() -> None:
    counts: list[list[int]] = []
    run = Run(ppo_config(), workers=3, holds=lambda order: True)

    async def body() -> None:
        while len(run.orders) < 4:
            await asyncio.sleep(0.001)
        counts.append(sorted(len(work) for work in run.work))

    run.go(body)
    assert counts == [[1, 1, 2]]


def test_nothing_is_handed_out_while_weights_are_handed_over() -> None:
    run = Run(ppo_config(async_rl__sampler={"name": "windowed"}), max_steps=50)

    async def body() -> None:
        for _ in range(10):
            while run.pump.buffer.size() < 8:
                await asyncio.sleep(0.001)
            run.pump.may_dispatch.clear()
            await asyncio.sleep(0.003)  # a call that had begun
            before = len(run.orders)
            for _ in range(2):
                await run.next_chunk(chunk=1)
            await asyncio.sleep(0.02)
            assert len(run.orders) == before
            run.pump.may_dispatch.set()
            await asyncio.sleep(0.03)
            assert len(run.orders) == before + 2

    run.go(body)


def test_a_pump_that_has_nothing_to_do_leaves_the_processor_alone() -> None:
    run = Run(ppo_config(), max_steps=2)
    used: list[float] = []

    async def body() -> None:
        await run.train()
        cpu = time.process_time()
        await asyncio.sleep(0.5)
        used.append(time.process_time() - cpu)

    run.go(body)
    assert used[0] < 0.15
    assert len(run.orders) == 8


def test_what_a_worker_raises_ends_the_pumps() -> None:
    def fate(order: GroupOrder) -> str | None:
        raise RunError("rollout worker 0 died")

    run = Run(ppo_config(), fate=fate)
    with pytest.raises(RunError, match="worker 0 died"):
        run.go()


def test_a_finished_group_counts_as_a_sign_of_life() -> None:
    run = Run(ppo_config(), max_steps=1)
    before = run.pump.moved_at
    run.go()
    assert run.pump.moved_at > before


# -- samplers that order for no step ----------------------------------------------------------------------------------


@pytest.mark.parametrize("freshest", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_windowed_trains_no_old_sample_and_replaces_those_it_drops(seed: int, freshest: bool) -> None:
    """Each third group comes from weights three versions back; the run still gets all of its steps."""
    sampler = {"name": "windowed", "max_staleness_versions": 1, "sample_freshest_first": freshest}
    run = Run(
        ppo_config(async_rl__sampler=sampler),
        max_steps=8,
        seed=seed,
        lag=lambda order: 3 if int(order.group_id[1:]) % 3 == 0 else 0,
    ).go()
    assert [len(step) for step in run.steps] == [4] * 8
    for version, chunks in enumerate(run.chunks):
        assert all(version - tag["weight_version"] in (0, 1) for meta in chunks for tag in meta.tags or ())
    stale = run.state.dropped["stale"]
    assert stale > 3
    assert len(run.cleared) == len(set(run.cleared)) == 2 * stale
    trained = [name for step in run.steps for name in step]
    assert not {row.rpartition("_g")[0] for row in run.cleared} & set(trained)
    assert len(set(trained)) == 32
    assert run.state.dropped_prompts == 0  # nothing failed


@pytest.mark.parametrize("seed", range(3))
def test_weight_fifo_trains_one_version_per_chunk_and_does_not_wait_for_more_of_it(seed: int) -> None:
    """Orders of one step are drawn with different weights, as where they wait for a free place."""
    run = Run(
        ppo_config(async_rl__sampler=SAMPLERS["weight_fifo"]),
        max_steps=8,
        seed=seed,
        lag=lambda order: int(order.group_id[1:]) % 3 == 0,
    ).go()
    assert [len(step) for step in run.steps] == [4] * 8
    sizes = Counter()
    for version, chunks in enumerate(run.chunks):
        for meta in chunks:
            versions = {tag["weight_version"] for tag in meta.tags or ()}
            assert len(versions) == 1
            assert version - versions.pop() in (0, 1)
            sizes[meta.size // 2] += 1
    assert len(sizes) > 1


def test_ready_first_takes_what_comes_first() -> None:
    held = {*ids(0, 1)}
    run = Run(ppo_config(async_rl__sampler=SAMPLERS["ready_first"]), holds=lambda order: order.group_id in held)

    async def body() -> None:
        await run.train(until=1)
        held.clear()
        await run.train()

    run.go(body)
    assert ids(0, 1)[0] not in run.steps[0]
    assert sorted(name for step in run.steps for name in step) == ids(0, 20)

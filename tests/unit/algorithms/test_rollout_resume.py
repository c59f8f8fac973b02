"""A rollout pump that goes on from its saved state gives the orders that an uncut run gives; workers are scripted.

Not covered: the rows of groups that wait (`tests/unit/data_plane/test_row_files.py`).
"""

import asyncio
import json
import time
from dataclasses import asdict
from typing import Any

import pytest
from unit.algorithms.good_rl_config import ppo_config
from unit.algorithms.scripted_rollouts import FATE, Run, failing, failure, ids

from nemo_rl.algorithms.single_controller_utils.config import MasterConfig
from nemo_rl.algorithms.single_controller_utils.state import SaveState
from nemo_rl.experience.interfaces import GroupOrder
from nemo_rl.utils.errors import UserError


def cut(config: MasterConfig, *, done: set[int], steps: int, fate: FATE, **more: Any) -> tuple[dict[str, Any], Run]:
    """A run that trained `steps` steps, then finished only the groups `done`; what its checkpoint would hold."""
    names = {f"g{number:012d}" for number in done}
    run = Run(config, fate=fate, holds=lambda o: (o.target_step or 0) >= steps and o.group_id not in names, **more)

    async def body() -> None:
        await run.train(until=steps)
        limit = time.monotonic() + 5
        while run.pump.buffer.size() < len(done):
            assert time.monotonic() < limit
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.02)

    run.go(body)
    return json.loads(json.dumps({"waiting": run.pump.state_dict(), "state": asdict(run.state)})), run


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("max_inflight", [3, None])
def test_a_resumed_run_gives_the_same_orders_again(max_inflight: int | None, workers: int) -> None:
    """Cut with groups that wait, orders in work, orders in the queue and a prompt that is missing."""
    config = ppo_config(
        async_rl__sampler={"max_lookahead_versions": 2},
        async_rl__max_inflight_prompts=max_inflight,
        async_rl__rollout_failure={"max_skipped_prompts": 5, "min_step_batch_fraction": 0.5},
    )
    fate = failing(1, 9, 14)
    whole = Run(config, max_steps=8, fate=fate).go()
    saved, first = cut(config, done={8, 11}, steps=2, fate=lambda o: fate(o), max_steps=8, workers=2)
    in_work_or_queued = [order["group_id"] for order in saved["waiting"]["orders"]]
    # 9 is not held: whether it has failed already does not matter.
    assert in_work_or_queued == sorted(in_work_or_queued)
    assert {10, 12} <= {int(name[1:]) for name in in_work_or_queued}
    assert [group["group_id"] for group in saved["waiting"]["buffer"]["groups"]]
    again = Run(config, max_steps=8, fate=fate, state=SaveState.restore(saved["state"]), workers=workers)
    again.pump.load_state_dict(saved["waiting"])
    assert again.pump.buffer.groups == first.pump.buffer.groups
    again.go()
    count = len(in_work_or_queued)
    assert [order.group_id for order in again.orders[:count]] == in_work_or_queued or workers == 2
    assert sorted(order.group_id for order in again.orders) == in_work_or_queued + ids(
        saved["state"]["prompts_ordered"], 32 - saved["state"]["prompts_ordered"]
    )
    by_name = {order.group_id: order for order in whole.orders}
    for order in again.orders:
        twin = by_name[order.group_id]
        assert (order.prompt_index, order.seed, order.target_step) == (twin.prompt_index, twin.seed, twin.target_step)
    assert again.steps[2:] == whole.steps[2:]
    assert asdict(again.state) == asdict(whole.state)


def test_orders_come_back_as_they_were_given_whatever_worker_had_them() -> None:
    """With one at a time in work, the order of submission is the order in the state."""
    config = ppo_config(async_rl__sampler={"max_lookahead_versions": 1})
    saved, _ = cut(config, done=set(), steps=1, fate=failing(), workers=3, max_steps=4)
    names = [order["group_id"] for order in saved["waiting"]["orders"]]
    assert names == ids(4, 8)
    config.async_rl.max_inflight_prompts = 1
    again = Run(config, max_steps=4, state=SaveState.restore(saved["state"]))
    again.pump.load_state_dict(saved["waiting"])
    again.go()
    assert [order.group_id for order in again.orders] == ids(4, 12)
    assert again.steps[1:] == [ids(4, 4), ids(8, 4), ids(12, 4)]


def test_missing_prompts_and_spent_replacements_survive_a_cut() -> None:
    rule = {
        "on_dropped_prompt": "replace",
        "max_replacement_attempts": 1,
        "max_skipped_prompts": 2,
        "min_step_batch_fraction": 0.5,
    }
    config = failure(**rule)
    held: set[str] = set()

    def fate(order: GroupOrder) -> str | None:
        return "x" if order.group_id in {*ids(0, 2), *ids(4, 2)} else None

    # 0 and 1 fail; 4 and 5 come in their place. 4 fails and is missing, 5 is in work.
    run = Run(config, max_steps=1, fate=fate, holds=lambda o: o.group_id in {*ids(2, 2), *ids(5, 1)})

    async def body() -> None:
        while run.state.dropped_prompts < 1:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.01)

    run.go(body)
    saved = json.loads(json.dumps(run.pump.state_dict()))
    assert saved["missing"] == {"0": 1}
    assert saved["replacing"] == {ids(5, 1)[0]: 1}
    state = SaveState.restore(json.loads(json.dumps(asdict(run.state))))
    again = Run(config, max_steps=1, fate=fate, state=state, holds=lambda o: o.group_id in held)
    again.pump.load_state_dict(saved)
    assert again.pump.groups_of_step(0) == 3
    again.go()
    assert again.steps == [ids(2, 2)]
    assert (again.state.dropped, again.state.dropped_prompts) == ({"x": 4}, 2)


def test_a_state_of_another_group_size_is_refused() -> None:
    saved, _ = cut(ppo_config(), done={4}, steps=1, fate=failing(), max_steps=3)
    again = Run(ppo_config(), state=SaveState.restore(saved["state"]))
    again.cursor.num_generations = 4
    with pytest.raises(UserError, match="num_generations_per_prompt is 4"):
        again.pump.load_state_dict(saved["waiting"])

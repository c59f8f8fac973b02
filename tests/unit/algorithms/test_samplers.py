"""Which groups each sampler takes, drops and orders, against rules written as plain loops over random buffers.

Not covered: samplers beside running workers (`test_rollout_pump.py`).
"""

import asyncio
import random
from typing import Any

import pytest

from nemo_rl.algorithms.async_utils.replay_buffer import BufferedGroup, TQReplayBuffer
from nemo_rl.algorithms.async_utils.sampler_config import (
    CustomSamplerConfig,
    InOrderConfig,
    ReadyFirstConfig,
    WeightFifoConfig,
    WindowedConfig,
)
from nemo_rl.algorithms.async_utils.staleness_sampler import (
    InOrderSampler,
    ReadyFirstSampler,
    WeightFifoSampler,
    WindowedSampler,
    build_sampler,
)
from nemo_rl.data_plane.interfaces import KVBatchMeta
from nemo_rl.utils.errors import UserError

GATED = {"in_order": InOrderSampler, "ready_first": ReadyFirstSampler, "weight_fifo": WeightFifoSampler}


def group(number: int, version: int, target: int | None = None) -> BufferedGroup:
    name = f"g{number:03d}"
    ids = [f"{name}_g0", f"{name}_g1"]
    tags = [{"weight_version": version}] * 2
    meta = KVBatchMeta("rollouts", "train", ids, sequence_lengths=[number + 1, number + 2], tags=tags)
    return BufferedGroup(name, meta, version, version, target)


class Buffer(TQReplayBuffer):
    """Remembers which rows it had cleared."""

    def __init__(self, *groups: BufferedGroup):
        self.cleared: list[str] = []
        super().__init__("rollouts", self._clear, capacity=100)
        for one in groups:
            self.add(one)

    async def _clear(self, sample_ids: list[str]) -> None:
        self.cleared += sample_ids

    def names(self) -> list[str]:
        return [one.group_id for one in self.groups]


def rows(names: list[str]) -> list[str]:
    return [f"{name}_g{i}" for name in names for i in range(2)]


def select(sampler: Any, version: int, least: int, most: int) -> tuple[list[str], int]:
    meta, count = asyncio.run(
        sampler.select(current_train_weight=version, min_prompt_groups=least, max_prompt_groups=most)
    )
    return ([] if meta is None else meta.sample_ids), count


async def admitted(sampler: Any, version: int, limit: int) -> list[int | None]:
    """What `admit` answers until it waits, `limit` times at most."""
    stamps = []
    while len(stamps) < limit:
        try:
            stamps.append(await asyncio.wait_for(sampler.admit(trainer_version_fn=lambda: version), 0.03))
        except TimeoutError:
            break
    return stamps


@pytest.mark.parametrize("window", [0, 1, 3])
@pytest.mark.parametrize("name", GATED)
def test_at_most_window_steps_are_ordered_ahead(name: str, window: int) -> None:
    sampler = GATED[name](Buffer(), window)

    async def run() -> list[list[int | None]]:
        return [await admitted(sampler, version, 10) for version in (0, 1, 4)]

    expected = [range(window + 1), [window + 1], range(window + 2, window + 5)]
    stamped = name == "in_order"
    assert asyncio.run(run()) == [[step if stamped else None for step in steps] for steps in expected]


@pytest.mark.parametrize("window", [0, 2])
def test_a_waiting_admission_goes_on_when_the_trainer_does(window: int) -> None:
    sampler = InOrderSampler(Buffer(), window)
    sampler.set_dispatch_index(window + 1)
    version = 0

    async def run() -> int | None:
        nonlocal version
        waiting = asyncio.create_task(sampler.admit(trainer_version_fn=lambda: version))
        await asyncio.sleep(0.03)
        assert not waiting.done()
        version = 1
        return await asyncio.wait_for(waiting, 1)

    assert asyncio.run(run()) == window + 1


@pytest.mark.parametrize("name", GATED)
def test_a_resumed_gate_goes_on_behind_the_steps_that_were_ordered(name: str) -> None:
    sampler = GATED[name](Buffer(), 1)
    with pytest.raises(ValueError, match="resume_from_step is -1"):
        sampler.set_dispatch_index(-1)
    sampler.set_dispatch_index(7)  # steps 0 to 6 were ordered, the trainer is at 6
    stamps = asyncio.run(admitted(sampler, 6, 5))
    assert stamps == ([7] if name == "in_order" else [None])
    sampler.set_dispatch_index(0)
    assert len(asyncio.run(admitted(sampler, 0, 5))) == 2


def test_the_windowed_sampler_never_waits() -> None:
    sampler = WindowedSampler(Buffer(), 1, freshest_first=False)
    assert asyncio.run(admitted(sampler, 0, 500)) == [None] * 500


def expected_choice(name: str, buffer: list[BufferedGroup], version: int, window: int) -> list[str]:
    """The rule of each sampler, group by group."""
    chosen: list[BufferedGroup] = []
    for one in buffer:
        in_window = version - window <= one.start_version <= version
        match name:
            case "in_order":
                fits = one.target_step == version
            case "ready_first":
                fits = one.start_version <= version
            case _:
                fits = in_window
        if fits:
            chosen.append(one)
    if name == "weight_fifo" and chosen:
        oldest = min(one.start_version for one in chosen)
        chosen = [one for one in chosen if one.start_version == oldest]
    if name == "in_order":
        chosen = sorted(chosen, key=lambda one: one.group_id)
    if name == "freshest":
        chosen = [one for v in range(version, -1, -1) for one in chosen if one.start_version == v]
    return [one.group_id for one in chosen]


def expected_stale(name: str, buffer: list[BufferedGroup], version: int, window: int) -> list[str]:
    stale = []
    for one in buffer:
        is_past = one.target_step is not None and one.target_step < version
        if name == "in_order" and is_past:
            stale.append(one.group_id)
        if name in ("weight_fifo", "windowed", "freshest") and one.start_version < version - window:
            stale.append(one.group_id)
    return stale


def make(name: str, buffer: TQReplayBuffer, window: int) -> Any:
    if name in ("windowed", "freshest"):
        return WindowedSampler(buffer, window, freshest_first=name == "freshest")
    return GATED[name](buffer, window)


@pytest.mark.parametrize("name", ["in_order", "ready_first", "weight_fifo", "windowed", "freshest"])
def test_choice_and_eviction_against_the_rules(name: str) -> None:
    rng = random.Random(name)
    taken = dropped = refused = 0
    for _ in range(200):
        version, window = rng.randint(0, 4), rng.randint(0, 2)
        numbers = rng.sample(range(100), rng.randint(0, 8))
        groups = [
            group(n, rng.randint(0, version + 1), rng.randint(0, 5) if name == "in_order" else None) for n in numbers
        ]
        buffer = Buffer(*groups)
        sampler = make(name, buffer, window)
        before = buffer.names()
        stale = expected_stale(name, buffer.groups, version, window)
        assert asyncio.run(sampler.evict(current_train_weight=version)) == len(stale)
        assert buffer.cleared == rows(stale)
        assert buffer.names() == [one for one in before if one not in stale]
        left = buffer.names()
        choice = expected_choice(name, buffer.groups, version, window)
        least = rng.randint(1, 3)
        most = rng.randint(least, 5)
        chosen = choice[:most] if len(choice) >= least else []
        assert select(sampler, version, least, most) == (rows(chosen), len(chosen))
        assert buffer.names() == [one for one in left if one not in chosen]
        assert buffer.cleared == rows(stale)  # the rows of what is chosen stay
        taken += len(chosen)
        dropped += len(stale)
        refused += 0 < len(choice) < least
    assert taken > 50 and refused > 10
    assert dropped > 50 or name == "ready_first"


def test_the_rows_of_a_choice_keep_lengths_and_tags() -> None:
    buffer = Buffer(group(5, 1), group(2, 0))
    sampler = WindowedSampler(buffer, 1, freshest_first=False)
    meta, count = asyncio.run(sampler.select(current_train_weight=1, min_prompt_groups=2, max_prompt_groups=2))
    assert count == 2
    assert meta is not None
    assert meta.sample_ids == ["g005_g0", "g005_g1", "g002_g0", "g002_g1"]
    assert meta.sequence_lengths == [6, 7, 3, 4]
    assert [tag["weight_version"] for tag in meta.tags or ()] == [1, 1, 0, 0]


def test_what_the_config_names_is_built() -> None:
    buffer = Buffer()
    samplers = {
        "in_order": build_sampler(InOrderConfig(max_lookahead_versions=2), buffer),
        "windowed": build_sampler(WindowedConfig(name="windowed", sample_freshest_first=True), buffer),
        "ready_first": build_sampler(ReadyFirstConfig(name="ready_first", max_staleness_versions=0), buffer),
        "weight_fifo": build_sampler(WeightFifoConfig(name="weight_fifo", max_staleness_versions=3), buffer),
    }
    assert [type(one) for one in samplers.values()] == [
        InOrderSampler,
        WindowedSampler,
        ReadyFirstSampler,
        WeightFifoSampler,
    ]
    assert [one.required_buffer_capacity(4) for one in samplers.values()] == [12, 8, 4, 16]
    assert [one.is_on_policy for one in samplers.values()] == [False, False, True, False]
    assert build_sampler(InOrderConfig(), buffer).is_on_policy


@pytest.mark.parametrize("name", ["in_order", "ready_first", "weight_fifo", "windowed"])
def test_work_is_hopeless_only_where_old_versions_are_dropped(name: str) -> None:
    sampler = make(name, Buffer(), 1)
    hopeless = [
        version
        for version in range(6)
        if sampler.should_abort_inflight(start_weight_version=version, current_train_weight=5)
    ]
    assert hopeless == ([0, 1, 2, 3] if name in ("weight_fifo", "windowed") else [])


class Reversed(WindowedSampler):
    """A user's sampler."""

    def __init__(self, buffer: TQReplayBuffer, depth: int):
        super().__init__(buffer, depth, freshest_first=False)


def test_a_class_of_the_user() -> None:
    config = CustomSamplerConfig.model_validate({"name": "custom", "target": f"{__name__}:Reversed", "depth": 3})
    sampler = build_sampler(config, Buffer())
    assert type(sampler).__name__ == "Reversed"
    assert sampler.required_buffer_capacity(2) == 8


@pytest.mark.parametrize("target", ["nowhere:Sampler", f"{__name__}:Nothing", "os", "", f"{__name__}:Reversed"])
def test_a_class_that_cannot_be_built_is_told_with_its_name(target: str) -> None:
    config = CustomSamplerConfig(name="custom", target=target)
    with pytest.raises(UserError, match=r"async_rl\.sampler\.target"):
        build_sampler(config, Buffer())

"""A rollout pump with scripted workers and a trainer that only takes groups, all in one process."""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from typing import Any

from unit.algorithms.good_rl_config import ppo_config

from nemo_rl.algorithms.async_utils.rollout_pump import RolloutPump
from nemo_rl.algorithms.single_controller_utils.config import MasterConfig
from nemo_rl.algorithms.single_controller_utils.prompt_cursor import PromptCursor
from nemo_rl.algorithms.single_controller_utils.state import SaveState
from nemo_rl.data_plane.interfaces import KVBatchMeta
from nemo_rl.experience.interfaces import GroupOrder, GroupResult

PARTITION = "rollouts"
FATE = Callable[[GroupOrder], str | None]
"""Why an order fails; None when it does not."""


def ready(order: GroupOrder, version: int) -> GroupResult:
    ids = [f"{order.group_id}_g{i}" for i in range(order.num_generations)]
    tags = [{"weight_version": version, "source_id": str(order.prompt_index)} for _ in ids]
    meta = KVBatchMeta(PARTITION, "train", ids, fields=["input_ids"], sequence_lengths=[5] * len(ids), tags=tags)
    return GroupResult(order.group_id, order.target_step, "ready", None, meta, version, version, (), 1)


def dropped(order: GroupOrder, reason: str) -> GroupResult:
    return GroupResult(order.group_id, order.target_step, "dropped", reason, None, -1, -1, (), 5, "gave up")


class Run:
    """A pump, its workers and a trainer that does nothing but take its groups.

    Args:
        fate: what becomes of an order.
        holds: whether an order stays in work for now.
        lag: versions by which the weights that draw an order are behind those of the trainer.
    """

    def __init__(
        self,
        config: MasterConfig,
        *,
        workers: int = 2,
        prompts: int = 100,
        max_steps: int = 5,
        fate: FATE = lambda order: None,
        holds: Callable[[GroupOrder], bool] = lambda order: False,
        lag: Callable[[GroupOrder], int] = lambda order: 0,
        state: SaveState | None = None,
        seed: int = 0,
    ):
        assert config.ppo is not None
        self.state = state or SaveState()
        self.max_steps = max_steps
        self.per_step = config.ppo.num_prompts_per_step
        self.cursor = PromptCursor(prompts, 2, 7, True, 50, position=self.state.prompts_ordered)
        self.pump = RolloutPump(
            config,
            prompts=self.cursor,
            state=self.state,
            max_steps=max_steps,
            num_workers=workers,
            partition_id=PARTITION,
            call_worker=self._call,
            call_stage=self._call,
            drop_rows=self._drop_rows,
        )
        self.fate, self.holds, self.lag = fate, holds, lag
        self.rng = random.Random(seed)
        self.work: list[list[tuple[GroupOrder, int]]] = [[] for _ in range(workers)]
        self.orders: list[GroupOrder] = []
        self.ahead: list[int] = []
        self.most_in_work = self.most_held = 0
        self.cleared: list[str] = []
        self.steps: list[list[str]] = [[] for _ in range(self.state.total_steps)]
        self.chunks: list[list[KVBatchMeta]] = [[] for _ in range(self.state.total_steps)]

    async def _call(self, worker: int, method: str, reason: str, **kwargs: Any) -> Any:
        work = self.work[worker]
        if method == "submit":
            for order in kwargs["orders"]:
                self.orders.append(order)
                self.ahead.append((order.target_step or 0) - self.state.total_steps)
                work.append((order, max(0, self.state.total_steps - self.lag(order))))
            self._look()
            return None
        assert method == "collect"
        await asyncio.sleep(0.001)
        until = time.monotonic() + 0.02
        done: list[tuple[GroupOrder, int]] = []
        while work and len(done) < kwargs["min_groups"] and time.monotonic() < until:
            await asyncio.sleep(0.001)
            self._look()
            free = [one for one in work if not self.holds(one[0]) and one not in done]
            done += self.rng.sample(free, min(len(free), 1, kwargs["max_groups"] - len(done)))
        for one in done:
            work.remove(one)
        return [dropped(o, reason) if (reason := self.fate(o)) else ready(o, version) for o, version in done]

    def _look(self) -> None:
        in_work = self.pump.num_inflight
        self.most_in_work = max(self.most_in_work, in_work)
        self.most_held = max(self.most_held, in_work + self.pump.buffer.size())

    async def _drop_rows(self, sample_ids: list[str]) -> None:
        await asyncio.sleep(0)
        self.cleared += sample_ids

    async def next_chunk(self, have: int = 0, chunk: int | None = None) -> KVBatchMeta | None:
        """The next groups of the step, None when those that were taken are all that it has."""
        while True:
            wanted = self.pump.groups_of_step(self.state.total_steps) - have
            if wanted <= 0:
                return None
            count = min(chunk or self.per_step, wanted)
            meta, taken = await self.pump.take(self.state.total_steps, count)
            if meta is not None:
                assert 1 <= taken <= count
                return meta
            await asyncio.sleep(0.001)

    async def train(self, until: int | None = None, chunk: int | None = None) -> None:
        """Steps as the controller takes them: chunks, a new version, and no orders while weights are handed over."""
        while self.state.total_steps < (self.max_steps if until is None else until):
            chunks: list[KVBatchMeta] = []
            while meta := await self.next_chunk(sum(meta.size for meta in chunks) // 2, chunk):
                chunks.append(meta)
            self.chunks.append(chunks)
            self.steps.append([row.rpartition("_g")[0] for meta in chunks for row in meta.sample_ids[::2]])
            self.state.total_steps += 1
            self.pump.may_dispatch.clear()
            await asyncio.sleep(0.003)
            self.pump.may_dispatch.set()

    def go(self, body: Callable[[], Awaitable[None]] | None = None, limit_s: float = 10.0) -> "Run":
        """Runs the pumps until the body, by default all steps, is done; what a pump raises is raised here."""

        async def main() -> None:
            self.pump.may_dispatch.set()
            trainer = asyncio.ensure_future((body or self.train)())
            tasks = [trainer, *(asyncio.ensure_future(pump) for pump in self.pump.pumps())]
            pending: set[Any] = set(tasks)
            try:
                async with asyncio.timeout(limit_s):
                    while not trainer.done():
                        done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                        for task in done:
                            task.result()
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

        asyncio.run(main())
        return self


def ids(first: int, count: int) -> list[str]:
    return [f"g{number:012d}" for number in range(first, first + count)]


def failing(*numbers: int) -> FATE:
    names = {f"g{number:012d}" for number in numbers}
    return lambda order: "reward_error" if order.group_id in names else None


def failure(**rule: Any) -> MasterConfig:
    return ppo_config(**{f"async_rl__rollout_failure__{key}": value for key, value in rule.items()})

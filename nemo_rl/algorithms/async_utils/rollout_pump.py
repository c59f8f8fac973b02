"""Ordering samples and taking them in: the controller's side of the rollouts, in orders and metas."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nemo_rl.algorithms.async_utils.replay_buffer import BufferedGroup, DropRows, TQReplayBuffer
from nemo_rl.algorithms.async_utils.staleness_sampler import build_sampler
from nemo_rl.algorithms.single_controller_utils.config import MasterConfig, algo_config, groups_per_chunk
from nemo_rl.algorithms.single_controller_utils.prompt_cursor import PromptCursor
from nemo_rl.algorithms.single_controller_utils.state import SaveState
from nemo_rl.data_plane.interfaces import KVBatchMeta
from nemo_rl.experience.interfaces import GroupOrder, GroupResult, SampleStats
from nemo_rl.utils.errors import RunError

log = logging.getLogger(__name__)

Call = Callable[..., Awaitable[Any]]

WAITING_FILE = "waiting.json"
ROWS_FOLDER = "rows"
_POLL_S = 0.005
# How long a worker waits for finished samples in one call. It serves one call at a time: where rollouts run ahead, the
# next orders and the new weights must not stand behind a long one.
_COLLECT_S, _COLLECT_AHEAD_S = 0.5, 0.05


class RolloutPump:
    """Keeps the rollout workers busy as far as the sampler admits, and holds what they finished.

    Args:
        prompts: which prompt comes next.
        state: the run's counters; orders and drops are counted there.
        max_steps: steps of the run.
        num_workers: rollout workers.
        call_worker: `(worker, method, reason, **kwargs)` to one of them.
        call_stage: `(method, reason, **kwargs)` to the process that keeps rows of waiting groups in files.
        drop_rows: clears rows of the partition.
    """

    def __init__(
        self,
        config: MasterConfig,
        *,
        prompts: PromptCursor,
        state: SaveState,
        max_steps: int,
        num_workers: int,
        partition_id: str,
        call_worker: Call,
        call_stage: Call,
        drop_rows: DropRows,
    ):
        rl = config.async_rl
        self._rule = rl.rollout_failure
        self._prompts, self._state, self._max_steps = prompts, state, max_steps
        self._call_worker, self._call_stage = call_worker, call_stage
        self._partition_id = partition_id
        self._groups_per_step = algo_config(config).num_prompts_per_step
        self._groups_per_collect = -(-groups_per_chunk(config) // num_workers)
        # The sampler says how much room it needs, and needs the buffer to be built.
        self.buffer = TQReplayBuffer(partition_id, drop_rows, capacity=0)
        self._sampler = build_sampler(rl.sampler, self.buffer)
        needed = self._sampler.required_buffer_capacity(self._groups_per_step)
        self._collect_s = _COLLECT_AHEAD_S if needed > self._groups_per_step else _COLLECT_S
        self.buffer.capacity = rl.max_buffered_rollouts or needed
        self._sampler.set_dispatch_index(state.ordered_steps)
        self._max_inflight = rl.max_inflight_prompts or self.buffer.capacity
        self._queue: deque[GroupOrder] = deque()
        self._inflight: list[dict[str, GroupOrder]] = [{} for _ in range(num_workers)]
        self._missing: dict[int, int] = {}  # per step, prompts that were dropped and not replaced
        self._replacing: dict[str, int] = {}  # per group that replaces one, which attempt it is
        self._dropped_in_a_row = 0
        self._env_sums: dict[str, float] = {}
        self._num_samples = self._retried_groups = 0
        self.may_dispatch = asyncio.Event()
        self.moved_at = time.monotonic()

    @property
    def num_inflight(self) -> int:
        """Prompts whose samples are in work."""
        return sum(len(orders) for orders in self._inflight)

    def pumps(self) -> list[Coroutine[Any, Any, None]]:
        """What has to run beside training: ordering, handing out, and collecting from each worker."""
        collecting = (self._collect_pump(worker) for worker in range(len(self._inflight)))
        return [self._order_pump(), self._dispatch_pump(), *collecting]

    def groups_of_step(self, step: int) -> int:
        """Prompts that a step trains, with those left out that were dropped and not replaced.

        Raises:
            RunError: too few are left.
        """
        wanted = self._groups_per_step - self._missing.get(step, 0)
        if wanted < 1 or wanted / self._groups_per_step < self._rule.min_step_batch_fraction:
            raise RunError(
                f"step {step + 1}: {self._groups_per_step - wanted} of {self._groups_per_step} prompts were dropped "
                "(async_rl.rollout_failure.min_step_batch_fraction)"
            )
        return wanted

    async def take(self, version: int, count: int) -> tuple[KVBatchMeta | None, int]:
        """The rows of `count` finished groups for the step, `(None, 0)` while there are fewer.

        There may be fewer where a sampler takes one version at a time: when enough wait and no more can come, those of
        the oldest version do not wait for others of it.
        """
        waiting = self.buffer.groups
        if evicted := await self._sampler.evict(current_train_weight=version):
            self._state.count_dropped("stale", evicted)
            # Others in their place, so that the last step finds its prompts.
            kept = {group.group_id for group in self.buffer.groups}
            self._order(sum(g.target_step is None and g.group_id not in kept for g in waiting), None)
        no_more = self.num_inflight == 0 and self.buffer.size() >= count
        least = 1 if no_more and not self.buffer.count_for_target_step(version) else count
        return await self._sampler.select(
            current_train_weight=version, min_prompt_groups=least, max_prompt_groups=count
        )

    def take_metrics(self) -> dict[str, float]:
        """What came in since the last call: `env/<name>`, means over the samples of what the environment reports, and
        `retried_groups`, those of which a sample took more than one attempt."""
        sums, self._env_sums, samples, self._num_samples = self._env_sums, {}, self._num_samples, 0
        retried, self._retried_groups = self._retried_groups, 0
        return {f"env/{name}": total / samples for name, total in sums.items()} | {"retried_groups": retried}

    def state_dict(self) -> dict[str, Any]:
        """As JSON values: the groups that wait, and the orders without a result, which a resumed run gives again."""
        orders = [order for orders in self._inflight for order in orders.values()] + list(self._queue)
        return {
            "buffer": self.buffer.state_dict(),
            # As they were given, whatever worker has them.
            "orders": [asdict(order) for order in sorted(orders, key=lambda order: order.group_id)],
            "missing": {str(step): count for step, count in self._missing.items()},
            "replacing": dict(self._replacing),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from `state_dict`; the rows of the groups are in the plane again.

        Raises:
            UserError: see `TQReplayBuffer.load_state_dict`.
        """
        self.buffer.load_state_dict(state["buffer"], expected_group_size=self._prompts.num_generations)
        self._queue.extend(GroupOrder(**order) for order in state["orders"])
        self._missing = {int(step): count for step, count in state["missing"].items()}
        self._replacing = dict(state["replacing"])

    async def save(self, folder: Path, waiting: dict[str, Any]) -> None:
        """Writes what `state_dict` gave, and the rows of its groups, to a new folder."""
        folder.mkdir()
        (folder / WAITING_FILE).write_text(json.dumps(waiting))
        ids = [sample_id for group in waiting["buffer"]["groups"] for sample_id in group["meta"]["sample_ids"]]
        if ids:
            where = {"partition_id": self._partition_id, "path": str((folder / ROWS_FOLDER).absolute())}
            await self._call_stage("save_rows", "saving rollouts", sample_ids=ids, **where)

    async def restore(self, folder: Path) -> None:
        """Continues from what `save` wrote: rows first, then groups and orders.

        Raises:
            UserError: see `load_state_dict`.
        """
        waiting = json.loads((folder / WAITING_FILE).read_text())
        if waiting["buffer"]["groups"]:
            path = str((folder / ROWS_FOLDER).absolute())
            await self._call_stage("load_rows", "restoring rollouts", path=path)
        self.load_state_dict(waiting)

    async def evaluate(self, num_prompts: int, batch_size: int) -> list[SampleStats]:
        """One sample of each of the first validation prompts, `batch_size` of them at once over all workers."""
        stats: list[SampleStats] = []
        workers = len(self._inflight)
        for first in range(0, num_prompts, batch_size):
            batch = list(range(first, min(first + batch_size, num_prompts)))
            parts = [batch[worker::workers] for worker in range(workers)]
            calls = [
                self._call_worker(worker, "evaluate", "validation", prompt_indices=part)
                for worker, part in enumerate(parts)
                if part
            ]
            for part_stats in await asyncio.gather(*calls):
                stats += part_stats
        return stats

    async def _order_pump(self) -> None:
        """Orders the samples of each step as soon as the sampler admits it."""
        while self._state.ordered_steps < self._max_steps:
            if self._queue:
                await asyncio.sleep(_POLL_S)
                continue
            target = await self._sampler.admit(trainer_version_fn=lambda: self._state.total_steps)
            self._order(self._groups_per_step, target)
            self._state.ordered_steps += 1

    async def _dispatch_pump(self) -> None:
        """Hands out what is ordered; apart from ordering, as a replacement must not wait until a step is admitted."""
        while True:
            if self._queue:
                await self._dispatch()
            else:
                await asyncio.sleep(_POLL_S)

    def _order(self, count: int, target: int | None) -> None:
        for _ in range(count):
            version = self._state.total_steps
            self._queue.append(self._prompts.next(weight_version=version, target_step=target))
        self._state.prompts_ordered = self._prompts.position

    async def _dispatch(self) -> None:
        """Hands queued orders to the workers with the fewest in work, as far as there is room."""
        await self.may_dispatch.wait()
        in_work = self.num_inflight
        room = min(self._max_inflight - in_work, self.buffer.capacity - self.buffer.size() - in_work)
        if room <= 0:
            await asyncio.sleep(_POLL_S)
            return
        shares: list[list[GroupOrder]] = [[] for _ in self._inflight]
        for _ in range(min(room, len(self._queue))):
            order = self._queue.popleft()
            worker = min(range(len(shares)), key=lambda i: len(self._inflight[i]))
            self._inflight[worker][order.group_id] = order
            shares[worker].append(order)
        calls = [
            self._call_worker(worker, "submit", "handing out prompts", orders=share)
            for worker, share in enumerate(shares)
            if share
        ]
        await asyncio.gather(*calls)

    async def _collect_pump(self, worker: int) -> None:
        """Takes finished groups from one worker, a chunk's worth at a time so that their rows are written together."""
        orders = self._inflight[worker]
        while True:
            if not orders:
                await asyncio.sleep(_POLL_S)
                continue
            results = await self._call_worker(
                worker,
                "collect",
                "collecting samples",
                max_groups=len(orders),
                min_groups=min(len(orders), self._groups_per_collect),
                timeout_s=self._collect_s,
            )
            for result in results:
                self._receive(orders.pop(result.group_id), result)

    def _receive(self, order: GroupOrder, result: GroupResult) -> None:
        self.moved_at = time.monotonic()
        if result.status == "ready" and result.meta is not None:
            self._dropped_in_a_row = 0
            self._replacing.pop(result.group_id, None)
            self._note(result)
            group = BufferedGroup(
                result.group_id, result.meta, result.start_version, result.end_version, order.target_step
            )
            self.buffer.add(group)
        else:
            self._drop(order, result.reason or "unknown")

    def _note(self, result: GroupResult) -> None:
        self._retried_groups += result.attempts > 1
        self._num_samples += len(result.samples)
        for sample in result.samples:
            for name, value in sample.env.items():
                self._env_sums[name] = self._env_sums.get(name, 0.0) + value

    def _drop(self, order: GroupOrder, reason: str) -> None:
        """Counts a prompt whose samples failed, and replaces it where the config says so.

        Raises:
            RunError: more were dropped than the config allows.
        """
        self._state.count_dropped(reason)
        self._dropped_in_a_row += 1
        log.warning("prompt %d (group %s) dropped: %s", order.prompt_index, order.group_id, reason)
        if 0 < self._rule.max_consecutive_dropped_prompts < self._dropped_in_a_row:
            raise RunError(
                f"{self._dropped_in_a_row} prompts in a row were dropped, the last for {reason} "
                "(async_rl.rollout_failure.max_consecutive_dropped_prompts)"
            )
        attempt = self._replacing.pop(order.group_id, 0) + 1
        may_replace = self._rule.on_dropped_prompt == "replace" and attempt <= self._rule.max_replacement_attempts
        if may_replace and not self._prompts.is_exhausted:
            self._order(1, order.target_step)
            self._replacing[self._queue[-1].group_id] = attempt
            return
        self._state.dropped_prompts += 1
        if self._state.dropped_prompts > self._rule.max_skipped_prompts:
            raise RunError(
                f"prompt {order.prompt_index} was dropped for {reason}; {self._state.dropped_prompts} are more than "
                f"async_rl.rollout_failure.max_skipped_prompts allows ({self._rule.max_skipped_prompts})"
            )
        step = self._state.total_steps if order.target_step is None else order.target_step
        self._missing[step] = self._missing.get(step, 0) + 1

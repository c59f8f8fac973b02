"""Samplers: when the rollouts of a step may be ordered, and which finished groups a step trains on.

A *version* is the number of finished steps; a group carries the version of the weights that drew its first token.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Protocol

from nemo_rl.algorithms.async_utils.replay_buffer import BufferedGroup, TQReplayBuffer
from nemo_rl.algorithms.async_utils.sampler_config import (
    InOrderConfig,
    ReadyFirstConfig,
    SamplerConfig,
    WeightFifoConfig,
    WindowedConfig,
)
from nemo_rl.data_plane.interfaces import KVBatchMeta
from nemo_rl.utils.dotted import build_object

_POLL_S = 0.005


class PromptGroupSampler(Protocol):
    """The rule of a run. `select` hands chosen groups over: they leave the buffer, their rows stay in the plane."""

    is_on_policy: bool
    """Every sample is drawn with the weights that it trains."""

    async def admit(self, *, trainer_version_fn: Callable[[], int]) -> int | None:
        """Return when the rollouts of one more step may be ordered; the step they are for, None where any will do."""
        ...

    async def select(
        self, *, current_train_weight: int, min_prompt_groups: int, max_prompt_groups: int
    ) -> tuple[KVBatchMeta | None, int]:
        """The rows of up to `max_prompt_groups` groups and their number; `(None, 0)` below `min_prompt_groups`."""
        ...

    async def evict(self, *, current_train_weight: int) -> int:
        """Drop the groups that will never be chosen, rows included; their number."""
        ...

    def should_abort_inflight(self, *, start_weight_version: int, current_train_weight: int) -> bool:
        """Whether a group in work will never be chosen."""
        ...

    def required_buffer_capacity(self, groups_per_step: int) -> int:
        """Groups that the buffer must be able to hold."""
        ...

    def set_dispatch_index(self, resume_from_step: int) -> None:
        """Continue as if the steps before `resume_from_step` had been ordered. Raises `ValueError` when negative."""
        ...


class _GatedSampler(ABC):
    """Orders at most `window` steps ahead of the trainer."""

    def __init__(self, buffer: TQReplayBuffer, window: int):
        self.buffer = buffer
        self.window = window
        self.is_on_policy = window == 0
        self._dispatched = -1

    async def admit(self, *, trainer_version_fn: Callable[[], int]) -> int | None:
        while self._dispatched >= trainer_version_fn() + self.window:
            await asyncio.sleep(_POLL_S)
        self._dispatched += 1
        return self._stamp(self._dispatched)

    def set_dispatch_index(self, resume_from_step: int) -> None:
        if resume_from_step < 0:
            raise ValueError(f"resume_from_step is {resume_from_step}; it can't be negative")
        self._dispatched = resume_from_step - 1

    def required_buffer_capacity(self, groups_per_step: int) -> int:
        return groups_per_step * (self.window + 1)

    async def select(
        self, *, current_train_weight: int, min_prompt_groups: int, max_prompt_groups: int
    ) -> tuple[KVBatchMeta | None, int]:
        groups = self._candidates(current_train_weight)[:max_prompt_groups]
        if not groups or len(groups) < min_prompt_groups:
            return None, 0
        self.buffer.release(groups)
        metas = [group.meta for group in groups]
        return metas[0].concat(*metas[1:]), len(groups)

    async def evict(self, *, current_train_weight: int) -> int:
        stale = [group for group in self.buffer.groups if self._is_stale(group, current_train_weight)]
        if stale:
            await self.buffer.discard(stale)
        return len(stale)

    def should_abort_inflight(self, *, start_weight_version: int, current_train_weight: int) -> bool:
        return False

    def _stamp(self, dispatched: int) -> int | None:
        return None

    @abstractmethod
    def _candidates(self, version: int) -> list[BufferedGroup]:
        """The groups that may be trained at `version`, the first choice first."""

    def _is_stale(self, group: BufferedGroup, version: int) -> bool:
        return False


class InOrderSampler(_GatedSampler):
    """Step `v` trains exactly the groups ordered for it, in the order of their orders."""

    def _stamp(self, dispatched: int) -> int | None:
        return dispatched

    def _candidates(self, version: int) -> list[BufferedGroup]:
        return sorted((g for g in self.buffer.groups if g.target_step == version), key=lambda group: group.group_id)

    def _is_stale(self, group: BufferedGroup, version: int) -> bool:
        return group.target_step is not None and group.target_step < version


class ReadyFirstSampler(_GatedSampler):
    """Whatever is ready, in order of arrival."""

    def _candidates(self, version: int) -> list[BufferedGroup]:
        return [group for group in self.buffer.groups if group.start_version <= version]


class WeightFifoSampler(_GatedSampler):
    """The groups of the oldest version in the window, and of that one only."""

    def _candidates(self, version: int) -> list[BufferedGroup]:
        inside = [group for group in self.buffer.groups if version - self.window <= group.start_version <= version]
        oldest = min((group.start_version for group in inside), default=version)
        return [group for group in inside if group.start_version == oldest]

    def _is_stale(self, group: BufferedGroup, version: int) -> bool:
        return group.start_version < version - self.window

    def should_abort_inflight(self, *, start_weight_version: int, current_train_weight: int) -> bool:
        return start_weight_version < current_train_weight - self.window


class WindowedSampler(WeightFifoSampler):
    """Any group of the window; rollouts are never held back."""

    def __init__(self, buffer: TQReplayBuffer, window: int, freshest_first: bool):
        super().__init__(buffer, window)
        self.freshest_first = freshest_first
        self.is_on_policy = False

    async def admit(self, *, trainer_version_fn: Callable[[], int]) -> int | None:
        return None

    def _candidates(self, version: int) -> list[BufferedGroup]:
        inside: Sequence[BufferedGroup] = [
            group for group in self.buffer.groups if version - self.window <= group.start_version <= version
        ]
        if self.freshest_first:
            return sorted(inside, key=lambda group: -group.start_version)
        return list(inside)


def build_sampler(config: SamplerConfig, buffer: TQReplayBuffer) -> PromptGroupSampler:
    """The sampler that `async_rl.sampler` names.

    Raises:
        UserError: a custom class that can't be imported or built.
    """
    match config:
        case InOrderConfig():
            return InOrderSampler(buffer, config.max_lookahead_versions)
        case WindowedConfig():
            return WindowedSampler(buffer, config.max_staleness_versions, config.sample_freshest_first)
        case ReadyFirstConfig():
            return ReadyFirstSampler(buffer, config.max_staleness_versions)
        case WeightFifoConfig():
            return WeightFifoSampler(buffer, config.max_staleness_versions)
    return build_object(config.target, "async_rl.sampler.target", buffer, **config.options())

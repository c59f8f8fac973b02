"""The finished groups that wait to be trained: metas in the controller, rows in the data plane."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

from nemo_rl.data_plane.interfaces import KVBatchMeta
from nemo_rl.utils.errors import UserError

DropRows = Callable[[list[str]], Awaitable[None]]


@dataclass(frozen=True)
class BufferedGroup:
    """The samples of one prompt, ready to be trained.

    Attributes:
        meta: their rows.
        start_version: version of the weights that drew the first token of the first sample.
        end_version: version of those that drew the last one.
        target_step: the step they were ordered for; None where any will do.
    """

    group_id: str
    meta: KVBatchMeta
    start_version: int
    end_version: int
    target_step: int | None


class TQReplayBuffer:
    """Groups in order of arrival. Their rows were written by the rollout workers; only `discard` touches the plane.

    Args:
        drop_rows: clears rows of the partition by id.
        capacity: most groups it may hold.
    """

    def __init__(self, partition_id: str, drop_rows: DropRows, capacity: int):
        self.partition_id = partition_id
        self.capacity = capacity
        self._drop_rows = drop_rows
        self._groups: dict[str, BufferedGroup] = {}

    @property
    def groups(self) -> list[BufferedGroup]:
        """The groups, oldest arrival first."""
        return list(self._groups.values())

    def size(self) -> int:
        """Number of groups."""
        return len(self._groups)

    def count_for_target_step(self, step: int) -> int:
        """Groups that were ordered for `step`."""
        return sum(group.target_step == step for group in self._groups.values())

    def add(self, group: BufferedGroup) -> None:
        """Takes a finished group.

        Raises:
            ValueError: it is here already, is of another partition, or there is no room.
        """
        if group.group_id in self._groups:
            raise ValueError(f"group {group.group_id} is in the buffer already")
        if group.meta.partition_id != self.partition_id:
            raise ValueError(f"group {group.group_id} is of partition {group.meta.partition_id!r}")
        if len(self._groups) >= self.capacity:
            raise ValueError(f"the buffer holds {self.capacity} groups (async_rl.max_buffered_rollouts) and is full")
        self._groups[group.group_id] = group

    def release(self, groups: Iterable[BufferedGroup]) -> None:
        """Hands groups over to the trainer: they leave the buffer, their rows stay."""
        for group in groups:
            del self._groups[group.group_id]

    async def discard(self, groups: Iterable[BufferedGroup]) -> None:
        """Drops groups with their rows."""
        gone = list(groups)
        self.release(gone)
        await self._drop_rows([sample_id for group in gone for sample_id in group.meta.sample_ids])

    def state_dict(self) -> dict[str, Any]:
        """The groups as JSON values."""
        return {"partition_id": self.partition_id, "groups": [asdict(group) for group in self._groups.values()]}

    def load_state_dict(self, state: dict[str, Any], *, expected_group_size: int) -> None:
        """Takes the groups of `state_dict`, whose rows are in the plane again. All is checked before any is taken.

        Raises:
            UserError: another partition, group size or a smaller capacity than was saved.
        """
        groups = [
            BufferedGroup(
                group_id=entry["group_id"],
                meta=KVBatchMeta(**entry["meta"]),
                start_version=entry["start_version"],
                end_version=entry["end_version"],
                target_step=entry["target_step"],
            )
            for entry in state["groups"]
        ]
        sizes = {group.meta.size for group in groups} - {expected_group_size}
        if state["partition_id"] != self.partition_id:
            raise UserError(f"the saved rollouts are of partition {state['partition_id']!r}, not {self.partition_id!r}")
        if sizes:
            raise UserError(
                f"the saved rollouts have {sorted(sizes)} samples per prompt, num_generations_per_prompt is "
                f"{expected_group_size}"
            )
        if len(groups) > self.capacity:
            raise UserError(
                f"{len(groups)} groups of rollouts were saved, async_rl.max_buffered_rollouts is {self.capacity}"
            )
        for group in groups:
            self.add(group)

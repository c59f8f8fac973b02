"""The plane as a controller may use it: metadata, never columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NoReturn

from nemo_rl.data_plane.interfaces import DataPlaneClient, KVBatchMeta

if TYPE_CHECKING:
    from tensordict import TensorDict


class ControlOnlyClient(DataPlaneClient):
    """Forwards what concerns ids, tags, partitions and cursors to `inner`, and refuses to read or write columns.

    A controller that holds this one can't become the way that the rows take. `traffic.PROCESS_TRAFFIC` counts the
    bytes of columns that went through its process all the same.
    """

    def __init__(self, inner: DataPlaneClient) -> None:
        self.process_local = inner.process_local
        self._inner = inner

    def register_partition(
        self, partition_id: str, fields: Sequence[str], num_samples: int, consumer_tasks: Sequence[str]
    ) -> None:
        self._inner.register_partition(partition_id, fields, num_samples, consumer_tasks)

    def claim_meta(
        self,
        partition_id: str,
        task_name: str,
        required_fields: Sequence[str],
        batch_size: int,
        blocking: bool = True,
        timeout_s: float = 60.0,
    ) -> KVBatchMeta:
        return self._inner.claim_meta(partition_id, task_name, required_fields, batch_size, blocking, timeout_s)

    def get_data(self, meta: KVBatchMeta, select_fields: Sequence[str] | None = None) -> TensorDict:
        """Always raises `RuntimeError`."""
        names = meta.fields if select_fields is None else select_fields
        _refuse("read", names or (), meta.partition_id)

    def check_consumption_status(self, partition_id: str, task_names: Sequence[str]) -> bool:
        return self._inner.check_consumption_status(partition_id, task_names)

    def put_samples(
        self,
        sample_ids: Sequence[str],
        partition_id: str,
        fields: TensorDict | None = None,
        tags: Sequence[Mapping[str, object]] | None = None,
    ) -> KVBatchMeta:
        """Writes tags.

        Raises:
            RuntimeError: there are columns to write.
        """
        if fields is not None:
            _refuse("write", [str(name) for name in fields.keys()], partition_id)  # noqa: SIM118  not its rows
        return self._inner.put_samples(sample_ids, partition_id, None, tags)

    def get_samples(self, sample_ids: Sequence[str], partition_id: str, select_fields: Sequence[str]) -> TensorDict:
        """Always raises `RuntimeError`."""
        _refuse("read", select_fields, partition_id)

    def get_meta(self, sample_ids: Sequence[str], partition_id: str) -> KVBatchMeta:
        return self._inner.get_meta(sample_ids, partition_id)

    def finish_partition(self, partition_id: str) -> None:
        self._inner.finish_partition(partition_id)

    def list_sample_ids(self, partition_id: str) -> list[str]:
        return self._inner.list_sample_ids(partition_id)

    def clear_samples(self, sample_ids: Sequence[str] | None, partition_id: str) -> None:
        self._inner.clear_samples(sample_ids, partition_id)

    def supports_checkpointing(self) -> bool:
        return self._inner.supports_checkpointing()

    def close(self) -> None:
        self._inner.close()


def _refuse(action: str, names: Sequence[str], partition_id: str) -> NoReturn:
    raise RuntimeError(
        f"the controller moves metadata only: it may not {action} columns {sorted(names)} of partition "
        f"{partition_id!r}; a worker does that"
    )

"""A bounded set of whole batches inside one process; nothing is shared between processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from threading import RLock
from typing import TYPE_CHECKING, Any

from nemo_rl.data_plane.adapters.local_partition import LocalPartition
from nemo_rl.data_plane.interfaces import DataPlaneClient, KVBatchMeta, LocalDataPlaneConfig
from nemo_rl.data_plane.schema import LOCAL_PARTITION_GENERATION

if TYPE_CHECKING:
    from tensordict import TensorDict


def is_local_batch_meta(meta: KVBatchMeta) -> bool:
    """Whether the rows of `meta` live in the process of one worker."""
    return LOCAL_PARTITION_GENERATION in meta.extra_info


class LocalDataPlaneClient(DataPlaneClient):
    """Keeps at most `max_partitions` batches, each written once, by reference.

    **Ownership.** Tensors are stored as given and handed out as they are: the writer gives them up, the readers must
    not write to them. The plane compares each tensor's version counter at every read and refuses a column that was
    changed in place. Changes through `.data` or a numpy view are not seen, nor those of tensors made in inference
    mode, which have no counter. So nothing is copied where a change is noticed; rows of plain objects have no counter
    and are copied on every write and read. The container handed out is the reader's own.

    **Order.** Reading all rows in the order of writing copies nothing, a range of them gives views, any other
    selection gathers. Every registration gets a generation number, which the metas carry: a meta kept from an earlier
    life of a partition name is refused.

    One writer thread and one reader thread may use the client at the same time. No call waits for data.

    Every call after `close` raises `RuntimeError`. An unknown partition raises `KeyError`, except where nothing is
    asked of it: clearing it does nothing, listing it gives no rows.
    """

    process_local = True

    def __init__(self, cfg: LocalDataPlaneConfig) -> None:
        self._max_partitions = cfg.max_partitions
        self._partitions: dict[str, LocalPartition] = {}
        self._registrations = 0
        self._closed = False
        self._lock = RLock()

    def register_partition(
        self, partition_id: str, fields: Sequence[str], num_samples: int, consumer_tasks: Sequence[str]
    ) -> None:
        """Takes one of the `max_partitions` places for a batch of `num_samples` rows.

        Raises:
            ValueError: the partition exists, `num_samples < 1`, duplicate columns or duplicate tasks.
            RuntimeError: all places are taken.
        """
        with self._lock:
            self._check_open()
            if partition_id in self._partitions:
                raise ValueError(f"partition {partition_id!r} exists already; clear it first")
            partition = LocalPartition(partition_id, self._registrations + 1, fields, num_samples, consumer_tasks)
            if len(self._partitions) >= self._max_partitions:
                raise RuntimeError(
                    f"no place for partition {partition_id!r}: {sorted(self._partitions)} are held and "
                    f"data_plane.max_partitions is {self._max_partitions}"
                )
            self._registrations += 1
            self._partitions[partition_id] = partition

    def put_samples(
        self,
        sample_ids: Sequence[str],
        partition_id: str,
        fields: TensorDict | None = None,
        tags: Sequence[Mapping[str, Any]] | None = None,
    ) -> KVBatchMeta:
        """Fills the partition, once, with all of its rows.

        The meta returned has no task; it carries the columns written, copies of the tags, the partition's generation
        and the lengths of the rows where `input_lengths` is among the columns.

        Raises:
            ValueError: filled already, duplicate ids, another number of ids, tags or rows than registered, an
                undeclared column, or nothing to write.
        """
        with self._lock:
            return self._partition(partition_id).fill(sample_ids, fields, tags)

    def claim_meta(
        self,
        partition_id: str,
        task_name: str,
        required_fields: Sequence[str],
        batch_size: int,
        blocking: bool = True,
        timeout_s: float = 60.0,
    ) -> KVBatchMeta:
        """The next rows for `task_name`, at most `batch_size`; never waits, because a batch is written whole.

        Raises:
            KeyError: the task is not registered or a required column has not been written.
        """
        with self._lock:
            return self._partition(partition_id).claim(task_name, required_fields, batch_size)

    def check_consumption_status(self, partition_id: str, task_names: Sequence[str]) -> bool:
        with self._lock:
            partition = self._partition(partition_id)
            return all(partition.is_consumed_by(task_name) for task_name in task_names)

    def get_data(self, meta: KVBatchMeta, select_fields: Sequence[str] | None = None) -> TensorDict:
        """The rows of `meta`; see `DataPlaneClient.get_data`.

        Raises:
            ValueError: also when the meta belongs to another life of the partition.
        """
        with self._lock:
            generation = self._partition(meta.partition_id).generation
            stamped = meta.extra_info.get(LOCAL_PARTITION_GENERATION)
            if stamped != generation:
                raise ValueError(
                    f"meta of generation {stamped} of partition {meta.partition_id!r}, which is at {generation}"
                )
            return super().get_data(meta, select_fields)

    def get_samples(self, sample_ids: Sequence[str], partition_id: str, select_fields: Sequence[str]) -> TensorDict:
        """The named columns of the given rows; see the class for what is shared with the store.

        Raises:
            ValueError: duplicate ids.
            KeyError: an unknown id or column.
            RuntimeError: a column was changed in place after it was written.
        """
        with self._lock:
            return self._partition(partition_id).select(sample_ids, select_fields)

    def list_sample_ids(self, partition_id: str) -> list[str]:
        with self._lock:
            self._check_open()
            return sorted(self._partitions[partition_id].sample_ids) if partition_id in self._partitions else []

    def clear_samples(self, sample_ids: Sequence[str] | None, partition_id: str) -> None:
        """Removes rows; with the last of them, or with None, the partition goes and its place is free."""
        with self._lock:
            self._check_open()
            if partition_id not in self._partitions:
                return
            partition = self._partitions[partition_id]
            partition.remove(sample_ids or ())
            if sample_ids is None or partition.is_used_up:
                del self._partitions[partition_id]

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._partitions.clear()

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the data plane is closed")

    def _partition(self, partition_id: str) -> LocalPartition:
        self._check_open()
        if partition_id not in self._partitions:
            raise KeyError(f"no partition {partition_id!r}; held are {sorted(self._partitions)}")
        return self._partitions[partition_id]

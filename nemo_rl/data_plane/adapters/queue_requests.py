"""What each call of a client asks of TransferQueue's controller and storage, as coroutines on the client's event loop.

TransferQueue numbers rows over all partitions and gives the number of a cleared row to the next new one. Two processes
that clear the same row at the same time, or a read beside the clearing of its row, can therefore touch the row that
follows: a row has one process that clears it, after its last reader.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nemo_rl.data_plane.adapters.row_codec import Row

# A partition without columns: one row per declared partition, whose tags are the declaration.
DECLARATIONS = "__partitions__"


@dataclass(frozen=True)
class RowRecords:
    """What the controller knows of rows, each list in the order of `sample_ids`.

    Attributes:
        columns: those that all of the rows have.
    """

    sample_ids: list[str]
    tags: list[dict[str, Any]]
    columns: list[str]


@dataclass(frozen=True)
class _Progress:
    """How far a task is: rows that are there, rows it was not given, those of them with all columns, absent columns."""

    present: int
    left: int
    ready: int
    absent: list[str]


class ColumnsOfBytes(dict[str, list[Row]]):
    """Columns as TransferQueue's storage takes them: by name, one object per row, with the number of rows beside."""

    def __init__(self, columns: Mapping[str, list[Row]], rows: int) -> None:
        super().__init__(columns)
        self.batch_size = (rows,)


class QueueRequests:
    """`queue` is TransferQueue's asynchronous client, `storage` the storage manager in it."""

    def __init__(self, queue: Any, storage: Any) -> None:
        self._queue = queue
        self._storage = storage

    async def declare(self, partition_id: str, declaration: Mapping[str, Any]) -> None:
        """Adds to the declaration of a partition."""
        meta = await self._queue.async_kv_retrieve_meta([partition_id], DECLARATIONS, create=True)
        meta.update_custom_meta([dict(declaration)])
        await self._queue.async_set_custom_meta(meta)

    async def declaration(self, partition_id: str) -> dict[str, Any]:
        """What was declared.

        Raises:
            KeyError: nothing was.
        """
        declared = (await self._queue.async_kv_list(DECLARATIONS)).get(DECLARATIONS, {})
        if partition_id not in declared:
            raise KeyError(f"no partition {partition_id!r}; declared are {sorted(declared)}")
        return declared[partition_id]

    async def put(
        self,
        sample_ids: list[str],
        partition_id: str,
        columns: Mapping[str, list[Row]],
        tags: list[dict[str, Any]] | None,
    ) -> list[dict[str, Any]]:
        """Writes tags, then columns: whoever finds a row by its columns finds its tags too. Returns all their tags."""
        meta = await self._queue.async_kv_retrieve_meta(sample_ids, partition_id, create=True)
        if tags is not None:
            meta.update_custom_meta(tags)
            await self._queue.async_set_custom_meta(meta)
        if columns:
            # Not the client's own `async_put`: it changes torch's thread count and sends back old tags over new ones.
            await self._storage.put_data(ColumnsOfBytes(columns, len(sample_ids)), meta)
        return meta.custom_meta

    async def get(self, sample_ids: list[str], partition_id: str, names: Sequence[str]) -> Any:
        """A `TensorDict` of the columns as bytes.

        Raises:
            KeyError: a row or a column is not there.
        """
        meta = await self._rows(sample_ids, partition_id)
        absent = [name for name in names if name not in meta.field_schema]
        if absent:
            raise KeyError(await self._absent_columns(meta, sample_ids, partition_id, absent))
        meta.clear_custom_meta()
        try:
            return await self._storage.get_data(meta.select_fields(list(names)))
        except KeyError as error:
            raise KeyError(
                f"partition {partition_id!r}: rows {_some(sample_ids)} were cleared while being read"
            ) from error

    async def describe(self, sample_ids: list[str], partition_id: str) -> RowRecords:
        """What is known of rows.

        Raises:
            KeyError: a row is not there.
        """
        meta = await self._rows(sample_ids, partition_id)
        return RowRecords(list(sample_ids), meta.custom_meta, list(meta.field_names))

    async def list_ids(self, partition_id: str) -> list[str]:
        """Ids of the rows of a partition, sorted."""
        return sorted((await self._queue.async_kv_list(partition_id)).get(partition_id, {}))

    async def clear(self, sample_ids: list[str], partition_id: str) -> None:
        """Removes rows, and leaves out those that are not there."""
        meta = await self._queue.async_kv_retrieve_meta(list(dict.fromkeys(sample_ids)), partition_id, create=False)
        if meta.size:
            await self._queue.async_clear_samples(meta)

    async def clear_partition(self, partition_id: str) -> None:
        """Removes a partition with its rows, cursors and declaration."""
        if partition_id in await self._queue.async_get_partition_list():
            await self._queue.async_clear_partition(partition_id)
        await self.clear([partition_id], DECLARATIONS)

    async def claim(
        self,
        partition_id: str,
        task: str,
        columns: list[str],
        batch_size: int,
        *,
        limit_s: float | None,
        poll_s: float,
    ) -> RowRecords:
        """The next rows of a task; none where `limit_s` is None and they are not there yet.

        Raises:
            KeyError: unknown partition or task.
            TimeoutError: they did not come within `limit_s` seconds.
        """
        deadline = time.monotonic() + (limit_s or 0.0)
        while True:
            declared = await self.declaration(partition_id)
            if task not in declared["tasks"]:
                raise KeyError(f"partition {partition_id!r} has no task {task!r}; it has {sorted(declared['tasks'])}")
            wanted = batch_size
            if declared["finished"]:
                wanted = min(batch_size, (await self._progress(partition_id, task, columns)).left)
            if wanted == 0:
                return RowRecords([], [], columns)
            meta = await self._queue.async_get_meta(columns, wanted, partition_id, mode="fetch", task_name=task)
            if meta.size:
                ids = await self._queue.async_kv_retrieve_keys(meta.global_indexes, partition_id)
                return RowRecords(ids, meta.custom_meta, columns)
            if limit_s is None:
                return RowRecords([], [], columns)
            if (rest := deadline - time.monotonic()) <= 0:
                progress = await self._progress(partition_id, task, columns)
                raise TimeoutError(
                    f"partition {partition_id!r}, task {task!r}: {progress.ready} of {wanted} rows have {columns} "
                    f"after {limit_s:g} s; {progress.present} rows are there, {progress.left} of them not yet given to "
                    f"the task; columns that nobody wrote: {progress.absent}"
                )
            await asyncio.sleep(min(poll_s, rest))

    async def is_consumed(self, partition_id: str, tasks: Collection[str]) -> bool:
        """Whether each task has been given as many rows as were declared, or all there are once they are finished.

        Raises:
            KeyError: unknown partition or task.
        """
        declared = await self.declaration(partition_id)
        if unknown := sorted(set(tasks) - set(declared["tasks"])):
            raise KeyError(f"partition {partition_id!r} has no tasks {unknown}; it has {sorted(declared['tasks'])}")
        for task in tasks:
            progress = await self._progress(partition_id, task, [])
            if progress.left or (not declared["finished"] and progress.present < declared["num_samples"]):
                return False
        return True

    async def _rows(self, sample_ids: list[str], partition_id: str) -> Any:
        """TransferQueue's record of rows, which leaves out silently what is not there."""
        meta = await self._queue.async_kv_retrieve_meta(sample_ids, partition_id, create=False)
        if meta.size != len(sample_ids):
            present = (await self._queue.async_kv_list(partition_id)).get(partition_id, {})
            missing = [sample_id for sample_id in sample_ids if sample_id not in present]
            raise KeyError(f"partition {partition_id!r} has no rows {_some(missing)}; it has {len(present)} others")
        return meta

    async def _absent_columns(
        self, meta: Any, sample_ids: Sequence[str], partition_id: str, columns: Sequence[str]
    ) -> str:
        parts = []
        for name in columns:
            indexes, written = await self._queue.async_get_production_status([name], partition_id)
            have = set() if indexes is None else set(indexes[written[:, 0] == 1].tolist())
            lacking = [row for row, index in zip(sample_ids, meta.global_indexes, strict=True) if index not in have]
            parts.append(f"column {name!r}, which has not been written for rows {_some(lacking)}")
        return f"partition {partition_id!r} has no {'; no '.join(parts)}"

    async def _progress(self, partition_id: str, task: str, columns: Sequence[str]) -> _Progress:
        present = (await self._queue.async_kv_list(partition_id)).get(partition_id, {})
        indexes, given = await self._queue.async_get_consumption_status(task, partition_id)
        # The controller keeps numbers in reserve for rows to come; they are never given.
        left = set() if indexes is None else set(indexes[given == 0].tolist())
        taken = 0 if given is None else int((given == 1).sum())
        ready, absent = set(left), []
        for name in columns:
            numbers, written = await self._queue.async_get_production_status([name], partition_id)
            have = set() if numbers is None else set(numbers[written[:, 0] == 1].tolist())
            ready &= have
            if not have:
                absent.append(name)
        return _Progress(present=len(present), left=len(present) - taken, ready=len(ready), absent=absent)


def _some(names: Sequence[str], shown: int = 8) -> str:
    """The first names of a list, so that a message stays one line."""
    rest = len(names) - shown
    return f"{list(names[:shown])} and {rest} more" if rest > 0 else str(list(names))

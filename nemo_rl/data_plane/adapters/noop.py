"""The plainest store that keeps the contract of `DataPlaneClient`: dicts in one process. For tests only."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from threading import Condition
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from nemo_rl.data_plane.codec import column_names, nest
from nemo_rl.data_plane.interfaces import DataPlaneClient, KVBatchMeta
from nemo_rl.data_plane.schema import INPUT_LENGTHS


@dataclass
class _Column:
    jagged: bool
    rows: dict[str, Tensor] = field(default_factory=dict)


@dataclass
class _Partition:
    num_samples: int
    given: dict[str, set[str]]  # per task, the ids that it has been given
    columns: dict[str, _Column] = field(default_factory=dict)
    tags: dict[str, dict[str, Any]] = field(default_factory=dict)  # also the rows that exist, in order of arrival
    finished: bool = False


class NoOpDataPlaneClient(DataPlaneClient):
    """Rows and columns in dicts: columns may be added later and rows rewritten, as in a queue shared by processes.

    Copies on write and on read. A column keeps its kind: written jagged it is read jagged, whatever the lengths.
    `input_lengths` among the tags of a row becomes the length of that row in the metas handed out.
    """

    def __init__(self) -> None:
        self._partitions: dict[str, _Partition] = {}
        self._changed = Condition()

    def register_partition(
        self, partition_id: str, fields: Sequence[str], num_samples: int, consumer_tasks: Sequence[str]
    ) -> None:
        with self._changed:
            self._partitions[partition_id] = _Partition(num_samples, {task: set() for task in consumer_tasks})

    def claim_meta(
        self,
        partition_id: str,
        task_name: str,
        required_fields: Sequence[str],
        batch_size: int,
        blocking: bool = True,
        timeout_s: float = 60.0,
    ) -> KVBatchMeta:
        deadline = time.monotonic() + timeout_s
        with self._changed:
            partition = self._partition(partition_id)
            given = _given(partition, task_name, partition_id)
            while len(ready := _ready(partition, given, required_fields)) < batch_size:
                if partition.finished and len(ready) == len(partition.tags.keys() - given):
                    break
                if not blocking:
                    return self._meta(partition_id, [], task_name, required_fields)
                if not self._changed.wait(deadline - time.monotonic()):
                    absent = [name for name in required_fields if name not in partition.columns]
                    raise TimeoutError(
                        f"partition {partition_id!r}, task {task_name!r}: {len(ready)} of {batch_size} rows have "
                        f"{list(required_fields)} after {timeout_s} s; columns that nobody wrote: {absent}"
                    )
            given.update(ready[:batch_size])
            return self._meta(partition_id, ready[:batch_size], task_name, required_fields)

    def check_consumption_status(self, partition_id: str, task_names: Sequence[str]) -> bool:
        with self._changed:
            partition = self._partition(partition_id)
            expected = len(partition.tags) if partition.finished else partition.num_samples
            return all(len(_given(partition, task, partition_id)) == expected for task in task_names)

    def put_samples(
        self,
        sample_ids: Sequence[str],
        partition_id: str,
        fields: TensorDict | None = None,
        tags: Sequence[Mapping[str, Any]] | None = None,
    ) -> KVBatchMeta:
        """Writes or rewrites columns and tags.

        Raises:
            TypeError: a column that is no tensor.
            ValueError: see `DataPlaneClient.put_samples`.
        """
        if fields is None and tags is None:
            raise ValueError(f"partition {partition_id!r}: neither columns nor tags to write")
        for count in (None if fields is None else fields.batch_size.numel(), None if tags is None else len(tags)):
            if count is not None and count != len(sample_ids):
                raise ValueError(f"partition {partition_id!r}: {count} rows for {len(sample_ids)} sample ids")
        with self._changed:
            partition = self._partition(partition_id)
            for row, sample_id in enumerate(sample_ids):
                partition.tags.setdefault(sample_id, {}).update({} if tags is None else tags[row])
            columns = {} if fields is None else {name: fields.get(name) for name in column_names(fields)}
            for name, value in columns.items():
                _write(partition, name, sample_ids, value)
            self._changed.notify_all()
            return self._meta(partition_id, sample_ids, None, list(columns))

    def get_samples(self, sample_ids: Sequence[str], partition_id: str, select_fields: Sequence[str]) -> TensorDict:
        with self._changed:
            partition = self._partition(partition_id)
            columns = {name: _read(partition, name, sample_ids, partition_id) for name in select_fields}
        return TensorDict(columns, batch_size=[len(sample_ids)])

    def get_meta(self, sample_ids: Sequence[str], partition_id: str) -> KVBatchMeta:
        with self._changed:
            partition = self._partition(partition_id)
            missing = [sample_id for sample_id in sample_ids if sample_id not in partition.tags]
            if missing:
                raise KeyError(f"partition {partition_id!r} has no rows {missing}")
            names = [name for name, column in partition.columns.items() if column.rows.keys() >= set(sample_ids)]
            return self._meta(partition_id, sample_ids, None, names)

    def finish_partition(self, partition_id: str) -> None:
        with self._changed:
            self._partition(partition_id).finished = True
            self._changed.notify_all()

    def list_sample_ids(self, partition_id: str) -> list[str]:
        with self._changed:
            return sorted(self._partitions[partition_id].tags) if partition_id in self._partitions else []

    def clear_samples(self, sample_ids: Sequence[str] | None, partition_id: str) -> None:
        with self._changed:
            if sample_ids is None:
                self._partitions.pop(partition_id, None)
            elif partition_id in self._partitions:
                partition = self._partitions[partition_id]
                for sample_id in sample_ids:
                    for rows in (partition.tags, *(column.rows for column in partition.columns.values())):
                        rows.pop(sample_id, None)
                    for given in partition.given.values():
                        given.discard(sample_id)

    def close(self) -> None:
        with self._changed:
            self._partitions.clear()

    def _partition(self, partition_id: str) -> _Partition:
        if partition_id not in self._partitions:
            raise KeyError(f"no partition {partition_id!r}; held are {sorted(self._partitions)}")
        return self._partitions[partition_id]

    def _meta(
        self, partition_id: str, sample_ids: Sequence[str], task_name: str | None, fields: Sequence[str]
    ) -> KVBatchMeta:
        tags = [dict(self._partitions[partition_id].tags[sample_id]) for sample_id in sample_ids]
        lengths = [tag[INPUT_LENGTHS] for tag in tags if INPUT_LENGTHS in tag]
        return KVBatchMeta(
            partition_id=partition_id,
            task_name=task_name,
            sample_ids=list(sample_ids),
            fields=list(fields),
            sequence_lengths=lengths if len(lengths) == len(tags) else None,
            tags=tags,
        )


def _given(partition: _Partition, task_name: str, partition_id: str) -> set[str]:
    if task_name not in partition.given:
        raise KeyError(f"partition {partition_id!r} has no task {task_name!r}; it has {sorted(partition.given)}")
    return partition.given[task_name]


def _ready(partition: _Partition, given: set[str], required_fields: Sequence[str]) -> list[str]:
    columns = [partition.columns.get(name) for name in required_fields]
    return [
        sample_id
        for sample_id in partition.tags
        if sample_id not in given and all(column and sample_id in column.rows for column in columns)
    ]


def _write(partition: _Partition, name: str, sample_ids: Sequence[str], value: Any) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"column {name!r} is a {type(value).__name__}; this store holds tensors only")
    column = partition.columns.setdefault(name, _Column(jagged=value.is_nested))
    if column.jagged != value.is_nested:
        raise ValueError(f"column {name!r} is {'jagged' if column.jagged else 'dense'} already")
    rows = value.detach().clone().unbind()
    column.rows.update(zip(sample_ids, rows, strict=True))


def _read(partition: _Partition, name: str, sample_ids: Sequence[str], partition_id: str) -> Tensor:
    column = partition.columns.get(name)
    missing = [sample_id for sample_id in sample_ids if column is None or sample_id not in column.rows]
    if column is None or missing:
        raise KeyError(f"partition {partition_id!r} has no column {name!r} for rows {missing}")
    rows = [column.rows[sample_id] for sample_id in sample_ids]
    return nest(rows) if column.jagged else torch.stack(rows)

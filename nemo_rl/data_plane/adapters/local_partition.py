"""One batch of the local data plane: written once, read by reference."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from nemo_rl.data_plane.codec import column_names
from nemo_rl.data_plane.interfaces import KVBatchMeta
from nemo_rl.data_plane.schema import INPUT_LENGTHS, LOCAL_PARTITION_GENERATION


class LocalPartition:
    """The rows of one batch, their columns, and per task a cursor over the rows it has not been given.

    Not locked; `LocalDataPlaneClient` does that.

    Raises:
        ValueError: `num_samples < 1`, duplicate columns or duplicate tasks.
    """

    def __init__(
        self, partition_id: str, generation: int, fields: Sequence[str], num_samples: int, tasks: Sequence[str]
    ) -> None:
        if num_samples < 1:
            raise ValueError(f"partition {partition_id!r}: num_samples is {num_samples}, it must be at least 1")
        self.partition_id = partition_id
        self.generation = generation
        self._refuse_duplicates(fields, "column")
        self._refuse_duplicates(tasks, "task")
        self._declared = tuple(fields)
        self._num_samples = num_samples
        self._next_row = dict.fromkeys(tasks, 0)
        self._columns = TensorDict({}, batch_size=[num_samples])
        self._versions: dict[str, int] = {}
        self._written: KVBatchMeta | None = None
        self._row_of: dict[str, int] = {}

    @property
    def sample_ids(self) -> list[str]:
        """Ids of the rows that are there, in the order of writing."""
        return list(self._row_of)

    @property
    def is_used_up(self) -> bool:
        """Whether it was filled and every row has been removed."""
        return self._written is not None and not self._row_of

    def fill(
        self, sample_ids: Sequence[str], fields: TensorDict | None, tags: Sequence[Mapping[str, Any]] | None
    ) -> KVBatchMeta:
        """Writes all rows, once; see `LocalDataPlaneClient.put_samples`."""
        where = f"partition {self.partition_id!r}"
        if self._written is not None:
            raise ValueError(f"{where} is filled already; a local partition is written once")
        if fields is None and tags is None:
            raise ValueError(f"{where}: neither columns nor tags to write")
        self._refuse_duplicates(sample_ids, "sample id")
        self._check_count(len(sample_ids), "sample ids")
        if tags is not None:
            self._check_count(len(tags), "tags")
        if fields is not None:
            self._check_count(fields.batch_size.numel(), "rows of columns")
            undeclared = [name for name in column_names(fields) if name not in self._declared]
            if undeclared:
                raise ValueError(f"{where}: columns {undeclared} are not declared")
            self._columns = _hold(fields)
            self._versions = {name: _version(self._columns.get(name)) for name in column_names(fields)}
        lengths = self._columns.get(INPUT_LENGTHS, None)
        self._row_of = {sample_id: row for row, sample_id in enumerate(sample_ids)}
        self._written = KVBatchMeta(
            partition_id=self.partition_id,
            task_name=None,
            sample_ids=list(sample_ids),
            fields=list(self._versions),
            sequence_lengths=lengths.tolist() if isinstance(lengths, Tensor) else None,
            extra_info={LOCAL_PARTITION_GENERATION: self.generation},
            tags=None if tags is None else [dict(tag) for tag in tags],
        )
        return self._written.subset(range(self._num_samples))

    def claim(self, task_name: str, required_fields: Sequence[str], batch_size: int) -> KVBatchMeta:
        """The next rows for a task, at most `batch_size`; an empty meta when it has been given all."""
        start = self._cursor(task_name)
        self._check_columns(required_fields)
        rows = [row for row in self._row_of.values() if row >= start][:batch_size]
        if rows:
            self._next_row[task_name] = rows[-1] + 1
        return replace(self._all_rows().subset(rows), task_name=task_name, fields=list(required_fields))

    def is_consumed_by(self, task_name: str) -> bool:
        """Whether the task has been given every row; False before they are written."""
        start = self._cursor(task_name)
        return self._written is not None and all(row < start for row in self._row_of.values())

    def select(self, sample_ids: Sequence[str], names: Sequence[str]) -> TensorDict:
        """Columns of rows; see `LocalDataPlaneClient.get_samples`."""
        self._refuse_duplicates(sample_ids, "sample id")
        missing = [sample_id for sample_id in sample_ids if sample_id not in self._row_of]
        if missing:
            raise KeyError(f"partition {self.partition_id!r} has no rows {missing}")
        self._check_columns(names)
        for name in names:
            if _version(self._columns.get(name)) != self._versions[name]:
                raise RuntimeError(
                    f"column {name!r} of partition {self.partition_id!r} was changed in place after it was written; "
                    "copy it before changing it"
                )
        return _take(self._columns.select(*names), [self._row_of[sample_id] for sample_id in sample_ids])

    def remove(self, sample_ids: Sequence[str]) -> None:
        """Removes rows; ids that are not there are no error. Columns stay in memory until the partition goes."""
        for sample_id in sample_ids:
            self._row_of.pop(sample_id, None)

    def _all_rows(self) -> KVBatchMeta:
        if self._written is None:
            raise KeyError(f"partition {self.partition_id!r} has not been written")
        return self._written

    def _cursor(self, task_name: str) -> int:
        if task_name not in self._next_row:
            tasks = sorted(self._next_row)
            raise KeyError(f"partition {self.partition_id!r} has no task {task_name!r}; it has {tasks}")
        return self._next_row[task_name]

    def _check_columns(self, names: Sequence[str]) -> None:
        missing = [name for name in names if name not in self._versions]
        if missing:
            raise KeyError(f"columns {missing} of partition {self.partition_id!r} have not been written")

    def _check_count(self, count: int, what: str) -> None:
        if count != self._num_samples:
            raise ValueError(f"partition {self.partition_id!r}: {count} {what} for {self._num_samples} rows")

    def _refuse_duplicates(self, names: Sequence[str], what: str) -> None:
        if len(set(names)) != len(names):
            repeated = sorted({name for name in names if list(names).count(name) > 1})
            raise ValueError(f"partition {self.partition_id!r}: {what} {repeated} given more than once")


def _hold(fields: TensorDict) -> TensorDict:
    # A stored column must not keep the forward pass that made it alive; a detached tensor shares memory and version.
    held = TensorDict({}, batch_size=fields.batch_size)
    for name in column_names(fields):
        value: Any = fields.get(name)
        held.set(name, value.detach() if isinstance(value, Tensor) else copy.deepcopy(value))
    return held


def _version(column: Any) -> int:
    if not isinstance(column, Tensor):
        return 0
    dense = column.values() if column.is_nested else column
    return 0 if dense.is_inference() else dense._version


def _take(columns: TensorDict, rows: list[int]) -> TensorDict:
    if rows and rows == list(range(rows[0], rows[0] + len(rows))):
        if len(rows) < columns.batch_size.numel():
            columns = columns[rows[0] : rows[0] + len(rows)]
    else:
        columns = columns[torch.tensor(rows, dtype=torch.int64)]
    for name in column_names(columns):
        value: Any = columns.get(name)
        if not isinstance(value, Tensor):
            columns.set(name, copy.deepcopy(value))
    return columns

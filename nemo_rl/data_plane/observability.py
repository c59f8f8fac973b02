"""What a data plane does, as events and counters."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from threading import Lock
from typing import Any, Literal, TypedDict, TypeVar

from tensordict import TensorDict
from torch import Tensor

from nemo_rl.data_plane.codec import column_names, row_lengths
from nemo_rl.data_plane.interfaces import DataPlaneClient, KVBatchMeta

logger = logging.getLogger(__name__)
_Result = TypeVar("_Result")


class DataPlaneEvent(TypedDict):
    """One call: `n_keys` rows and `n_bytes` of tensors moved in `wall_ms` milliseconds."""

    op: str
    partition_id: str
    n_keys: int
    n_bytes: int
    wall_ms: float
    status: Literal["ok", "error", "timeout"]


def log_event(event: DataPlaneEvent) -> None:
    """Writes the event to the log at debug level."""
    logger.debug(
        "%(op)s %(partition_id)s: %(n_keys)d rows, %(n_bytes)d bytes, %(wall_ms).2f ms, %(status)s", dict(event)
    )


def column_bytes(fields: TensorDict) -> dict[str, list[int]]:
    """Bytes of each tensor column, row by row; jagged rows count what they hold, objects are left out."""
    sizes: dict[str, list[int]] = {}
    rows = fields.batch_size.numel()
    for name in column_names(fields):
        value = fields.get(name)
        if isinstance(value, Tensor) and value.is_nested:
            values = value.values()
            entry = values[:1].numel() * values.element_size()
            sizes[name] = [n * entry for n in row_lengths(value).tolist()]
        elif isinstance(value, Tensor):
            sizes[name] = [value.nbytes // max(rows, 1)] * rows
    return sizes


class MetricsDataPlaneClient(DataPlaneClient):
    """Forwards every call to `inner`, times it, and hands one event to `on_event`; errors pass through after it."""

    def __init__(self, inner: DataPlaneClient, on_event: Callable[[DataPlaneEvent], None] = log_event) -> None:
        self.process_local = inner.process_local
        self._inner = inner
        self._on_event = on_event
        self._lock = Lock()
        self._totals = {"total_bytes": 0, "total_keys": 0, "total_ops": 0}
        self._held: dict[str, dict[str, dict[str, int]]] = defaultdict(dict)  # partition -> id -> column -> bytes
        self._peak = 0
        self._largest_row = 0
        self._last_put_row = 0

    def snapshot(self) -> dict[str, int]:
        """Counters so far.

        `total_*` count calls that succeeded; `*_outstanding` is what has been written and not cleared; "per key" is
        per row: the largest row seen, and the mean row of the last write.
        """
        with self._lock:
            return {
                **self._totals,
                "bytes_outstanding": sum(self._bytes_by_partition().values()),
                "peak_bytes_outstanding": self._peak,
                "max_bytes_per_key_seen": self._largest_row,
                "last_put_bytes_per_key": self._last_put_row,
                "n_keys_outstanding": sum(len(rows) for rows in self._held.values()),
            }

    def bytes_outstanding_by_partition(self) -> dict[str, int]:
        """Bytes written and not cleared, per partition."""
        with self._lock:
            return self._bytes_by_partition()

    def register_partition(
        self, partition_id: str, fields: Sequence[str], num_samples: int, consumer_tasks: Sequence[str]
    ) -> None:
        def call() -> None:
            self._inner.register_partition(partition_id, fields, num_samples, consumer_tasks)

        self._measure("register", partition_id, 0, call)

    def claim_meta(
        self,
        partition_id: str,
        task_name: str,
        required_fields: Sequence[str],
        batch_size: int,
        blocking: bool = True,
        timeout_s: float = 60.0,
    ) -> KVBatchMeta:
        def call() -> KVBatchMeta:
            return self._inner.claim_meta(partition_id, task_name, required_fields, batch_size, blocking, timeout_s)

        return self._measure("claim", partition_id, batch_size, call)

    def get_data(self, meta: KVBatchMeta, select_fields: Sequence[str] | None = None) -> TensorDict:
        return self._measure(
            "get", meta.partition_id, meta.size, lambda: self._inner.get_data(meta, select_fields), moved=_total_bytes
        )

    def check_consumption_status(self, partition_id: str, task_names: Sequence[str]) -> bool:
        def call() -> bool:
            return self._inner.check_consumption_status(partition_id, task_names)

        return self._measure("check", partition_id, 0, call)

    def put_samples(
        self,
        sample_ids: Sequence[str],
        partition_id: str,
        fields: TensorDict | None = None,
        tags: Sequence[Mapping[str, Any]] | None = None,
    ) -> KVBatchMeta:
        sizes = {} if fields is None else column_bytes(fields)
        moved = sum(sum(column) for column in sizes.values())
        meta = self._measure(
            "put",
            partition_id,
            len(sample_ids),
            lambda: self._inner.put_samples(sample_ids, partition_id, fields, tags),
            moved=lambda _: moved,
        )
        with self._lock:
            held = self._held[partition_id]
            for row, sample_id in enumerate(sample_ids):
                columns = held.setdefault(sample_id, {})
                columns.update({name: column[row] for name, column in sizes.items()})
                self._largest_row = max(self._largest_row, sum(columns.values()))
            self._last_put_row = moved // max(len(sample_ids), 1)
            self._peak = max(self._peak, sum(self._bytes_by_partition().values()))
        return meta

    def get_samples(self, sample_ids: Sequence[str], partition_id: str, select_fields: Sequence[str]) -> TensorDict:
        def call() -> TensorDict:
            return self._inner.get_samples(sample_ids, partition_id, select_fields)

        return self._measure("get", partition_id, len(sample_ids), call, moved=_total_bytes)

    def get_meta(self, sample_ids: Sequence[str], partition_id: str) -> KVBatchMeta:
        def call() -> KVBatchMeta:
            return self._inner.get_meta(sample_ids, partition_id)

        return self._measure("meta", partition_id, len(sample_ids), call)

    def finish_partition(self, partition_id: str) -> None:
        self._measure("finish", partition_id, 0, lambda: self._inner.finish_partition(partition_id))

    def list_sample_ids(self, partition_id: str) -> list[str]:
        return self._measure("list", partition_id, 0, lambda: self._inner.list_sample_ids(partition_id))

    def clear_samples(self, sample_ids: Sequence[str] | None, partition_id: str) -> None:
        def call() -> None:
            self._inner.clear_samples(sample_ids, partition_id)

        self._measure("clear", partition_id, len(sample_ids or ()), call)
        with self._lock:
            held = self._held[partition_id]
            for sample_id in list(held) if sample_ids is None else sample_ids:
                held.pop(sample_id, None)
            if not held:
                del self._held[partition_id]

    def supports_checkpointing(self) -> bool:
        return self._inner.supports_checkpointing()

    def close(self) -> None:
        self._measure("close", "", 0, self._inner.close)

    def _bytes_by_partition(self) -> dict[str, int]:
        return {
            partition_id: sum(sum(columns.values()) for columns in rows.values())
            for partition_id, rows in self._held.items()
        }

    def _measure(
        self,
        op: str,
        partition_id: str,
        n_keys: int,
        call: Callable[[], _Result],
        moved: Callable[[_Result], int] = lambda _: 0,
    ) -> _Result:
        start = time.perf_counter()
        status: Literal["ok", "error", "timeout"] = "error"
        n_bytes = 0
        try:
            result = call()
            n_bytes = moved(result)
            status = "ok"
        except TimeoutError:
            status = "timeout"
            raise
        finally:
            wall_ms = (time.perf_counter() - start) * 1e3
            if status == "ok":
                with self._lock:
                    for key, value in (("total_bytes", n_bytes), ("total_keys", n_keys), ("total_ops", 1)):
                        self._totals[key] += value
            self._on_event(
                DataPlaneEvent(
                    op=op, partition_id=partition_id, n_keys=n_keys, n_bytes=n_bytes, wall_ms=wall_ms, status=status
                )
            )
        return result


def _total_bytes(fields: TensorDict) -> int:
    return sum(sum(column) for column in column_bytes(fields).values())

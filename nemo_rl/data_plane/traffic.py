"""Bytes of columns that went through this process, whichever client moved them.

A controller moves metas only; that both counters stay 0 in its process can be looked up instead of believed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from threading import Lock


@dataclass
class ColumnTraffic:
    """Two counters that several threads may add to.

    Attributes:
        bytes_written: bytes of columns handed to a plane outside this process.
        bytes_read: bytes of columns that came from one.
    """

    bytes_written: int = 0
    bytes_read: int = 0
    _lock: Lock = field(default_factory=Lock, repr=False)

    def add(self, *, written: int = 0, read: int = 0) -> None:
        """Counts one call."""
        with self._lock:
            self.bytes_written += written
            self.bytes_read += read

    def snapshot(self) -> dict[str, int]:
        """`{"bytes_written": ..., "bytes_read": ...}` since the process started."""
        with self._lock:
            return {"bytes_written": self.bytes_written, "bytes_read": self.bytes_read}


PROCESS_TRAFFIC = ColumnTraffic()

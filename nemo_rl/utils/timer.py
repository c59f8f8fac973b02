"""Wall-clock timings of a step, and the budget of time after which a run has to save. All times are in seconds."""

from __future__ import annotations

import contextlib
import statistics
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

_REDUCTIONS: dict[str, Callable[[Sequence[float]], float]] = {
    "mean": statistics.fmean,
    "median": statistics.median,
    "min": min,
    "max": max,
    "std": statistics.pstdev,
    "sum": sum,
    "count": len,
}
_UNIT_SECONDS = (86_400, 3_600, 60, 1)


class Timer:
    """Named stretches of time, as many of each name as were measured, and named moments.

    Args:
        context: goes before every label as `context/label` in `get_timing_metrics`.
    """

    def __init__(self, context: str | None = None):
        self._prefix = f"{context}/" if context else ""
        self._elapsed: dict[str, list[float]] = {}
        self._started: dict[str, float] = {}
        self._markers: dict[str, list[tuple[float, dict[str, Any] | None]]] = {}

    def start(self, label: str) -> None:
        """Begins a stretch. Raises `ValueError` while one of the same label runs."""
        if label in self._started:
            raise ValueError(f"timer {label!r} is already running")
        self._started[label] = time.perf_counter()

    def stop(self, label: str) -> float:
        """Ends the running stretch and returns its seconds. Raises `ValueError` when none of that label runs."""
        if label not in self._started:
            raise ValueError(f"timer {label!r} is not running")
        seconds = time.perf_counter() - self._started.pop(label)
        self.record(label, seconds)
        return seconds

    def record(self, label: str, seconds: float) -> None:
        """Adds a stretch that was measured elsewhere."""
        self._elapsed.setdefault(label, []).append(seconds)

    @contextlib.contextmanager
    def time(self, label: str) -> Generator[None, None, None]:
        """Measures the body, also when it raises."""
        self.start(label)
        try:
            yield
        finally:
            self.stop(label)

    def mark(self, label: str, metadata: dict[str, Any] | None = None) -> float:
        """Notes this moment and returns it in seconds since the epoch."""
        now = time.time()
        self._markers.setdefault(label, []).append((now, metadata))
        return now

    def get_markers(self, label: str | None = None) -> dict[str, list[tuple[float, dict[str, Any] | None]]]:
        """The moments by label, of all labels or of one, each with its metadata."""
        return {name: list(marks) for name, marks in self._markers.items() if label in (None, name)}

    def get_elapsed(self, label: str) -> list[float]:
        """Every stretch of the label, oldest first. Raises `KeyError` when there is none."""
        return list(self._elapsed[label])

    def get_latest_elapsed(self, label: str) -> float:
        """The newest stretch of the label. Raises `KeyError` when there is none."""
        return self._elapsed[label][-1]

    def reduce(self, label: str, op: str = "mean") -> float:
        """One number for a label; `op` is mean, median, min, max, std (population), sum or count.

        Raises:
            ValueError: another `op`.
            KeyError: no stretch of that label.
        """
        if op not in _REDUCTIONS:
            raise ValueError(f"op: expected one of {', '.join(_REDUCTIONS)}, got {op!r}")
        return float(_REDUCTIONS[op](self._elapsed[label]))

    def get_timing_metrics(self, reduction_op: str | Mapping[str, str] = "mean") -> dict[str, float]:
        """Every label reduced to one number; a mapping gives the reduction by label, `mean` where it is silent."""
        op_of = (lambda _: reduction_op) if isinstance(reduction_op, str) else (lambda k: reduction_op.get(k, "mean"))
        return {f"{self._prefix}{label}": self.reduce(label, op_of(label)) for label in list(self._elapsed)}

    def reset(self, label: str | None = None) -> None:
        """Forgets the stretches, running ones included, and moments of all labels or of one."""
        for table in (self._elapsed, self._started, self._markers):
            if label is None:
                table.clear()
            else:
                table.pop(label, None)


class ThreadSafeTimer(Timer):
    """A `Timer` that several threads may use at once; a label still has one running stretch at a time."""

    def __init__(self, context: str | None = None):
        super().__init__(context)
        self._lock = threading.RLock()

    def start(self, label: str) -> None:
        with self._lock:
            super().start(label)

    def stop(self, label: str) -> float:
        with self._lock:
            return super().stop(label)

    def record(self, label: str, seconds: float) -> None:
        with self._lock:
            super().record(label, seconds)

    def mark(self, label: str, metadata: dict[str, Any] | None = None) -> float:
        with self._lock:
            return super().mark(label, metadata)

    def get_markers(self, label: str | None = None) -> dict[str, list[tuple[float, dict[str, Any] | None]]]:
        with self._lock:
            return super().get_markers(label)

    def get_timing_metrics(self, reduction_op: str | Mapping[str, str] = "mean") -> dict[str, float]:
        with self._lock:
            return super().get_timing_metrics(reduction_op)

    def reset(self, label: str | None = None) -> None:
        with self._lock:
            super().reset(label)


def convert_to_seconds(text: str) -> int:
    """The seconds in `"DD:HH:MM:SS"`. Raises `ValueError` for text of another form."""
    parts = text.split(":")
    if len(parts) != len(_UNIT_SECONDS) or not all(part.isdecimal() for part in parts):
        raise ValueError(f"expected DD:HH:MM:SS, for example 00:03:45:00, got {text!r}")
    return sum(int(part) * unit for part, unit in zip(parts, _UNIT_SECONDS, strict=True))


class TimeoutChecker:
    """Says once when a run has used its budget of time; the clock starts at construction.

    Args:
        timeout: budget as `"DD:HH:MM:SS"`; None = no limit.
        fit_last_save_time: answer early enough for one more iteration of mean length to end within the budget.
    """

    def __init__(self, timeout: str | None = "00:03:45:00", fit_last_save_time: bool = False):
        self._budget = float("inf") if timeout is None else float(convert_to_seconds(timeout))
        self._fits_iteration = fit_last_save_time
        self._start = time.monotonic()
        self._previous_mark: float | None = None
        self._iteration_seconds = 0.0
        self._num_iterations = 0
        self._answered = False

    def start_iterations(self) -> None:
        """Begins the first iteration."""
        self._previous_mark = time.monotonic()

    def mark_iteration(self) -> None:
        """Ends one iteration and begins the next; without `start_iterations` before, it only begins one."""
        now = time.monotonic()
        if self._previous_mark is not None:
            self._iteration_seconds += now - self._previous_mark
            self._num_iterations += 1
        self._previous_mark = now

    def check_save(self) -> bool:
        """True the first time that the budget is used up, False before and ever after."""
        elapsed = time.monotonic() - self._start
        if self._fits_iteration and self._num_iterations:
            elapsed += self._iteration_seconds / self._num_iterations
        due = not self._answered and elapsed >= self._budget
        self._answered = self._answered or due
        return due

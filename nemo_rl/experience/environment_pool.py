"""Threads that call the environment, so that a slow reward does not hold up sampling."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nemo_rl.utils.errors import RunError

_MAX_ABANDONED = 32


@dataclass(frozen=True)
class JobResult:
    """What a call returned or raised; both None when it took too long."""

    ticket: int
    value: Any = None
    error: Exception | None = None
    timed_out: bool = False


class EnvironmentPool:
    """Runs calls in daemon threads and gives up on those that take too long.

    A thread can't be ended, so one that hangs is left alone and replaced; its result is dropped. `submit` and `poll`
    are called from one thread.

    Args:
        num_workers: calls that run at the same time.
        timeout_s: longest time of a call, from its start; None = any.
        on_result: called in a worker thread when a result is there.
    """

    def __init__(self, num_workers: int, timeout_s: float | None, on_result: Callable[[], None]):
        self._timeout_s = timeout_s
        self._on_result = on_result
        self._changed = threading.Condition()
        self._waiting: deque[tuple[int, Callable[[], Any]]] = deque()
        self._running: dict[int, float] = {}  # ticket -> when it started
        self._results: list[JobResult] = []
        self._next_ticket = 0
        self._abandoned = 0
        self._closed = False
        for _ in range(num_workers):
            self._start_thread()

    @property
    def num_unfinished(self) -> int:
        """Calls whose result `poll` has not returned."""
        with self._changed:
            return len(self._waiting) + len(self._running) + len(self._results)

    def submit(self, call: Callable[[], Any]) -> int:
        """Queues a call; its ticket."""
        with self._changed:
            ticket = self._next_ticket
            self._next_ticket += 1
            self._waiting.append((ticket, call))
            self._changed.notify()
            return ticket

    def poll(self) -> list[JobResult]:
        """Results since the last time, in the order of their ends, and the calls that took too long.

        Raises:
            RunError: 32 calls hang.
        """
        with self._changed:
            if self._timeout_s is not None:
                start_of_the_late = time.monotonic() - self._timeout_s
                for ticket in [ticket for ticket, start in self._running.items() if start < start_of_the_late]:
                    del self._running[ticket]
                    self._results.append(JobResult(ticket, timed_out=True))
                    self._abandoned += 1
                    self._start_thread()
            if self._abandoned >= _MAX_ABANDONED:
                raise RunError(
                    f"{self._abandoned} calls of the environment took more than env_timeout_s ({self._timeout_s} s) "
                    "and still hang; make the reward return in time"
                )
            results, self._results = self._results, []
            return results

    def close(self) -> None:
        """Ends the threads that are idle; the others end with the process. Queued calls are forgotten."""
        with self._changed:
            self._closed = True
            self._waiting.clear()
            self._changed.notify_all()

    def _start_thread(self) -> None:
        threading.Thread(target=self._work, name="environment", daemon=True).start()

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._waiting and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
                ticket, call = self._waiting.popleft()
                self._running[ticket] = time.monotonic()
            value, error = None, None
            try:
                value = call()
            except Exception as raised:  # noqa: BLE001  the user's code; a failure of this sample, which is counted
                error = raised
            with self._changed:
                if self._running.pop(ticket, None) is None:
                    # Given up long ago, and replaced.
                    self._abandoned -= 1
                    return
                self._results.append(JobResult(ticket, value, error))
            self._on_result()

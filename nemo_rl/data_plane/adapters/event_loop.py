"""An event loop on a thread of its own, for a client with asynchronous calls inside a program without any."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

_Result = TypeVar("_Result")


class UnansweredError(TimeoutError):
    """A coroutine that did not end within its limit; it has been cancelled."""


class EventLoopThread:
    """Runs coroutines one after another or, called from several threads, side by side. `close()` ends the thread."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, _Result], *, timeout_s: float) -> _Result:
        """The result of the coroutine.

        Raises:
            UnansweredError: it took longer than `timeout_s` seconds.
            Exception: whatever the coroutine raises, `TimeoutError` included.
        """
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result(timeout_s)
        except TimeoutError as error:
            if future.done() and future.exception() is error:
                raise
            future.cancel()
            raise UnansweredError(f"no answer within {timeout_s:g} s") from error

    def close(self, *, timeout_s: float = 5.0) -> bool:
        """Ends the thread; whether it did within the limit. May be called twice."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(timeout_s)
            if not self._thread.is_alive():
                self._loop.close()
        return not self._thread.is_alive()

"""Where the time of a step goes in one process: wall-clock seconds by phase, each second counted once.

Outside a profile `phase` costs one comparison. Inside, phases may lie in each other: a second belongs to the innermost,
or to `WAITING` where there is none.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext

WAITING = "waiting"
"""The process had nothing to do: the controller, calls on their way, other processes."""

_NOTHING: AbstractContextManager[None] = nullcontext()


class PhaseClock:
    """Adds up the seconds of phases from now on, for the thread that made it.

    Args:
        settle: called where a phase begins or ends; it waits until the device has done what it was given, so that its
            work counts where it was asked for.
    """

    def __init__(self, settle: Callable[[], None] | None = None):
        self._settle = settle
        self._thread = threading.get_ident()
        self._seconds: dict[str, float] = {}
        self._open: list[tuple[str, bool]] = []
        self._since = time.perf_counter()

    def phase(self, name: str, opaque: bool) -> AbstractContextManager[None]:
        """See the function `phase`."""
        if threading.get_ident() != self._thread or (self._open and self._open[-1][1]):
            return _NOTHING
        return self._phase(name, opaque)

    def seconds(self) -> dict[str, float]:
        """Seconds by phase until now; they add up to the time since the clock was made."""
        self._count()
        return dict(self._seconds)

    @contextmanager
    def _phase(self, name: str, opaque: bool) -> Generator[None, None, None]:
        self._count()
        self._open.append((name, opaque))
        try:
            yield
        finally:
            self._count()
            self._open.pop()

    def _count(self) -> None:
        """What passed since the last border belongs to the innermost phase."""
        if self._settle is not None:
            self._settle()
        now = time.perf_counter()
        name = self._open[-1][0] if self._open else WAITING
        self._seconds[name] = self._seconds.get(name, 0.0) + now - self._since
        self._since = now


_clock: PhaseClock | None = None


def phase(name: str, *, opaque: bool = False) -> AbstractContextManager[None]:
    """The body counts as the phase `name` while a profile is open in this process.

    Args:
        opaque: phases inside the body count as this one.
    """
    return _NOTHING if _clock is None else _clock.phase(name, opaque)


def start_profile(settle: Callable[[], None] | None = None) -> None:
    """Opens a profile in this process, in place of one that is open; `settle` as in `PhaseClock`."""
    global _clock
    _clock = PhaseClock(settle)


def stop_profile() -> dict[str, float]:
    """Closes the profile: seconds by phase since it was opened.

    Raises:
        RuntimeError: none is open.
    """
    global _clock
    if _clock is None:
        raise RuntimeError("no profile is open in this process")
    seconds, _clock = _clock.seconds(), None
    return seconds

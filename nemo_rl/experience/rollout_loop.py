"""The thread that drives a `RolloutManager`, and the way of the process's main thread to it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future, wait
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from nemo_rl.experience.episode import Group
from nemo_rl.experience.interfaces import RolloutStatus
from nemo_rl.experience.rollouts import RolloutManager
from nemo_rl.models.generation.interfaces import GenerationEngine
from nemo_rl.utils.errors import RunError, UserError

log = logging.getLogger(__name__)

T = TypeVar("T")

_LONGEST_NAP_S = 0.05  # time limits are looked at this often when nothing else happens


class RolloutLoop:
    """Steps a manager in one daemon thread from `start` to `stop`.

    Calls that the main thread makes run in that thread between two steps of the sampler. An exception there ends the
    thread, and every later call raises it.

    Args:
        build_manager: gets the function that wakes the thread up, and returns the manager.
    """

    def __init__(self, engine: GenerationEngine, build_manager: Callable[[Callable[[], None]], RolloutManager]):
        self._engine = engine
        self._wake = threading.Event()
        self._manager = build_manager(self._wake.set)
        self._calls: SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = SimpleQueue()
        self._changed = threading.Condition()
        self._finished: dict[str, Group] = {}
        self._evaluated: dict[str, Group] = {}
        self._error: BaseException | None = None
        self._stopping = False
        self._last_progress = time.monotonic()
        self._version = engine.version
        self._thread = threading.Thread(target=self._run, name="rollouts", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def call(self, function: Callable[[RolloutManager], T], *, reason: str, timeout_s: float) -> T:
        """The result of `function`, run in the thread between two steps of the sampler.

        Raises:
            RunError: it did not come in `timeout_s` seconds; or the thread has ended, with its exception as cause.
            UserError: the thread has ended with one.
        """
        self.check()
        future: Future[T] = Future()
        self._calls.put((lambda: function(self._manager), future))
        self._wake.set()
        deadline = time.monotonic() + timeout_s
        # In slices, because the thread may end between the check and the call.
        while not wait([future], timeout=min(1.0, max(0.0, deadline - time.monotonic()))).done:
            self.check()
            if time.monotonic() >= deadline:
                idle = time.monotonic() - self._last_progress
                raise RunError(
                    f"{reason}: the rollout thread did not finish it within {timeout_s} s; its last progress was "
                    f"{idle:.0f} s ago"
                )
        return future.result()

    def take_finished(self, max_groups: int, min_groups: int, timeout_s: float) -> list[Group]:
        """Up to `max_groups` finished groups, in the order of their orders.

        Waits for `min_groups`, at most `timeout_s` seconds and no longer than anything is in work; then returns what
        there is, perhaps nothing.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while len(self._finished) < min_groups and self._manager.num_groups and self._error is None:
                if not self._changed.wait(deadline - time.monotonic()):
                    break
            self.check()
            ready = sorted(self._finished.values(), key=lambda group: group.sequence)[:max_groups]
            for group in ready:
                del self._finished[group.order.group_id]
            return ready

    def put_back(self, groups: Collection[Group]) -> None:
        """Makes taken groups available again."""
        with self._changed:
            self._finished.update({group.order.group_id: group for group in groups})

    def take_evaluated(self, group_ids: Collection[str], timeout_s: float) -> list[Group]:
        """The evaluated groups, once all are finished.

        Raises:
            RunError: they are not within `timeout_s` seconds; names how many are.
        """
        with self._changed:
            if not self._changed.wait_for(
                lambda: self._error is not None or self._evaluated.keys() >= set(group_ids), timeout_s
            ):
                done = len(self._evaluated.keys() & set(group_ids))
                raise RunError(f"validation: {done} of {len(group_ids)} samples are drawn after {timeout_s} s")
            self.check()
            return [self._evaluated.pop(group_id) for group_id in group_ids]

    def abort(self, group_ids: Collection[str], timeout_s: float) -> None:
        """Forgets groups, in work or finished."""

        def forget(manager: RolloutManager) -> None:
            manager.abort(group_ids)
            with self._changed:
                for group_id in group_ids:
                    self._finished.pop(group_id, None)
                    self._evaluated.pop(group_id, None)

        self.call(forget, reason="abort of groups", timeout_s=timeout_s)

    def load_weights(self, load: Callable[[GenerationEngine], None], timeout_s: float) -> int:
        """Runs `load` on the sampler between two of its steps; the version after it."""

        def run(_: RolloutManager) -> int:
            load(self._engine)
            self._version = self._engine.version
            return self._version

        return self.call(run, reason="new weights", timeout_s=timeout_s)

    def status(self) -> RolloutStatus:
        """How it goes; also while the thread is busy or stands still."""
        self.check()
        in_flight = self._manager.num_groups
        with self._changed:
            finished = len(self._finished)
        return RolloutStatus(
            in_flight=in_flight,
            finished=finished,
            idle_s=time.monotonic() - self._last_progress if in_flight else 0.0,
            version=self._version,
            counts=dict(self._manager.counts),
        )

    def check(self) -> None:
        """Raises what ended the thread, if anything did."""
        error = self._error
        if isinstance(error, UserError):
            raise UserError(str(error)) from error
        if error is not None:
            raise RunError(f"rollouts have ended: {type(error).__name__}: {error}") from error

    def stop(self, timeout_s: float = 10.0) -> bool:
        """Ends the thread and closes the sampler; False when it is stuck and was left behind."""
        self._stopping = True
        self._wake.set()
        if self._thread.ident is None:
            self._manager.close()
            self._engine.close()
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._wake.clear()
                self._take_calls()
                advanced = self._manager.step()
                self._publish()
                if advanced:
                    self._last_progress = time.monotonic()
                else:
                    self._wake.wait(_LONGEST_NAP_S)
        # It must reach the main thread, whatever it is: nobody looks at this one.
        except BaseException as error:
            log.exception("the rollout thread ended")
            self._fail(error)
        finally:
            self._manager.close()
            self._engine.close()

    def _take_calls(self) -> None:
        while True:
            try:
                function, future = self._calls.get_nowait()
            except Empty:
                return
            try:
                result = function()
            except Exception as error:  # noqa: BLE001  raised by the caller, who waits for the result
                future.set_exception(error)
            else:
                future.set_result(result)
            if not self._manager.num_groups:
                self._last_progress = time.monotonic()

    def _publish(self) -> None:
        groups = self._manager.take_finished()
        if not groups:
            return
        with self._changed:
            for group in groups:
                (self._evaluated if group.evaluation else self._finished)[group.order.group_id] = group
            self._changed.notify_all()

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._error = error
            self._changed.notify_all()

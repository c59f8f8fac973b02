"""The one thread that owns all loaders of a worker process and keeps training batches ready.

One thread and not one per loader: Energon keeps a process-wide active config, and the state of a loader is only whole
in the thread that draws, right after a draw.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

from nemo_rl.data.energon.replica import ReplicaLoaders
from nemo_rl.data.energon.sft_types import LoadedBatch
from nemo_rl.utils.errors import RunError

log = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 30.0


class LoaderThread:
    """Batches of a replica, made ahead. The methods are for one thread, the worker's main one.

    An exception of the thread is raised by the next call of any method but `close`, and by all later ones.
    """

    def __init__(self, build: Callable[[], ReplicaLoaders], depth: int):
        """Start the thread, which calls `build` first. `depth`: training batches kept ready, at least 1."""
        self._build = build
        self._depth = max(1, depth)
        self._changed = threading.Condition()
        self._train: deque[LoadedBatch] = deque()
        self._validation: deque[LoadedBatch | None] = deque()
        self._validation_wanted = False
        self._loaders: ReplicaLoaders | None = None
        self._error: BaseException | None = None
        self._closed = False
        self._doing = "opening the data"
        self._since = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="onehop-loader", daemon=True)
        self._thread.start()

    def wait_ready(self, timeout_s: float) -> None:
        """Return once the loaders are built; raise what building them raised."""
        self._wait(lambda: self._loaders is not None, "the data loaders to open", timeout_s)

    def next_train(self, timeout_s: float) -> LoadedBatch:
        """The next training batch. Raises `RunError` after `timeout_s` seconds, naming what the thread is doing."""
        with self._changed:
            self._wait(lambda: bool(self._train), "the next training batch", timeout_s)
            batch = self._train.popleft()
            self._changed.notify_all()
            return batch

    def next_validation(self, timeout_s: float) -> LoadedBatch | None:
        """The next validation batch, or None where the pass ends; the call after that starts a new pass."""
        with self._changed:
            self._validation_wanted = True
            self._changed.notify_all()
            self._wait(lambda: bool(self._validation), "the next validation batch", timeout_s)
            batch = self._validation.popleft()
            # One batch ahead inside a pass; the first one of a pass is made on demand.
            self._validation_wanted = batch is not None and None not in self._validation
            self._changed.notify_all()
            return batch

    def close(self) -> None:
        """End the thread and with it the loaders. Safe to call twice."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            log.warning("the loader thread is still %s after %.0f s", self._doing, CLOSE_TIMEOUT_S)

    def _wait(self, ready: Callable[[], bool], reason: str, timeout_s: float) -> None:
        with self._changed:
            done = self._changed.wait_for(lambda: ready() or self._error is not None or self._closed, timeout_s)
            if ready():
                return
            if self._error is not None:
                raise self._error
            if self._closed:
                raise RuntimeError("the loader thread is closed")
            assert not done
            shards = "" if self._loaders is None else f" of shards {list(self._loaders.shards)}"
            raise RunError(
                f"waited {timeout_s:.0f} s for {reason}{shards}; the loader thread has been {self._doing} "
                f"for {time.monotonic() - self._since:.0f} s"
            )

    def _run(self) -> None:
        try:
            loaders = self._build()
            with self._changed:
                self._loaders = loaders
                self._changed.notify_all()
            try:
                while (job := self._next_job()) is not None:
                    job(loaders)
            finally:
                loaders.close()
        except BaseException as error:  # noqa: BLE001 - raised again in the thread that waits
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _next_job(self) -> Callable[[ReplicaLoaders], None] | None:
        with self._changed:
            self._note("waiting for room")
            self._changed.wait_for(lambda: self._closed or self._wants_validation() or self._wants_train())
            if self._closed:
                return None
            return self._load_validation if self._wants_validation() else self._load_train

    def _wants_validation(self) -> bool:
        return self._validation_wanted and not self._validation

    def _wants_train(self) -> bool:
        return len(self._train) < self._depth

    def _load_train(self, loaders: ReplicaLoaders) -> None:
        self._note("reading a training batch")
        batch = loaders.next_train()
        with self._changed:
            self._train.append(batch)
            self._changed.notify_all()

    def _load_validation(self, loaders: ReplicaLoaders) -> None:
        self._note("reading a validation batch")
        batch = loaders.next_validation()
        with self._changed:
            self._validation.append(batch)
            self._changed.notify_all()

    def _note(self, doing: str) -> None:
        self._doing, self._since = doing, time.monotonic()

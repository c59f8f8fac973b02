"""What lets tests run the command line in this process."""

import logging
from collections.abc import Iterator

import pytest


class RayStartedError(RuntimeError):
    """Raised in place of the start of Ray, which no test of a wrong config may get to."""


@pytest.fixture
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ray is out of reach, no GPU is seen, and logging, which the command line sets up, is as before afterwards."""

    def start(*_: object, **__: object) -> None:
        raise RayStartedError("a run is about to start")

    monkeypatch.setattr("nemo_rl.algorithms.drive.init_ray", start)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    root, ours = logging.getLogger(), logging.getLogger("nemo_rl")
    handlers, level, our_level = list(root.handlers), root.level, ours.level
    yield
    logging.captureWarnings(False)
    root.handlers[:] = handlers
    root.setLevel(level)
    ours.setLevel(our_level)

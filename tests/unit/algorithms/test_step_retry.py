"""A step that ran out of memory is tried once more with smaller passes; any other failure ends it.

The trainer and the engine are replaced by ones that fail on demand. Not covered here: real exhaustion of memory.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nemo_rl.algorithms.sft_v2 import SFTSingleControllerActor
from nemo_rl.models.policy.tq_policy import TQPolicy
from nemo_rl.models.worker import ModelWorker
from nemo_rl.utils.errors import MemoryExhaustedError, RunError

Controller: Any = getattr(SFTSingleControllerActor, "__ray_metadata__").modified_class  # noqa: B009


def failure(cause: Exception) -> RunError:
    """An error as the wait for workers raises it: the worker's own exception is two levels down."""
    error = RunError(f"rank 0 failed: {cause}")
    error.__cause__ = RuntimeError("task error")
    setattr(error.__cause__, "cause", cause)  # noqa: B010
    return error


class Trainer(TQPolicy):
    """Fails the first `failures` microbatch calls with `cause`."""

    def __init__(self, failures: int, cause: Exception, *, sharded: bool = False):
        self.failures, self.cause = failures, cause
        self.model_info = {"sharded": sharded}
        self.calls: list[str] = []

    def begin_train_step(self, *args: Any, **kwargs: Any) -> None:
        self.calls.append("begin")

    def train_placed_microbatches(self, *args: Any, **kwargs: Any) -> None:
        self.calls.append("microbatch")
        if self.failures:
            self.failures -= 1
            raise failure(self.cause)

    def finish_train_step(self) -> dict[str, Any]:
        self.calls.append("finish")
        return {"loss": 1.0}

    def abort_train_step(self) -> None:
        self.calls.append("abort")

    def halve_microbatches(self) -> int:
        self.calls.append("halve")
        return 512


def controller(trainer: Trainer) -> Any:
    made = object.__new__(Controller)
    made._trainer = trainer
    made._args = SimpleNamespace(loss_fn=None)
    made._state = SimpleNamespace(total_steps=3)
    return made


def test_memory_once_is_cured_by_smaller_passes() -> None:
    trainer = Trainer(1, MemoryExhaustedError("too large"))
    assert controller(trainer)._train_with_retry([]) == {"loss": 1.0}
    assert trainer.calls == ["begin", "microbatch", "abort", "halve", "begin", "microbatch", "finish"]


@pytest.mark.parametrize(
    "trainer",
    [
        Trainer(2, MemoryExhaustedError("too large")),
        Trainer(1, ValueError("a fault")),
        Trainer(1, MemoryExhaustedError("too large"), sharded=True),
    ],
    ids=["twice", "another cause", "ranks wait for each other"],
)
def test_what_is_not_cured_ends_the_step(trainer: Trainer) -> None:
    with pytest.raises(RunError):
        controller(trainer)._train_with_retry([])
    assert "finish" not in trainer.calls


def test_the_worker_names_the_pass_that_did_not_fit() -> None:
    class Engine:
        microbatch_tokens = inference_microbatch_tokens = 4096

        def microbatch(self, data: Any) -> None:
            raise torch.OutOfMemoryError("tried to allocate 3 GiB\nmore")

    worker = object.__new__(ModelWorker)
    worker._engine = Engine()
    with pytest.raises(MemoryExhaustedError, match=r"4096 tokens: tried to allocate 3 GiB$"):
        worker.train_microbatch({})
    assert worker.halve_microbatches() == 2048

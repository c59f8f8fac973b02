"""A worker that ends its whole run by SIGKILL at a named moment, and a command line that uses it.

    python tests/kill_worker.py CONFIG      with KILL_PHASE, KILL_STEP and KILL_MARK in the environment

KILL_MARK is the file that says which moment was hit; it is written right before the kill.
"""

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from nemo_rl.data.energon.sft_types import StepEnvelope
from nemo_rl.data.energon.sft_worker import SFTPolicyWorker

PHASES = ("loading", "forward", "backward", "optimizer", "commit", "save", "rename")


class KillingWorker(SFTPolicyWorker):
    """An `SFTPolicyWorker` whose rank 0 kills the command line, then itself, at the moment of the environment."""

    def initialize(self, **kwargs: Any) -> dict[str, Any]:
        info = super().initialize(**kwargs)
        if self.rank == 0:
            self._arm()
        return info

    def load_next_sft_batch(self, **kwargs: Any) -> StepEnvelope:
        self._strike("loading", self._next_step)
        return super().load_next_sft_batch(**kwargs)

    def commit_sft_batch(self) -> None:
        self._strike("commit", self.engine.num_steps)
        super().commit_sft_batch()

    @property
    def _next_step(self) -> int:
        return self.engine.num_steps + 1

    def _arm(self) -> None:
        import nemo_rl.models.engine.checkpoint as checkpoint

        head, write, optimizer = self.engine.head, checkpoint._write, self.engine.optimizer
        assert optimizer is not None

        def killing_head(model: Any, pack: Any) -> Any:
            self._strike("forward", self._next_step)
            out = head(model, pack)
            if out.requires_grad:
                out.register_hook(lambda _: self._strike("backward", self._next_step))
            return out

        def killing_write(tensors: Any, directory: Path, group: Any) -> None:
            write(tensors, directory, group)
            if directory.name == "weights":
                self._strike("save", int(directory.parent.parent.name.removeprefix("tmp_step_")))

        def watch_for_the_rename() -> None:
            published = Path(os.environ["KILL_CHECKPOINTS"]) / f"step_{os.environ['KILL_STEP']}"
            while not published.exists():
                time.sleep(0.0005)
            self._strike("rename", int(os.environ["KILL_STEP"]))

        self.engine.head = killing_head
        checkpoint._write = killing_write
        optimizer.register_step_pre_hook(lambda *_: self._strike("optimizer", self._next_step))
        if os.environ["KILL_PHASE"] == "rename":
            threading.Thread(target=watch_for_the_rename, daemon=True).start()

    def _strike(self, phase: str, step: int) -> None:
        if self.rank == 0 and (phase, str(step)) == (os.environ["KILL_PHASE"], os.environ["KILL_STEP"]):
            Path(os.environ["KILL_MARK"]).write_text(f"{phase} {step}")
            os.kill(int(os.environ["KILL_PID"]), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    """Trains as the config says, with the killing worker."""
    from nemo_rl.algorithms import sft_setup
    from nemo_rl.algorithms.sft_run import run_sft

    os.environ["KILL_PID"] = str(os.getpid())
    sft_setup.WORKER_CLASS = "kill_worker.KillingWorker"
    run_sft(sys.argv[1])


if __name__ == "__main__":
    main()

"""A PPO run that ends itself by SIGKILL at a named moment.

    python tests/kill_rl_worker.py CONFIG      with KILL_PHASE, KILL_STEP and KILL_MARK in the environment

KILL_MARK is the file that says which moment was hit; it is written right before the kill. Steps count from 1.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

from nemo_rl.models.engine.engine import StepResult
from nemo_rl.models.worker import ModelWorker

PHASES = ("logprobs", "values", "critic", "forward", "optimizer", "save", "hand_over")


class KillingWorker(ModelWorker):
    """A `ModelWorker` that kills the command line, then itself, at the moment of the environment.

    The hand-over of weights before the first step is number 0; the one after step n is number n.
    """

    _calls: dict[str, int]

    def _strike(self, phase: str, per_step: int = 1) -> None:
        self._calls = getattr(self, "_calls", {})
        count = self._calls[phase] = self._calls.get(phase, 0) + 1
        first = int(os.environ["KILL_FIRST"])  # the step that this start begins with
        step = first + (count - 1) // per_step
        if os.environ["KILL_PHASE"] == phase and step == int(os.environ["KILL_STEP"]):
            Path(os.environ["KILL_MARK"]).write_text(f"{phase} {step}")
            os.kill(int(os.environ["KILL_PID"]), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)

    def get_logprobs(self, *args: Any, **kwargs: Any) -> Any:
        self._strike("logprobs")
        return super().get_logprobs(*args, **kwargs)

    def get_values(self, *args: Any, **kwargs: Any) -> Any:
        self._strike("values")
        return super().get_values(*args, **kwargs)

    def train_microbatch(self, data: Any) -> None:
        self._strike("critic" if self.engine_config.head == "value" else "forward", per_step=2)
        super().train_microbatch(data)

    def _finish_step(self) -> StepResult:
        if self.engine_config.head == "lm":
            self._strike("optimizer", per_step=2)
        return super()._finish_step()

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        super().save_checkpoint(*args, **kwargs)
        if self.engine_config.head == "lm":
            # Every step saves in these runs.
            self._strike("save")

    def export_weights(self, *args: Any, **kwargs: Any) -> Any:
        if getattr(self, "_handed_over", False):
            self._strike("hand_over")
        self._handed_over = True
        return super().export_weights(*args, **kwargs)


def main() -> None:
    from nemo_rl.algorithms.single_controller_run import run_ppo
    from nemo_rl.models.policy import lm_policy
    from nemo_rl.models.value import lm_value

    os.environ["KILL_PID"] = str(os.getpid())
    lm_policy.WORKER_CLASS = lm_value.WORKER_CLASS = "kill_rl_worker.KillingWorker"
    run_ppo(sys.argv[1])


if __name__ == "__main__":
    main()

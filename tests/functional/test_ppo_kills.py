"""One PPO run, killed by SIGKILL at each of its phases and resumed after each, against a run that was never cut.

Not covered here: kills of a single worker, and power loss.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from kill_rl_worker import PHASES
from rl_runs import FinishedRun, assert_same_metrics, assert_same_weights, make_inputs, run_rl, write_config
from sft_runs import REPO

LIMIT_S, STEPS = 300, 8
# The first is inside the warm-up, before anything was saved.
MOMENTS = (
    ("critic", 1),
    ("logprobs", 2),
    ("values", 3),
    ("forward", 4),
    ("optimizer", 5),
    ("save", 6),
    ("hand_over", 7),
)


def newest(checkpoints: Path) -> int:
    """The step of the newest complete checkpoint, 0 without one."""
    return max((int(path.name.removeprefix("step_")) for path in checkpoints.glob("step_*")), default=0)


def kill_at(config: Path, phase: str, step: int, work: Path) -> str:
    """Starts or resumes the run until it kills itself at the moment; returns what was hit."""
    mark = work / "mark"
    mark.unlink(missing_ok=True)
    environment = os.environ | {
        "KILL_PHASE": phase,
        "KILL_STEP": str(step),
        "KILL_FIRST": str(newest(config.parent / "checkpoints") + 1),
        "KILL_MARK": str(mark),
        "PYTHONPATH": str(REPO / "tests"),
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = [sys.executable, str(REPO / "tests" / "kill_rl_worker.py"), str(config)]
    done = subprocess.run(command, env=environment, cwd=REPO, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == -signal.SIGKILL, f"{phase} {step}: {done.returncode} {done.stderr[-2000:]}"
    return mark.read_text()


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_kills_in_every_phase_lose_nothing(tmp_path: Path) -> None:
    inputs = make_inputs(tmp_path)
    settings = {
        "ppo__max_num_steps": STEPS,
        "ppo__policy_training_start_step": 1,
        "checkpointing__save_period": 1,
    }
    straight = run_rl(write_config(tmp_path / "straight", inputs, **settings))
    config = write_config(tmp_path / "killed", inputs, **settings)
    assert {phase for phase, _ in MOMENTS} == set(PHASES)
    hit = [kill_at(config, phase, step, tmp_path) for phase, step in MOMENTS]
    assert hit == [f"{phase} {step}" for phase, step in MOMENTS]
    resumed: FinishedRun = run_rl(config)
    assert_same_metrics(resumed.metrics, straight.metrics, rel=1e-5)
    for name in ("steps", "policy_updates", "consumed_samples", "dropped"):
        assert resumed.summary[name] == straight.summary[name]
    for role in ("policy", "value"):
        assert_same_weights(resumed.weights(STEPS, role), straight.weights(STEPS, role), atol=1e-5)

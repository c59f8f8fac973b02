"""One run, killed by SIGKILL at twenty named moments and resumed after each, against a run that was never cut.

Every start resumes what the kill before it left, so each moment is both hit and recovered from. Not covered here: kills
of a single worker (test_sft_bad_input) and power loss.
"""

import os
import random
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from kill_worker import PHASES
from sft_runs import REPO, FinishedRun, Inputs, losses, read_lines, run_sft, trained_rows, write_config

MOMENTS, SAVE_PERIOD, STEPS = 20, 2, 60
LIMIT_S = 240


def moments(seed: int = 0) -> list[tuple[str, int]]:
    """Twenty (phase, step): each phase at least twice, steps that rise so that each start gets further."""
    rng = random.Random(seed)
    phases = [PHASES[i % len(PHASES)] for i in range(MOMENTS)]
    rng.shuffle(phases)
    steps, at = [], 2
    for phase in phases:
        at += rng.randint(1, 2)
        if phase in ("save", "rename"):
            at += at % SAVE_PERIOD
        steps.append(at)
        # The save before a kill may be unfinished; the next start must still get past this moment.
        at += 1
    return list(zip(phases, steps, strict=True))


def kill_at(config: Path, phase: str, step: int, work: Path) -> str:
    """Starts or resumes the run until it kills itself at the moment; returns what was hit."""
    mark = work / "mark"
    mark.unlink(missing_ok=True)
    environment = os.environ | {
        "KILL_PHASE": phase,
        "KILL_STEP": str(step),
        "KILL_MARK": str(mark),
        "KILL_CHECKPOINTS": str(config.parent / "checkpoints"),
        "PYTHONPATH": str(REPO / "tests"),
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = [sys.executable, str(REPO / "tests" / "kill_worker.py"), str(config)]
    done = subprocess.run(command, env=environment, cwd=REPO, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == -signal.SIGKILL, f"{phase} {step}: {done.returncode} {done.stderr[-2000:]}"
    return mark.read_text()


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_twenty_kills_lose_and_double_nothing(inputs: Inputs, tmp_path: Path) -> None:
    settings = {
        "model": inputs.model,
        "train": inputs.train,
        "data__energon": {"topology_mapper": "elastic", "logical_shards": 2},
        "sft__max_num_steps": STEPS,
        "checkpointing__save_period": SAVE_PERIOD,
    }
    straight = run_sft(write_config(tmp_path / "straight", **settings))
    config = write_config(tmp_path / "killed", **settings)
    plan = moments()
    assert set(PHASES) == {phase for phase, _ in plan}
    assert max(step for _, step in plan) < STEPS
    hit = [kill_at(config, phase, step, tmp_path) for phase, step in plan]
    assert hit == [f"{phase} {step}" for phase, step in plan]
    resumed = FinishedRun(config, run_sft(config).cli)
    assert trained_rows(resumed.logs) == trained_rows(straight.logs)
    assert losses(resumed.logs) == pytest.approx(losses(straight.logs), rel=1e-6)
    lines = read_lines(resumed.logs / "rows.jsonl")
    counts = Counter(source for line in lines for source in line["source_ids"])
    passes = STEPS * 4 // 24
    assert set(counts.values()) == {passes}, "each row as often as there are passes"
    assert len(counts) == 24

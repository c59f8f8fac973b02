"""Runs that are cut and resumed by the same command train the rows and losses of a run that was never cut.

Kills are SIGKILL, and each test says what the run was doing. Not covered here: kills of single workers
(`test_sft_bad_input`), machines that lose what was not synced.
"""

import os
import shutil
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from sft_runs import (
    STEPS,
    CliRun,
    FinishedRun,
    Inputs,
    losses,
    read_lines,
    run_sft,
    trained_rows,
    write_config,
)
from tiny import DATA

B14_ROWS, B14_STEPS = DATA / "cases" / "b14_twentyfour_rows.jsonl", 12
ELASTIC = {"topology_mapper": "elastic", "logical_shards": 2}


def step_reached(logs: Path) -> int:
    """The last step in the log of a run that is going on."""
    path = logs / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    return max((line["step"] for line in read_lines(path)), default=0) if text.endswith("\n") else 0


def validation_losses(logs: Path) -> dict[int, float]:
    return {line["step"]: line["val_loss"] for line in read_lines(logs / "metrics.jsonl") if "val_loss" in line}


def weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for path in (checkpoint / "policy" / "weights").glob("*.safetensors"):
        tensors |= load_file(path)
    return tensors


def assert_same_run(run: FinishedRun, straight: FinishedRun, *, rel: float = 1e-6) -> None:
    """Rows of each step and their order, losses, validation losses."""
    assert trained_rows(run.logs) == trained_rows(straight.logs)
    assert losses(run.logs) == pytest.approx(losses(straight.logs), rel=rel)
    assert validation_losses(run.logs) == pytest.approx(validation_losses(straight.logs), rel=rel)


def test_a_stopped_and_then_killed_run_continues_as_if_nothing_had_been(
    straight_run: FinishedRun, inputs: Inputs, tmp_path: Path
) -> None:
    """Out of time at a step after which no save was due, so that the next batch had been asked for already.

    Then cut in training, after the border of a pass, while the last checkpoint lies before it. The straight run has two
    elastic shards; this one takes the default of a shard per worker, which is the same here.
    """
    options: dict[str, Any] = {
        "model": inputs.model,
        "train": inputs.train,
        "data__validation": {"path": str(inputs.validation)},
        "sft__val_at_start": True,
        "sft__val_period": 10,
        "sft__val_at_end": True,
    }
    stopped = run_sft(write_config(tmp_path, **options, checkpointing__checkpoint_must_save_by="00:00:00:00"))
    assert "checkpoint_must_save_by is reached: saved at step 1 and stopping" in stopped.cli.output
    assert step_reached(tmp_path / "logs") == 1
    config = write_config(tmp_path, **options)
    checkpoints, logs = tmp_path / "checkpoints", tmp_path / "logs"
    with CliRun("sft", "--config", config) as run:
        run.wait_until(lambda: (checkpoints / "step_5").exists() and step_reached(logs) >= 7, "step 7")
        run.kill_all()
        assert run.finish() == -signal.SIGKILL
    assert step_reached(logs) < STEPS, "the kill came in mid-run"
    resumed = run_sft(config)
    assert "resuming from" in resumed.cli.output
    assert_same_run(resumed, straight_run)
    last, straight_last = (weights(r.checkpoints / f"step_{STEPS}") for r in (resumed, straight_run))
    assert last.keys() == straight_last.keys()
    for name, tensor in last.items():
        torch.testing.assert_close(tensor, straight_last[name], rtol=0, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["starting", "training", "saving"])
def test_a_run_killed_in_any_phase_continues(
    straight_run: FinishedRun, inputs: Inputs, tmp_path: Path, phase: str
) -> None:
    """Only the command line is killed: the rest has to notice. "starting" is a resumed run before its first step."""
    config = write_config(
        tmp_path,
        model=inputs.model,
        train=inputs.train,
        data__validation={"path": str(inputs.validation)},
        data__energon=ELASTIC,
        sft__val_at_start=True,
        sft__val_period=10,
        sft__val_at_end=True,
    )
    checkpoints, logs = tmp_path / "checkpoints", tmp_path / "logs"
    if phase == "starting":
        run_sft(config, "sft.max_num_steps=5", "sft.val_at_end=false")
    with CliRun("sft", "--config", config) as run:
        conditions = {
            "starting": lambda: any(command.startswith("ray::WorkerHost") for command in run.family().values()),
            "training": lambda: (checkpoints / "step_5").exists() and step_reached(logs) >= 8,
            "saving": lambda: (checkpoints / "step_5").exists() and (checkpoints / "tmp_step_10").exists(),
        }
        run.wait_until(conditions[phase], phase)
        os.kill(run.pid, signal.SIGKILL)
        assert run.finish() == -signal.SIGKILL
    if phase == "saving":
        assert not (checkpoints / "step_15").exists()
    assert_same_run(run_sft(config), straight_run)


@pytest.fixture(scope="module")
def b14_run(inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    """Two passes of the 24 rows of case B-14, with a checkpoint after each step."""
    config = write_config(
        tmp_path_factory.mktemp("b14"),
        model=inputs.model,
        train=B14_ROWS,
        data__energon=ELASTIC | {"prefetch_factor": 2},
        sft__max_num_steps=B14_STEPS,
        checkpointing__save_period=1,
    )
    return run_sft(config)


@pytest.mark.slow
@pytest.mark.parametrize("step", range(1, B14_STEPS))
def test_b15_a_run_can_be_cut_after_each_step(b14_run: FinishedRun, inputs: Inputs, tmp_path: Path, step: int) -> None:
    """What a kill leaves: the checkpoint of the step, an unfinished one, records of later steps, half a line."""
    config = write_config(
        tmp_path,
        model=inputs.model,
        train=B14_ROWS,
        data__energon=ELASTIC | {"prefetch_factor": 2},
        sft__max_num_steps=B14_STEPS,
        checkpointing__save_period=1,
    )
    shutil.copytree(b14_run.logs, tmp_path / "logs")
    shutil.copytree(b14_run.checkpoints / f"step_{step}", tmp_path / "checkpoints" / f"step_{step}")
    (tmp_path / "checkpoints" / f"tmp_step_{step + 1}" / "policy").mkdir(parents=True)
    with (tmp_path / "logs" / "rows.jsonl").open("a") as file:
        file.write('{"step": 12, "sha')
    resumed = run_sft(config)
    assert f"step_{step}, step {step}" in resumed.cli.output
    assert_same_run(resumed, b14_run)
    assert not (tmp_path / "checkpoints" / f"tmp_step_{step + 1}").exists()


@pytest.mark.slow
@pytest.mark.parametrize("workers", [(2, 1, 2), (1, 2, 1)], ids=str)
def test_elastic_shards_move_between_numbers_of_workers(
    b14_run: FinishedRun, inputs: Inputs, tmp_path: Path, workers: tuple[int, ...]
) -> None:
    """Case B-14: stopped after 2 and after 7 steps, once in each pass, and resumed with another number of workers."""
    config = write_config(
        tmp_path,
        model=inputs.model,
        train=B14_ROWS,
        data__energon=ELASTIC,
        checkpointing__save_period=100,
    )
    *_, run = (
        run_sft(config, f"cluster.gpus_per_node={count}", f"sft.max_num_steps={stop}")
        for count, stop in zip(workers, (2, 7, B14_STEPS), strict=True)
    )
    assert_same_run(run, b14_run, rel=1e-5)
    first_pass = [source for step in trained_rows(run.logs)[:6] for _, source in step]
    assert Counter(first_pass) == Counter(str(row) for row in range(24))

"""Bad input and accidents end with one clear line, an exit code that is not 0, and no process left after a minute.

What can be known before workers start is tested through the command line's entry point in this process, where it is
as true and takes no time, and twice in a process of its own. Not covered here: nodes that go away.
"""

import logging
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from sft_runs import STEPS, CliRun, FinishedRun, Inputs, metrics_by_step, write_config
from tiny import make_chat_rows, make_model_dir

from nemo_rl.cli.main import main
from nemo_rl.distributed.config import available_cores

EXIT_RUN_FAILED, EXIT_BAD_INPUT = 1, 2


@pytest.fixture(autouse=True)
def _cpu_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process sees no GPU, and gets back its logging, which the command line sets up."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    root, ours = logging.getLogger(), logging.getLogger("nemo_rl")
    handlers, level, our_level = list(root.handlers), root.level, ours.level
    yield
    logging.captureWarnings(False)
    root.handlers[:] = handlers
    root.setLevel(level)
    ours.setLevel(our_level)


def error_lines(output: str) -> list[str]:
    """What the command line reported; fails when there is a traceback."""
    assert "Traceback" not in output
    return [line.removeprefix("error: ") for line in output.splitlines() if line.startswith("error: ")]


def refused(config: Path, capfd: pytest.CaptureFixture[str], *overrides: str) -> str:
    """The one line with which both `check` and `sft` refuse a run, before Ray starts."""
    found = []
    for words in (["check", str(config)], ["sft", "--config", str(config)]):
        assert main([*words, *overrides]) == EXIT_BAD_INPUT
        out, err = capfd.readouterr()
        assert out == ""
        found.append(error_lines(err))
    assert not ray.is_initialized()
    by_check, by_sft = found
    assert by_check == by_sft and len(by_sft) == 1, found
    return by_sft[0]


def empty_file(inputs: Inputs, work: Path) -> dict[str, Any]:
    (work / "empty.jsonl").touch()
    return {"data__train__path": str(work / "empty.jsonl")}


def model_without_config(inputs: Inputs, work: Path) -> dict[str, Any]:
    shutil.copytree(inputs.model, work / "model")
    (work / "model" / "config.json").unlink()
    return {"policy__model_name": str(work / "model")}


CASES = {
    "no data file": (
        lambda inputs, work: {"data__train__path": str(work / "nowhere.jsonl")},
        r"data\.train\.path: .*/nowhere\.jsonl does not exist",
    ),
    "no validation file": (
        lambda inputs, work: {"data__validation": {"path": str(work / "nowhere.jsonl")}},
        r"data\.validation\.path: .*/nowhere\.jsonl does not exist",
    ),
    "empty data file": (empty_file, r"data\.train\.path: .*/empty\.jsonl has no rows"),
    "no model directory": (
        lambda inputs, work: {"policy__model_name": str(work / "nowhere")},
        r"policy\.model_name: there is no directory .*/nowhere",
    ),
    "model without config": (model_without_config, r"policy\.model_name: .*/model has no config\.json"),
    "batch does not divide": (
        lambda inputs, work: {"policy__train_global_batch_size": 5},
        r"policy\.train_global_batch_size: 5 does not divide by 2.*use a multiple of 2",
    ),
    "more workers than cores": (
        lambda inputs, work: (
            {"cluster__gpus_per_node": 64, "cluster__oversubscribe": False} | {"policy__train_global_batch_size": 64}
        ),
        rf"cluster\.gpus_per_node: 64 workers wanted .* {available_cores()} CPU cores .*cluster\.oversubscribe: true",
    ),
    "misspelled key": (
        lambda inputs, work: {"policy__train_global_batchsize": 4},
        r"policy\.train_global_batchsize.*train_global_batch_size",
    ),
}


@pytest.mark.parametrize(("changes", "expected"), CASES.values(), ids=CASES)
def test_what_can_be_known_is_refused_before_anything_starts(
    inputs: Inputs, tmp_path: Path, capfd: pytest.CaptureFixture[str], changes: Any, expected: str
) -> None:
    config = write_config(tmp_path, model=inputs.model, train=inputs.train, **changes(inputs, tmp_path))
    line = refused(config, capfd)
    assert re.match(expected, line), line
    assert not (tmp_path / "logs").exists() and not (tmp_path / "checkpoints").exists()


def test_all_problems_are_listed_at_once(inputs: Inputs, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = write_config(
        tmp_path,
        model=tmp_path / "nowhere",
        train=tmp_path / "nowhere.jsonl",
        policy__optimizer={"name": "torch.optim.Adamw"},
    )
    assert main(["sft", "--config", str(config)]) == EXIT_BAD_INPUT
    lines = error_lines(capfd.readouterr().err)
    keys = {re.split("[: ]", line)[0] for line in lines}
    assert keys == {"policy.model_name", "data.train.path", "policy.optimizer.name"}, lines


def test_a_missing_config_file_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert "nowhere.yaml" in refused(tmp_path / "nowhere.yaml", capfd)


@pytest.mark.parametrize("override", ["policy.train_global_batchsize=4", "data.train.path=/nowhere.jsonl"])
def test_a_refused_run_leaves_no_process(inputs: Inputs, tmp_path: Path, override: str) -> None:
    config = write_config(tmp_path, model=inputs.model, train=inputs.train)
    with CliRun("sft", "--config", config, override) as run:
        assert run.finish() == EXIT_BAD_INPUT
    lines = error_lines(run.output)
    assert len(lines) == 1 and lines[0].startswith(override.split("=")[0])
    assert run.output.strip() == f"error: {lines[0]}", "nothing else is said"


def files_below(folder: Path) -> dict[str, float]:
    return {str(path.relative_to(folder)): path.stat().st_mtime for path in folder.rglob("*")}


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("data.energon.logical_shards=4", "data_shards 2 -> 4"),
        ("policy.model_name={other}", "model.hidden_size 32 -> 64"),
        ("data.train.path={rows}", "data.digest '"),
        ("policy.train_global_batch_size=8", "train_global_batch_size 4 -> 8"),
    ],
    ids=["placement", "model", "data", "batch size"],
)
def test_b16_a_checkpoint_of_another_run_is_refused_and_left_alone(
    straight_run: FinishedRun, tmp_path: Path, capfd: pytest.CaptureFixture[str], override: str, expected: str
) -> None:
    """Also with more steps to do. More differences: tests/unit/algorithms/test_resume.py."""
    other = make_model_dir(tmp_path / "other", hidden=64)
    rows = make_chat_rows(tmp_path / "train.jsonl", 24, seed=7)
    before = files_below(straight_run.config.parent)
    line = refused(straight_run.config, capfd, override.format(other=other, rows=rows), "sft.max_num_steps=30")
    assert re.match(r"the checkpoint .*/step_24 is of another run: ", line) and expected in line, line
    assert "checkpointing.checkpoint_dir" in line, line
    assert files_below(straight_run.config.parent) == before


def test_a_killed_worker_ends_the_run_and_is_named(inputs: Inputs, tmp_path: Path) -> None:
    config = write_config(
        tmp_path, model=inputs.model, train=inputs.train, sft__max_num_steps=5000, sft__max_num_epochs=1000
    )
    metrics = tmp_path / "logs" / "metrics.jsonl"
    with CliRun("sft", "--config", config) as run:
        run.wait_until(lambda: metrics.exists() and metrics.read_text().count("\n") >= 3, "step 3")
        workers = [pid for pid, command in run.family().items() if command.startswith("ray::WorkerHost")]
        assert len(workers) == 2
        os.kill(workers[1], signal.SIGKILL)
        assert run.finish() == EXIT_RUN_FAILED
    (line,) = error_lines(run.output)
    assert re.match(r"rank [01] \(.*\) died", line) and f"pid {workers[1]}" in line, line


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1.5 MiB: room for two checkpoints or three."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1536k", "tmpfs", folder], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"making a small file system needs the right to mount one (root): {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_full_disk_while_saving_is_named_and_the_last_checkpoint_loads(
    inputs: Inputs, tmp_path: Path, small_disk: Path
) -> None:
    config = write_config(
        tmp_path,
        model=inputs.model,
        train=inputs.train,
        cluster__gpus_per_node=1,
        checkpointing__checkpoint_dir=str(small_disk / "checkpoints"),
        checkpointing__save_period=2,
    )
    with CliRun("sft", "--config", config) as run:
        assert run.finish() == EXIT_RUN_FAILED
    (line,) = error_lines(run.output)
    complete = sorted(path.name for path in (small_disk / "checkpoints").glob("step_*"))
    assert complete and not list((small_disk / "checkpoints").glob("tmp_*"))
    assert f"the file system at {small_disk} is full" in line and "checkpointing.checkpoint_dir" in line, line
    assert f"{complete[-1]} still loads" in line, line
    last = int(complete[-1].removeprefix("step_"))
    assert last < len(metrics_by_step(tmp_path / "logs")) < STEPS, "the run ended soon after the save that failed"

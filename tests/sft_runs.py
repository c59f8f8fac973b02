"""SFT runs as a user makes them: a YAML file and the command line in a process of its own, and what a run leaves."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import yaml
from tiny import make_chat_rows, make_model_dir

REPO = Path(__file__).parent.parent
RUN_LIMIT_S = 240.0
"""Longest a run of these tests may take on a busy machine, in seconds."""
GONE_LIMIT_S = 60.0
"""A run that has ended, however it did, leaves no process after so many seconds."""
LEARNING_RATE, WEIGHT_DECAY, MAX_GRAD_NORM = 5e-3, 0.05, 1.0
TRAIN_ROWS, VALIDATION_ROWS, GLOBAL_BATCH, STEPS = 24, 10, 4, 24
STEPS_PER_PASS = TRAIN_ROWS // GLOBAL_BATCH
_POLL_S, _LOOK_EVERY_S = 0.005, 0.25


@dataclass(frozen=True)
class Inputs:
    """A tiny model with random weights, and chat rows with the ids 0, 1, ..."""

    model: Path
    train: Path
    validation: Path


def make_inputs(work: Path) -> Inputs:
    """Makes the inputs below `work`."""
    return Inputs(
        model=make_model_dir(work / "model"),
        train=make_chat_rows(work / "train.jsonl", TRAIN_ROWS),
        validation=make_chat_rows(work / "validation.jsonl", VALIDATION_ROWS, seed=1),
    )


def write_config(work: Path, *, model: Path, train: Path, **changes: Any) -> Path:
    """Writes `work/run.yaml`, a run of two workers that logs and saves below `work`, and returns its path.

    `changes` are settings by key, with `__` where the command line has a dot: `sft__max_num_steps=3`.
    """
    config: dict[str, Any] = {
        "policy": {
            "model_name": str(model),
            "train_global_batch_size": GLOBAL_BATCH,
            "max_total_sequence_length": 256,
            "train_mb_tokens": 256,
            "precision": "float32",
            "max_grad_norm": MAX_GRAD_NORM,
            "optimizer": {
                "name": "torch.optim.AdamW",
                "kwargs": {"lr": LEARNING_RATE, "weight_decay": WEIGHT_DECAY},
            },
        },
        "data": {"train": {"path": str(train)}},
        "sft": {"max_num_steps": STEPS, "max_num_epochs": 10, "val_period": 0, "val_at_start": False},
        "data_plane": {"enabled": True, "impl": "local"},
        "logger": {"log_dir": str(work / "logs"), "log_row_ids": True},
        # The tests are about numbers and endings, so they also run where there is one core.
        "cluster": {"gpus_per_node": 2, "oversubscribe": True, "start_timeout_s": 180, "step_timeout_s": 120},
        "checkpointing": {"checkpoint_dir": str(work / "checkpoints"), "save_period": 5},
    }
    for key, value in changes.items():
        *parents, last = key.split("__")
        section = config
        for parent in parents:
            section = section.setdefault(parent, {})
        section[last] = value
    work.mkdir(parents=True, exist_ok=True)
    path = work / "run.yaml"
    path.write_text(yaml.safe_dump(config, sort_keys=False))
    return path


class CliRun:
    """`onehop` without GPUs in a process and a process group of its own, with every process that it starts.

    A context manager: what still runs at its end is killed, so that a test that fails leaves nothing.

    Attributes:
        output: what it wrote to its standard output and error, once it has ended.
    """

    def __init__(self, *words: object):
        # A file, because a pipe that nobody empties stops the writer.
        self._output_file = tempfile.TemporaryFile("w+")  # noqa: SIM115 - open as long as the run
        self._process = subprocess.Popen(
            [sys.executable, "-m", "nemo_rl.cli.main", *map(str, words)],
            stdin=subprocess.DEVNULL,
            stdout=self._output_file,
            stderr=subprocess.STDOUT,
            cwd=REPO,
            env=os.environ | {"NO_COLOR": "1", "CUDA_VISIBLE_DEVICES": ""},
            start_new_session=True,
        )
        self._seen: set[tuple[int, str]] = set()
        self._looked_at = 0.0
        self.output = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for pid in self.family():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()
        self._output_file.close()

    @property
    def pid(self) -> int:
        """Of the command line itself."""
        return self._process.pid

    def family(self) -> dict[int, str]:
        """Process id -> command line of what runs for this run now, the command line itself included."""
        parents, births, commands = _processes()
        # A process whose parent has died belongs to the family only by having been seen before.
        found = {self.pid} | {pid for pid, birth in self._seen if births.get(pid) == birth}
        while grown := {pid for pid, parent in parents.items() if parent in found} - found:
            found |= grown
        found &= births.keys()
        self._seen |= {(pid, births[pid]) for pid in found}
        return {pid: commands[pid] for pid in found}

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        """Returns as soon as `condition` holds; fails when the run ends before, or after `RUN_LIMIT_S`."""
        self._wait(lambda: condition() or self._process.poll() is not None, what, RUN_LIMIT_S)
        assert condition(), f"the run ended before {what}: exit code {self.finish()}, {self.output}"

    def kill_all(self) -> None:
        """SIGKILL to the command line and all that runs for it: the next steps would take less time than a clean-up."""
        for pid in [self.pid, *self.family()]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def finish(self) -> int:
        """Waits for the end and for the last process that the run started, and returns the exit code."""
        self._wait(lambda: self._process.poll() is not None, "end of the run", RUN_LIMIT_S)
        self._wait(lambda: not self.family(), "end of the processes that it started", GONE_LIMIT_S)
        self._output_file.seek(0)
        self.output = self._output_file.read()
        return self._process.returncode

    def _wait(self, condition: Callable[[], bool], what: str, limit_s: float) -> None:
        deadline = time.monotonic() + limit_s
        while not condition():
            if time.monotonic() - self._looked_at > _LOOK_EVERY_S:
                self._looked_at = time.monotonic()
                left = self.family()
                assert time.monotonic() < deadline, f"no {what} within {limit_s:g} s; there are {left}"
            time.sleep(_POLL_S)


@dataclass(frozen=True)
class FinishedRun:
    """A training run that went through, and where its config and records are."""

    config: Path
    cli: CliRun

    @property
    def logs(self) -> Path:
        """Where the config of `write_config` sends the records."""
        return self.config.parent / "logs"

    @property
    def checkpoints(self) -> Path:
        """Where the config of `write_config` sends the checkpoints."""
        return self.config.parent / "checkpoints"


def run_sft(config: Path, *overrides: str) -> FinishedRun:
    """`onehop sft`, to its successful end."""
    return FinishedRun(config, run_cli("sft", "--config", config, *overrides))


def run_cli(*words: object) -> CliRun:
    """`onehop`, to its successful end."""
    with CliRun(*words) as run:
        assert run.finish() == 0, run.output
    return run


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSONL file."""
    return [json.loads(line) for line in path.read_text().split("\n") if line]


def metrics_by_step(log_dir: Path) -> dict[int, dict[str, Any]]:
    """The metrics of each training step; fails when a step was logged twice."""
    lines = [line for line in read_lines(log_dir / "metrics.jsonl") if "loss" in line]
    steps = [line["step"] for line in lines]
    assert len(steps) == len(set(steps)), f"a step was logged twice: {steps}"
    return {line["step"]: line for line in lines}


def losses(log_dir: Path) -> list[float]:
    """The loss of each step, of step 1 first; fails when one is missing."""
    metrics = metrics_by_step(log_dir)
    assert sorted(metrics) == list(range(1, len(metrics) + 1))
    return [metrics[step]["loss"] for step in sorted(metrics)]


def trained_rows(log_dir: Path) -> list[list[tuple[int, str]]]:
    """For each step (shard, source id) of its rows, in the order in which they were trained."""
    steps: dict[int, list[tuple[int, str]]] = {}
    for line in read_lines(log_dir / "rows.jsonl"):
        steps.setdefault(line["step"], []).extend((line["shard"], source) for source in line["source_ids"])
    return [steps[step] for step in sorted(steps)]


def _processes() -> tuple[dict[int, int], dict[int, str], dict[int, str]]:
    """Parent, start time and command line of each process that is not a zombie."""
    parents, births, commands = {}, {}, {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            command = (entry / "cmdline").read_text().replace("\0", " ").strip()
        except OSError:
            continue  # it ended while we looked
        if fields[0] != "Z":
            pid = int(entry.name)
            parents[pid], births[pid], commands[pid] = int(fields[1]), fields[19], command
    return parents, births, commands

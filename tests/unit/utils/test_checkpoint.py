"""Checkpoint folders on a real disk, cut at every phase. Not covered: file systems shared by several machines."""

import errno
import json
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from nemo_rl.utils.checkpoint import CheckpointingConfig, CheckpointManager
from nemo_rl.utils.checkpoint_retention import steps_to_keep
from nemo_rl.utils.config import validate_config
from nemo_rl.utils.errors import ConfigError, RunError, UserError


def make(folder: Path, **config: Any) -> CheckpointManager:
    return CheckpointManager(CheckpointingConfig(checkpoint_dir=str(folder), **{"save_period": 1, **config}))


def save(manager: CheckpointManager, step: int, payload: str = "w", **info: Any) -> None:
    path = manager.init_tmp_checkpoint(step, {"total_steps": step, **info})
    with manager.saving(path):
        (path / "policy" / "weights").mkdir(parents=True)
        (path / "policy" / "weights" / "model").write_text(payload)
    manager.finalize_checkpoint(path)


def steps(folder: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in folder.glob("step_*"))


def test_a_saved_checkpoint_comes_back(tmp_path: Path):
    manager = make(tmp_path)
    assert manager.get_latest_checkpoint_path() is None
    assert manager.load_training_info(None) is None
    assert manager.get_resume_paths(None) == (None, None)
    info = {"a": torch.tensor(1.5), "b": np.float32(2.5), "c": np.array([3]), "d": float("nan"), "e": [1, np.int64(2)]}
    path = manager.init_tmp_checkpoint(7, info, CheckpointingConfig(checkpoint_dir="x", save_period=2))
    assert path == tmp_path / "tmp_step_7"
    (path / "policy" / "weights").mkdir(parents=True)
    manager.finalize_checkpoint(path)
    latest = manager.get_latest_checkpoint_path()
    assert latest == tmp_path / "step_7"
    assert manager.load_training_info(latest) == {"a": 1.5, "b": 2.5, "c": 3, "d": None, "e": [1, 2]}
    assert yaml.safe_load((latest / "config.yaml").read_text())["save_period"] == 2
    assert manager.get_resume_paths(latest) == (latest / "policy" / "weights", None)
    (latest / "policy" / "optimizer").mkdir()
    assert manager.get_resume_paths(latest)[1] == latest / "policy" / "optimizer"
    with pytest.raises(UserError, match="value/weights: no such folder"):
        manager.get_resume_paths(latest, model_component="value")


def test_only_whole_step_names_count(tmp_path: Path):
    manager = make(tmp_path)
    save(manager, 9)
    save(manager, 10)
    for name in ("tmp_step_12", "step_11x", "step_", "steps_13", "trash_step_14"):
        (tmp_path / name).mkdir()
    (tmp_path / "step_15").write_text("a file")
    assert manager.get_latest_checkpoint_path() == tmp_path / "step_10"


def test_a_stale_temporary_folder_is_replaced(tmp_path: Path):
    (tmp_path / "tmp_step_2" / "policy").mkdir(parents=True)
    (tmp_path / "tmp_step_1").mkdir()
    (tmp_path / "tmp_step_9").mkdir()
    save(make(tmp_path), 2)
    assert {path.name for path in tmp_path.iterdir()} == {"step_2", "tmp_step_9"}
    assert (tmp_path / "step_2" / "policy" / "weights" / "model").exists()


def test_b18_the_best_and_the_newest_stay(tmp_path: Path):
    manager = make(tmp_path, save_period=10, keep_top_k=2, metric_name="val:loss", higher_is_better=False)
    metrics = {10: 0.9, 20: 0.5, 30: float("nan"), 40: None, 50: 0.7}
    kept = {}
    for step, value in metrics.items():
        save(manager, step, **({} if step == 40 else {"val:loss": value}))
        kept[step] = steps(tmp_path)
    assert kept[40] == [10, 20, 40]
    assert kept[50] == [20, 50]
    assert manager.get_best_checkpoint_path() == tmp_path / "step_20"
    save(manager, 60, **{"val:loss": 0.5})
    assert manager.get_best_checkpoint_path() == tmp_path / "step_60"


def slow_keep(
    metrics: dict[int, float | None], period: int, higher: bool, top: int | None, latest: int | None
) -> set[int]:
    """The rules once more, by counting for each step how many beat it."""
    if top is None and latest is None:
        return set(metrics)

    def beats(a: int, b: int) -> bool:
        x, y = metrics[a], metrics[b]
        if x is None or y is None or x == y:
            return (x is not None and y is None) or ((x is None) == (y is None) and a > b)
        return x > y if higher else x < y

    keep = {max(metrics)} if metrics else set()
    for step in metrics:
        rivals = [other for other in metrics if other % period == 0]
        if step % period == 0 and (top is None or sum(beats(other, step) for other in rivals) < top):
            keep.add(step)
        if latest is not None and sum(other > step for other in metrics) < latest:
            keep.add(step)
    return keep


def test_keep_rules_equal_a_slow_reference():
    draw = random.Random(0)
    for _ in range(500):
        metrics = {
            step: draw.choice([None, float("nan"), 0.1, 0.2, 0.3])
            for step in draw.sample(range(1, 20), draw.randint(0, 8))
        }
        metrics = {step: None if value is None or value != value else value for step, value in metrics.items()}
        period, higher = draw.randint(1, 4), draw.random() < 0.5
        top, latest = (draw.choice([None, 1, 2, 3]) for _ in range(2))
        kept = steps_to_keep(metrics, save_period=period, higher_is_better=higher, keep_top_k=top, keep_latest_k=latest)
        assert kept == slow_keep(metrics, period, higher, top, latest)


def test_without_a_known_metric_the_newest_is_the_best(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    manager = make(tmp_path, metric_name="val:loss", higher_is_better=True)
    assert manager.get_best_checkpoint_path() is None
    save(manager, 1)
    save(manager, 2)
    with caplog.at_level(logging.WARNING):
        assert manager.get_best_checkpoint_path() == tmp_path / "step_2"
    assert "val:loss" in caplog.text


class Killed(BaseException):
    """Ends the save where it is raised, like SIGKILL: no handler of the code under test runs for it."""


def kill_at(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, when: Callable[..., bool]) -> None:
    real = getattr(owner, name)

    def cut(*args: Any, **kwargs: Any) -> Any:
        if when(*args):
            raise Killed
        return real(*args, **kwargs)

    monkeypatch.setattr(owner, name, cut)


PHASES: dict[str, tuple[Any, str, Callable[..., bool], str]] = {
    "before the sync": (os, "fsync", lambda *_: True, "first"),
    "before the former folder moves": (Path, "rename", lambda _, to: "old_" in str(to), "first"),
    "between the two renames": (Path, "rename", lambda path, _: path.name.startswith("tmp_"), "first"),
    "before the former folder goes": (Path, "rename", lambda path, _: path.name.startswith("old_"), "second"),
    "in a deletion": (shutil, "rmtree", lambda path, **_: path.name == "trash_step_1" and path.exists(), "second"),
}


@pytest.mark.parametrize("phase", PHASES)
def test_b17_a_kill_in_any_phase_leaves_a_checkpoint_that_loads(
    tmp_path: Path, phase: str, monkeypatch: pytest.MonkeyPatch
):
    owner, name, when, survivor = PHASES[phase]
    manager = make(tmp_path)
    save(manager, 1, payload="first")
    with monkeypatch.context() as patch:
        kill_at(patch, owner, name, when)
        with pytest.raises(Killed):
            save(manager, 1, payload="second")
    manager = make(tmp_path)
    latest = manager.get_latest_checkpoint_path()
    assert manager.load_training_info(latest) == {"total_steps": 1}
    weights, _ = manager.get_resume_paths(latest)
    assert weights is not None and (weights / "model").read_text() == survivor
    save(manager, 1, payload="third")
    save(manager, 2)
    assert {path.name for path in tmp_path.iterdir()} == {"step_1", "step_2"}
    assert (tmp_path / "step_1" / "policy" / "weights" / "model").read_text() == "third"


CHILD = """
import sys
from nemo_rl.utils.checkpoint import CheckpointingConfig, CheckpointManager
manager = CheckpointManager(CheckpointingConfig(checkpoint_dir=sys.argv[1], save_period=1, keep_top_k=2))
for step in range(1, 10_000):
    path = manager.init_tmp_checkpoint(step, {"total_steps": step})
    (path / "policy" / "weights").mkdir(parents=True)
    for part in range(5):
        (path / "policy" / "weights" / str(part)).write_text(str(step))
    manager.begin_finalization(path)
"""


def test_b17_a_process_killed_at_random_moments_leaves_a_checkpoint_that_loads(tmp_path: Path):
    draw = random.Random(1)
    for attempt in range(5):
        folder = tmp_path / str(attempt)
        child = subprocess.Popen([sys.executable, "-c", CHILD, str(folder)])
        deadline = time.monotonic() + 60
        while not steps(folder) and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(draw.random() * 0.1)
        child.send_signal(signal.SIGKILL)
        child.wait()
        manager = make(folder)
        latest = manager.get_latest_checkpoint_path()
        info = manager.load_training_info(latest)
        assert latest is not None and info is not None
        parts = [(latest / "policy" / "weights" / str(part)).read_text() for part in range(5)]
        assert parts == [str(info["total_steps"])] * 5
        save(manager, info["total_steps"] + 1)


def test_a_save_in_the_background_waits_for_the_writers(tmp_path: Path):
    written = threading.Event()
    with make(tmp_path) as manager:
        manager.begin_finalization(manager.init_tmp_checkpoint(1, {}), wait_fn=written.wait)
        assert manager.has_pending_finalization and steps(tmp_path) == []
        written.set()
        manager.begin_finalization(manager.init_tmp_checkpoint(2, {}))
        assert 1 in steps(tmp_path)
        manager.finalize_pending()
        assert not manager.has_pending_finalization and steps(tmp_path) == [1, 2]


def test_a_failure_in_the_background_is_raised_by_the_next_call(tmp_path: Path):
    manager = make(tmp_path)
    save(manager, 1)

    def fail() -> None:
        raise ValueError("rank 1 went away")

    manager.begin_finalization(manager.init_tmp_checkpoint(2, {}), wait_fn=fail)
    with pytest.raises(RunError, match=r"rank 1 went away; .*step_1 still loads"):
        manager.shutdown()
    manager.shutdown()
    assert {path.name for path in tmp_path.iterdir()} == {"step_1"}


def test_b17_a_full_disk_is_named_and_the_last_checkpoint_loads(tmp_path: Path):
    """`/dev/full` gives the real error of the kernel, a wrapped one stands for those that come from a worker."""
    manager = make(tmp_path)
    save(manager, 2)
    for wrap in (False, True):
        path = manager.init_tmp_checkpoint(3, {})
        with pytest.raises(RunError) as caught, manager.saving(path):
            try:
                Path("/dev/full").write_text("x")
            except OSError as error:
                assert error.errno == errno.ENOSPC
                if wrap:
                    raise RuntimeError(f"rank 0: {error}") from None
                raise
        message = str(caught.value)
        assert "the file system at " in message and " is full" in message and "step_2 still loads" in message
        assert not path.exists()
    assert manager.get_latest_checkpoint_path() == tmp_path / "step_2"


def test_a_folder_that_takes_no_files_is_named(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"file/here failed: .*there is no earlier checkpoint"):
        make(tmp_path / "file" / "here").init_tmp_checkpoint(1, {})


def test_a_broken_training_info_is_named(tmp_path: Path):
    manager = make(tmp_path)
    save(manager, 1)
    for text in ("{", "[1]"):
        (tmp_path / "step_1" / "training_info.json").write_text(text)
        with pytest.raises(UserError, match=r"step_1/training_info\.json"):
            manager.load_training_info(tmp_path / "step_1")


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"save_period": 0}, "save_period: expected 1 or more, got 0"),
        ({"metric_name": "loss"}, "metric_name: expected train:<name>, val:<name> or null, got 'loss'"),
        ({"metric_name": "val:loss"}, "metric_name is set, so higher_is_better must be true or false"),
        ({"checkpoint_must_save_by": "4h"}, "checkpoint_must_save_by: expected DD:HH:MM:SS"),
        ({"keep_topk": 3}, "keep_topk: unknown key, did you mean keep_top_k?"),
    ],
)
def test_config_faults_are_found_before_the_run(change: dict[str, Any], problem: str):
    raw = {"checkpoint_dir": "x", "save_period": 1, **change}
    with pytest.raises(ConfigError) as caught:
        validate_config(CheckpointingConfig, raw)
    assert len(caught.value.problems) == 1 and caught.value.problems[0].startswith(problem)


def test_training_info_is_json(tmp_path: Path):
    save(make(tmp_path), 1, metric=float("inf"))
    assert json.loads((tmp_path / "step_1" / "training_info.json").read_text()) == {"total_steps": 1, "metric": None}

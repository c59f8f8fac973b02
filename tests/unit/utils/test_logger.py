"""The metrics log and its trackers. Not covered: the services of wandb, MLflow and SwanLab; fakes stand for them."""

import json
import logging
import math
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from nemo_rl.utils.errors import UserError
from nemo_rl.utils.logger import Logger, LoggerConfig, check_logger, get_next_experiment_dir


def make(folder: Path, **config: Any) -> Logger:
    return Logger(LoggerConfig(log_dir=str(folder), **{"tensorboard_enabled": False, **config}))


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_b34_numbers_are_written_and_the_rest_is_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    log = make(tmp_path, tensorboard_enabled=True)
    metrics = {
        "plain": 1.5,
        "nan": float("nan"),
        "inf": float("inf"),
        "none": None,
        "list": [1, 2],
        "tensor": torch.tensor(2.5, dtype=torch.bfloat16),
        "text": "text",
        "array": np.array([3]),
        "long": torch.ones(2),
        "nested": {"a": np.float32(0.5), "b": {"c": -math.inf}},
        "step": 9,
    }
    with caplog.at_level(logging.WARNING):
        log.log_metrics(metrics, 1)
        log.log_metrics(metrics, 2)
    log.finish()
    first, second = lines(tmp_path / "metrics.jsonl")
    assert (first.pop("step"), second.pop("step")) == (1, 2)
    assert first.pop("time") <= second.pop("time")
    assert (
        first
        == second
        == {
            "plain": 1.5,
            "nan": "NaN",
            "inf": "Infinity",
            "tensor": 2.5,
            "array": 3,
            "nested/a": 0.5,
            "nested/b/c": "-Infinity",
        }
    )
    assert math.isnan(float(first["nan"])) and float(first["nested/b/c"]) == -math.inf
    warned = [record.getMessage() for record in caplog.records]
    assert len(warned) == 8
    for name in ("none", "list", "text", "long", "step", "nan", "inf", "nested/b/c"):
        assert sum(message.startswith(f"metric {name} is") for message in warned) == 1
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("tensor")] == [(1, 2.5), (2, 2.5)]
    assert all(math.isnan(event.value) for event in events.Scalars("nan"))


def test_prefix_step_metric_and_order(tmp_path: Path):
    log = make(tmp_path)
    log.log_metrics({"loss": 1.0}, 3, prefix="train", step_finished=True)
    log.log_metrics({"loss": 2.0, "rows": 40}, 3, prefix="val", step_metric="rows")
    written = [{key: line[key] for key in line if key != "time"} for line in lines(tmp_path / "metrics.jsonl")]
    assert written == [{"step": 3, "train/loss": 1.0}, {"step": 40, "val/loss": 2.0, "val/rows": 40}]
    with pytest.raises(ValueError, match="step 39 was logged after step 40"):
        log.log_metrics({"loss": 1.0}, 39)


def test_a_resumed_run_writes_later_steps_again(tmp_path: Path):
    log = make(tmp_path, log_row_ids=True, tensorboard_enabled=True)
    for step in (1, 2, 3):
        log.log_metrics({"loss": float(step)}, step)
        log.log_rows(step, [(0, [f"a{step}"]), (1, [f"b{step}", ""])])
    log.finish()
    for name in ("metrics.jsonl", "rows.jsonl"):
        with (tmp_path / name).open("a") as file:
            file.write('{"step": 2, "cut sho')
    log = make(tmp_path, log_row_ids=True, tensorboard_enabled=True)
    log.resume_from(2)
    log.log_metrics({"loss": 30.0}, 3)
    log.log_rows(3, [(0, ["again"])])
    log.finish()
    assert [(line["step"], line["loss"]) for line in lines(tmp_path / "metrics.jsonl")] == [
        (1, 1.0),
        (2, 2.0),
        (3, 30.0),
    ]
    assert lines(tmp_path / "rows.jsonl")[2:] == [
        {"step": 2, "shard": 0, "source_ids": ["a2"]},
        {"step": 2, "shard": 1, "source_ids": ["b2", ""]},
        {"step": 3, "shard": 0, "source_ids": ["again"]},
    ]
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 1.0), (2, 2.0), (3, 30.0)]


def test_row_ids_are_off_by_default(tmp_path: Path):
    make(tmp_path).log_rows(1, [(0, ["a"])])
    assert not (tmp_path / "rows.jsonl").exists()


def test_the_config_is_kept_with_the_run(tmp_path: Path):
    config = LoggerConfig(log_dir=str(tmp_path), tensorboard_enabled=True)
    log = Logger(config)
    log.log_hyperparams(config)
    log.finish()
    assert yaml.safe_load((tmp_path / "config.yaml").read_text()) == config.model_dump(mode="json")
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert events.Tags()["tensors"] == ["config"]


def test_a_missing_package_is_named_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("wandb", "mlflow", "swanlab"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    config = LoggerConfig(log_dir=str(tmp_path), wandb_enabled=True, swanlab_enabled=True)
    assert check_logger(config) == [
        "logger.wandb_enabled: the package wandb is not installed; `pip install wandb` or set it to false",
        "logger.swanlab_enabled: the package swanlab is not installed; `pip install swanlab` or set it to false",
    ]
    with pytest.raises(UserError, match="wandb"):
        Logger(config)


class Recorder:
    """Stands for a tracker's module and for its run: every call is noted, every attribute is the recorder again."""

    def __init__(self, calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]], path: str = ""):
        self._calls, self._path = calls, path

    def __getattr__(self, name: str) -> "Recorder":
        return Recorder(self._calls, f"{self._path}.{name}".lstrip("."))

    def __call__(self, *args: Any, **kwargs: Any) -> "Recorder":
        self._calls.append((self._path, args, kwargs))
        return Recorder(self._calls, "run" if self._path == "init" else "")


@pytest.mark.parametrize(
    ("name", "section", "expected"),
    [
        (
            "wandb",
            {"project": "p", "entity": "e"},
            [
                ("run.config.update", ({"a": {"b": 1}},), {}),
                ("run.log", ({"loss": 1.0},), {"step": 4, "commit": True}),
                ("run.finish", (), {}),
            ],
        ),
        (
            "mlflow",
            {"experiment_name": "x", "run_name": "r", "tracking_uri": "file:///t"},
            [
                ("set_tracking_uri", ("file:///t",), {}),
                ("set_experiment", ("x",), {}),
                ("start_run", (), {"run_id": None, "run_name": "r"}),
                ("log_params", ({"a.b": "1"},), {}),
                ("log_metrics", ({"loss": 1.0},), {"step": 4}),
                ("end_run", (), {}),
            ],
        ),
        (
            "swanlab",
            {"project": "p", "name": "n"},
            [
                ("run.config.update", ({"a": {"b": 1}},), {}),
                ("run.log", ({"loss": 1.0},), {"step": 4}),
                ("run.finish", (), {}),
            ],
        ),
    ],
)
def test_trackers_get_every_number(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    section: dict[str, str],
    expected: list[tuple[str, tuple[Any, ...], dict[str, Any]]],
):
    calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
    module = types.ModuleType(name)
    module.__spec__ = types.SimpleNamespace()  # find_spec refuses a module without one
    module.__getattr__ = Recorder(calls).__getattr__
    monkeypatch.setitem(sys.modules, name, module)
    log = make(tmp_path, **{f"{name}_enabled": True, name: section})
    log.log_hyperparams({"a": {"b": 1}})
    log.log_metrics({"loss": 1.0}, 4, step_finished=True)
    log.finish()
    assert [call for call in calls if call[0] != "init"] == expected


def test_experiment_folders_count_up(tmp_path: Path):
    base = tmp_path / "logs"
    assert get_next_experiment_dir(base) == base / "exp_001"
    (base / "exp_041").mkdir()
    (base / "exp_other").mkdir()
    assert get_next_experiment_dir(base) == base / "exp_042"
    for number in range(43, 1002):
        (base / f"exp_{number:03d}").mkdir()
    assert get_next_experiment_dir(base) == base / "exp_1002"

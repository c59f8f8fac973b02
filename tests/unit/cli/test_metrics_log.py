"""Reading `metrics.jsonl` back. Not covered: writing it (tests/unit/utils)."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from nemo_rl.cli.metrics_log import find_metrics_file, read_metrics
from nemo_rl.utils.errors import UserError


def _write(path: Path, *records: object, tail: str = "") -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records) + tail)
    return path


def test_series_hold_each_metric_by_step_and_keep_non_finite_values(tmp_path) -> None:
    path = _write(
        tmp_path / "metrics.jsonl",
        {"step": 1, "time": 10.0, "loss": 3.5, "note": "text", "flag": True},
        {"step": 2, "time": 11.0, "loss": "NaN", "lr": "-Infinity"},
        {"step": 2, "time": 12.0, "validation/val_loss": 3},
        {"step": 3, "time": 13.0, "loss": 2.5, "lr": 0.1},
    )
    log = read_metrics(path)
    assert set(log.series) == {"loss", "lr", "validation/val_loss"}
    loss = log.series["loss"]
    assert loss.steps == (1, 2, 3)
    assert loss.values[0] == 3.5
    assert math.isnan(loss.values[1])
    assert loss.finite == [(1, 3.5), (3, 2.5)]
    assert loss.broken_steps == [2]
    assert log.series["lr"].values == (-math.inf, 0.1)
    assert log.times == {1: 10.0, 2: 12.0, 3: 13.0}


def test_the_cut_last_line_of_a_killed_run_is_passed_over(tmp_path) -> None:
    path = _write(tmp_path / "metrics.jsonl", {"step": 1, "loss": 1.0}, tail='{"step": 2, "lo')
    assert read_metrics(path).series["loss"].steps == (1,)


def test_a_broken_line_in_the_middle_is_named(tmp_path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 1.0}\nnonsense\n{"step": 2, "loss": 1.0}\n')
    with pytest.raises(UserError, match=r"metrics\.jsonl:2 "):
        read_metrics(path)


def test_the_newest_numbered_run_is_found(tmp_path) -> None:
    import os

    for age, name in ((20, "exp_001"), (10, "exp_002")):
        (tmp_path / name).mkdir()
        path = _write(tmp_path / name / "metrics.jsonl", {"step": 1, "loss": 1.0})
        os.utime(path, (1_000_000 - age, 1_000_000 - age))
    assert find_metrics_file(tmp_path) == tmp_path / "exp_002" / "metrics.jsonl"


@pytest.mark.parametrize("text", ["", "\n"])
def test_no_metrics_is_said(tmp_path, text) -> None:
    (tmp_path / "metrics.jsonl").write_text(text)
    with pytest.raises(UserError, match="no metrics yet"):
        read_metrics(tmp_path / "metrics.jsonl")
    with pytest.raises(UserError, match="no such directory"):
        find_metrics_file(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"logger\.log_dir"):
        find_metrics_file(tmp_path / "empty")

"""Metrics of a run: one JSON line per step in `metrics.jsonl`, TensorBoard beside it, and trackers on request."""

from __future__ import annotations

import itertools
import json
import logging
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, Field

from nemo_rl.telemetry.instrumentation import record_teed_metrics
from nemo_rl.utils.config import ConfigModel
from nemo_rl.utils.errors import UserError
from nemo_rl.utils.json_values import as_scalar, json_value
from nemo_rl.utils.metric_trackers import (
    MetricTracker,
    MlflowConfig,
    SwanlabConfig,
    TensorboardConfig,
    WandbConfig,
    make_trackers,
    missing_packages,
)

logger = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"
ROWS_FILE = "rows.jsonl"
ROLLOUTS_FILE = "rollouts.jsonl"
PROFILE_FILE = "profile.jsonl"
CONFIG_FILE = "config.yaml"
SAMPLES_FILE = "samples.jsonl"
"""Some sampled answers of the last validated step of a PPO or GRPO run, for people."""
_OWN_KEYS = ("step", "time")


class LoggerConfig(ConfigModel):
    """Where the metrics of a run go; `metrics.jsonl` in `log_dir` is always written."""

    log_dir: str = "logs"
    """Folder of the run's files. A resumed run continues them, a fresh one keeps older ones aside."""
    log_row_ids: bool = False
    """Write `rows.jsonl`: the source ids of every trained row, by step and shard."""
    log_rollouts: bool = False
    """Write `rollouts.jsonl`: prompt, response and reward of every sample of a PPO or GRPO run."""
    profile_steps: list[Annotated[int, Field(ge=1)]] = Field(default_factory=list)
    """Steps, counted from 1, that every worker times by phase for `profile.jsonl` and the report."""
    tensorboard_enabled: bool = True
    """Write TensorBoard files to `log_dir/tensorboard`."""
    wandb_enabled: bool = False
    """Needs `pip install onehop[wandb]`."""
    mlflow_enabled: bool = False
    """Needs `pip install onehop[mlflow]`."""
    swanlab_enabled: bool = False
    """Needs `pip install onehop[swanlab]`."""
    tensorboard: TensorboardConfig = Field(default_factory=TensorboardConfig)
    wandb: WandbConfig = Field(default_factory=WandbConfig)
    mlflow: MlflowConfig = Field(default_factory=MlflowConfig)
    swanlab: SwanlabConfig = Field(default_factory=SwanlabConfig)


def check_logger(config: LoggerConfig) -> list[str]:
    """One line for each enabled tracker whose package is not installed, with the remedy."""
    return missing_packages(config)


class Logger:
    """Writes the metrics of one run. Not picklable: build it in the process that logs.

    Guarantees about `metrics.jsonl` and `rows.jsonl` in `log_dir`:
    - every line is one JSON object, written through to the file before the call returns;
    - `step` never decreases, also over a resume that calls `resume_from`;
    - NaN and infinities are the texts "NaN", "Infinity", "-Infinity", which `float()` reads.

    Raises:
        UserError: an enabled tracker's package is not installed.
    """

    def __init__(self, config: LoggerConfig):
        problems = check_logger(config)
        if problems:
            raise UserError("; ".join(problems))
        self._config = config
        self._dir = Path(config.log_dir)
        self._dir.mkdir(parents=True, exist_ok=True)
        self._last_step = 0
        self._resumed_after: int | None = None
        self._warned: set[str] = set()
        self._opened_trackers: list[MetricTracker] | None = None

    @property
    def log_dir(self) -> Path:
        """The folder of the run's files."""
        return self._dir

    def begin(self, *, resumed_after: int | None) -> None:
        """Makes the folder ready for a run: a resumed one continues its files, a fresh one keeps older files aside.

        Args:
            resumed_after: the step of the checkpoint that is resumed; None for a fresh run, for which
                `metrics.jsonl`, `rows.jsonl`, `rollouts.jsonl` and `profile.jsonl` of an earlier run become
                `metrics.1.jsonl` and so on.
        """
        if resumed_after is not None:
            self.resume_from(resumed_after)
            return
        for name in (METRICS_FILE, ROWS_FILE, ROLLOUTS_FILE, PROFILE_FILE):
            path = self._dir / name
            if path.exists():
                numbers = itertools.count(1)
                kept = (path.with_name(f"{path.stem}.{number}{path.suffix}") for number in numbers)
                path.rename(next(candidate for candidate in kept if not candidate.exists()))

    def resume_from(self, step: int) -> None:
        """Drops the lines of later steps, which the resumed run writes again. Call it before the first line."""
        for name in (METRICS_FILE, ROWS_FILE, PROFILE_FILE):
            _drop_lines_after(self._dir / name, step)
        # Its steps count from 0, as the weights' versions do.
        _drop_lines_after(self._dir / ROLLOUTS_FILE, step - 1)
        self._last_step = step
        self._resumed_after = step

    def log_metrics(
        self,
        metrics: Mapping[str, Any],
        step: int,
        prefix: str = "",
        step_metric: str | None = None,
        step_finished: bool = False,
    ) -> None:
        """Writes the numbers among `metrics` as one line; anything else is left out, with one warning per name.

        Numbers are Python's and NumPy's, and tensors and arrays of one element; mappings are flattened with `/`.
        Metrics with the prefix `train` or none also go to telemetry, where they are registered.

        Args:
            prefix: goes before each name as `prefix/name`.
            step_metric: the metric that counts in place of `step`.
            step_finished: no more metrics of this step follow, so trackers that buffer may send it.

        Raises:
            ValueError: `step` lies before that of an earlier line.
        """
        if step_metric is not None:
            step = int(metrics[step_metric])
        if step < self._last_step:
            raise ValueError(
                f"step {step} was logged after step {self._last_step}; resume_from({step}) rewinds the log"
            )
        self._last_step = step
        numbers = dict(self._numbers(metrics, f"{prefix}/" if prefix else ""))
        line = {"step": step, "time": time.time(), **{key: _spelled(value) for key, value in numbers.items()}}
        _append(self._dir / METRICS_FILE, [line])
        for tracker in self._trackers():
            tracker.log(numbers, step, step_finished)
        if prefix in ("", "train"):
            record_teed_metrics({key.removeprefix("train/"): value for key, value in numbers.items()})

    def log_rows(self, step: int, rows: Iterable[tuple[int, Sequence[str]]]) -> None:
        """Writes one line {step, shard, source_ids} per (shard, source ids); nothing unless `log_row_ids` is set."""
        if self._config.log_row_ids:
            lines = [{"step": step, "shard": shard, "source_ids": list(ids)} for shard, ids in rows]
            _append(self._dir / ROWS_FILE, lines)

    def log_profile(self, step: int, role: str, ranks: Sequence[Mapping[str, float]]) -> None:
        """Writes the seconds by phase of each rank of a role in one step, as one line {step, role, ranks}."""
        _append(self._dir / PROFILE_FILE, [{"step": step, "role": role, "ranks": [dict(rank) for rank in ranks]}])

    def log_hyperparams(self, config: BaseModel | Mapping[str, Any]) -> None:
        """Writes the run's config as `config.yaml` and gives it to the trackers."""
        plain = config.model_dump(mode="json") if isinstance(config, BaseModel) else json_value(config)
        text = yaml.safe_dump(plain, sort_keys=False, allow_unicode=True)
        (self._dir / CONFIG_FILE).write_text(text, encoding="utf-8")
        for tracker in self._trackers():
            tracker.log_hyperparams(plain)

    def finish(self) -> None:
        """Sends what the trackers still hold and closes them."""
        for tracker in self._opened_trackers or []:
            tracker.finish()
        self._opened_trackers = []

    def _trackers(self) -> list[MetricTracker]:
        """Opened at the first use, when it is known whether the run was resumed."""
        if self._opened_trackers is None:
            self._opened_trackers = make_trackers(self._config, self._dir, self._resumed_after)
        return self._opened_trackers

    def _numbers(self, metrics: Mapping[str, Any], prefix: str) -> Iterable[tuple[str, float]]:
        for key, value in metrics.items():
            name = f"{prefix}{key}"
            if isinstance(value, Mapping):
                yield from self._numbers(value, f"{name}/")
                continue
            number = as_scalar(value)
            if number is None or name in _OWN_KEYS:
                reason = "is not a number" if number is None else "is a name that each line has already"
                self._warn_once(name, f"metric {name} is left out of the log: {type(value).__name__} {reason}")
                continue
            if not math.isfinite(number):
                self._warn_once(f"{name} finite", f"metric {name} is {number} at step {self._last_step}")
            yield name, number

    def _warn_once(self, key: str, message: str) -> None:
        if key not in self._warned:
            self._warned.add(key)
            logger.warning("%s", message)


def get_next_experiment_dir(base: str | Path) -> Path:
    """Makes and returns `base/exp_<NNN>` with the next free number; two starts at once get two folders."""
    base = Path(base)
    base.mkdir(parents=True, exist_ok=True)
    taken = [int(path.name[4:]) for path in base.glob("exp_*") if path.name[4:].isdecimal()]
    for number in itertools.count(max(taken, default=0) + 1):
        path = base / f"exp_{number:03d}"
        try:
            path.mkdir()
        except FileExistsError:
            continue
        return path
    raise AssertionError("itertools.count ended")


def _append(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def _spelled(value: float) -> float | str:
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")


def _drop_lines_after(path: Path, step: int) -> None:
    """Rewrites the file without lines of later steps and without a last line that a kill cut short.

    A line whose step is null belongs to none and is kept.
    """
    if not path.exists():
        return
    kept = path.with_name(f"{path.name}.kept")
    with path.open(encoding="utf-8", errors="replace") as old, kept.open("w", encoding="utf-8") as new:
        for line in old:
            try:
                at = json.loads(line)["step"]
                is_kept = at is None or at <= step
            except (ValueError, KeyError, TypeError):
                continue
            if is_kept:
                new.write(line if line.endswith("\n") else f"{line}\n")
    kept.replace(path)

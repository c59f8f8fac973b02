"""The metrics of a run as series, read from its `metrics.jsonl`."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nemo_rl.utils.errors import UserError
from nemo_rl.utils.logger import METRICS_FILE


@dataclass(frozen=True)
class Series:
    """One metric over the steps that logged it, in step order; `values` holds NaN and infinities as they were."""

    name: str
    steps: tuple[int, ...]
    values: tuple[float, ...]

    @property
    def finite(self) -> list[tuple[int, float]]:
        """The (step, value) pairs whose value is a number."""
        return [(s, v) for s, v in zip(self.steps, self.values, strict=True) if math.isfinite(v)]

    @property
    def broken_steps(self) -> list[int]:
        """The steps whose value is NaN or infinite."""
        return [s for s, v in zip(self.steps, self.values, strict=True) if not math.isfinite(v)]


@dataclass
class MetricsLog:
    """All series of a run, and the wall-clock time (seconds since 1970) of each logged step."""

    path: Path
    series: dict[str, Series] = field(default_factory=dict)
    times: dict[int, float] = field(default_factory=dict)


def find_metrics_file(run_dir: Path) -> Path:
    """`run_dir/metrics.jsonl`, else the newest one in a directory below, as when runs are numbered `exp_NNN`.

    Raises:
        UserError: no such directory, or no metrics in it.
    """
    if not run_dir.is_dir():
        raise UserError(f"no such directory: {run_dir}")
    direct = run_dir / METRICS_FILE
    if direct.is_file():
        return direct
    below = sorted(run_dir.glob(f"**/{METRICS_FILE}"), key=lambda path: path.stat().st_mtime)
    if not below:
        raise UserError(f"{run_dir} holds no {METRICS_FILE}; give the `logger.log_dir` of a run")
    return below[-1]


def read_metrics(path: Path) -> MetricsLog:
    """Read a metrics file; a cut last line, as a killed run leaves it, is passed over.

    Raises:
        UserError: a line before the last one is not a JSON object with a `step`, or nothing is there.
    """
    log = MetricsLog(path)
    points: dict[str, dict[int, float]] = {}
    lines = path.read_text(encoding="utf-8").split("\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            step = int(record["step"])
        except (ValueError, TypeError, KeyError) as error:
            if number == len(lines):
                break
            raise UserError(f"{path}:{number} is not a metrics record with a step: {line[:80]!r}") from error
        for name, raw in record.items():
            value = _number(raw)
            if name not in ("step", "time") and value is not None:
                points.setdefault(name, {})[step] = value
        if isinstance(record.get("time"), int | float):
            log.times[step] = float(record["time"])
    if not points:
        raise UserError(f"{path} holds no metrics yet")
    for name, by_step in points.items():
        steps = sorted(by_step)
        log.series[name] = Series(name, tuple(steps), tuple(by_step[s] for s in steps))
    return log


def _number(raw: Any) -> float | None:
    """The value of a JSON entry; non-finite ones are written as strings such as "NaN" or "-Infinity"."""
    if isinstance(raw, bool) or not isinstance(raw, int | float | str):
        return None
    try:
        return float(raw)
    except ValueError:
        return None

"""Places that metrics go to besides the log file. Each package is imported when its tracker opens."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import yaml

from nemo_rl.utils.config import ConfigModel

# MLflow refuses longer values.
_MLFLOW_MAX_PARAM_LENGTH = 500


class TensorboardConfig(ConfigModel):
    log_dir: str = "tensorboard"
    """Folder of the event files, relative to the run's folder."""


class WandbConfig(ConfigModel):
    project: str | None = None
    name: str | None = None
    entity: str | None = None


class MlflowConfig(ConfigModel):
    experiment_name: str | None = None
    run_name: str | None = None
    run_id: str | None = None
    """Continue this run in place of a new one."""
    tracking_uri: str | None = None
    artifact_location: str | None = None


class SwanlabConfig(ConfigModel):
    project: str | None = None
    name: str | None = None


class TrackersConfig(Protocol):
    """The part of the logger's config that is about trackers."""

    tensorboard_enabled: bool
    wandb_enabled: bool
    mlflow_enabled: bool
    swanlab_enabled: bool
    tensorboard: TensorboardConfig
    wandb: WandbConfig
    mlflow: MlflowConfig
    swanlab: SwanlabConfig


class MetricTracker(Protocol):
    """Takes flat numbers by step; steps never decrease."""

    def log(self, metrics: Mapping[str, float], step: int, step_finished: bool) -> None: ...

    def log_hyperparams(self, config: Mapping[str, Any]) -> None: ...

    def finish(self) -> None: ...


class TensorboardTracker:
    """Event files for TensorBoard. After a resume the points of later steps are hidden there."""

    def __init__(self, config: TensorboardConfig, log_dir: Path, resumed_after: int | None):
        from torch.utils.tensorboard import SummaryWriter

        purge_step = None if resumed_after is None else resumed_after + 1
        self._writer = SummaryWriter(str(log_dir / config.log_dir), purge_step=purge_step)

    def log(self, metrics: Mapping[str, float], step: int, step_finished: bool) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        if step_finished:
            self._writer.flush()

    def log_hyperparams(self, config: Mapping[str, Any]) -> None:
        text = yaml.safe_dump(dict(config), sort_keys=False)
        self._writer.add_text("config", "\n".join(f"    {line}" for line in text.splitlines()))

    def finish(self) -> None:
        self._writer.close()


class WandbTracker:
    def __init__(self, config: WandbConfig, log_dir: Path):
        import wandb  # pyrefly: ignore[missing-import] (optional)

        self._run = wandb.init(project=config.project, name=config.name, entity=config.entity, dir=str(log_dir))

    def log(self, metrics: Mapping[str, float], step: int, step_finished: bool) -> None:
        # With None, wandb commits a step when the next one begins, so that a step may be logged in parts.
        self._run.log(dict(metrics), step=step, commit=True if step_finished else None)

    def log_hyperparams(self, config: Mapping[str, Any]) -> None:
        self._run.config.update(dict(config))

    def finish(self) -> None:
        self._run.finish()


class MlflowTracker:
    def __init__(self, config: MlflowConfig):
        import mlflow  # pyrefly: ignore[missing-import] (optional)

        self._mlflow = mlflow
        if config.tracking_uri is not None:
            mlflow.set_tracking_uri(config.tracking_uri)
        name = config.experiment_name
        if name is not None:
            if config.artifact_location is not None and mlflow.get_experiment_by_name(name) is None:
                mlflow.create_experiment(name, artifact_location=config.artifact_location)
            mlflow.set_experiment(name)
        mlflow.start_run(run_id=config.run_id, run_name=config.run_name)

    def log(self, metrics: Mapping[str, float], step: int, step_finished: bool) -> None:
        self._mlflow.log_metrics(dict(metrics), step=step)

    def log_hyperparams(self, config: Mapping[str, Any]) -> None:
        leaves = {name: str(value)[:_MLFLOW_MAX_PARAM_LENGTH] for name, value in _leaves(config, "")}
        self._mlflow.log_params(leaves)

    def finish(self) -> None:
        self._mlflow.end_run()


class SwanlabTracker:
    def __init__(self, config: SwanlabConfig, log_dir: Path):
        import swanlab  # pyrefly: ignore[missing-import] (optional)

        self._run = swanlab.init(project=config.project, experiment_name=config.name, logdir=str(log_dir / "swanlab"))

    def log(self, metrics: Mapping[str, float], step: int, step_finished: bool) -> None:
        self._run.log(dict(metrics), step=step)

    def log_hyperparams(self, config: Mapping[str, Any]) -> None:
        self._run.config.update(dict(config))

    def finish(self) -> None:
        self._run.finish()


def missing_packages(config: TrackersConfig) -> list[str]:
    """One line for each enabled tracker whose package is not installed."""
    enabled = {"wandb": config.wandb_enabled, "mlflow": config.mlflow_enabled, "swanlab": config.swanlab_enabled}
    return [
        f"logger.{name}_enabled: the package {name} is not installed; `pip install {name}` or set it to false"
        for name, is_enabled in enabled.items()
        if is_enabled and importlib.util.find_spec(name) is None
    ]


def make_trackers(config: TrackersConfig, log_dir: Path, resumed_after: int | None) -> list[MetricTracker]:
    """The enabled trackers, opened. `resumed_after` is the step that a resumed run goes on from, else None."""
    makers: list[tuple[bool, Callable[[], MetricTracker]]] = [
        (config.tensorboard_enabled, lambda: TensorboardTracker(config.tensorboard, log_dir, resumed_after)),
        (config.wandb_enabled, lambda: WandbTracker(config.wandb, log_dir)),
        (config.mlflow_enabled, lambda: MlflowTracker(config.mlflow)),
        (config.swanlab_enabled, lambda: SwanlabTracker(config.swanlab, log_dir)),
    ]
    return [make() for is_enabled, make in makers if is_enabled]


def _leaves(config: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value

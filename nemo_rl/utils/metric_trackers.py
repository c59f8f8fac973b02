"""Places that metrics go to besides the log file. Each package is imported when its tracker opens."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, cast

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
        # TensorBoard's own writer: that of torch.utils would load torch where nothing else needs it.
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        # The names of these modules exist at run time only.
        self._event = cast(Any, event_pb2)
        self._summary = cast(Any, summary_pb2).Summary
        self._writer = EventFileWriter(str(log_dir / config.log_dir))
        if resumed_after is not None:
            # Readers drop what an earlier file holds from this step on.
            self._add(resumed_after + 1, session_log=self._event.SessionLog(status=self._event.SessionLog.START))

    def log(self, metrics: Mapping[str, float], step: int, step_finished: bool) -> None:
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._add(step, summary=self._summary(value=values))
        if step_finished:
            self._writer.flush()

    def log_hyperparams(self, config: Mapping[str, Any]) -> None:
        from tensorboard.compat.proto import tensor_pb2, tensor_shape_pb2
        from tensorboard.plugins.text.metadata import create_summary_metadata

        tensor, shape = cast(Any, tensor_pb2), cast(Any, tensor_shape_pb2).TensorShapeProto
        text = yaml.safe_dump(dict(config), sort_keys=False)
        block = "\n".join(f"    {line}" for line in text.splitlines())
        content = tensor.TensorProto(
            dtype="DT_STRING", string_val=[block.encode()], tensor_shape=shape(dim=[shape.Dim(size=1)])
        )
        value = self._summary.Value(tag="config", metadata=create_summary_metadata("config", ""), tensor=content)
        self._add(0, summary=self._summary(value=[value]))

    def finish(self) -> None:
        self._writer.close()

    def _add(self, step: int, **content: Any) -> None:
        self._writer.add_event(self._event.Event(wall_time=time.time(), step=step, **content))


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

"""A run around its controller: Ray, workers, the wait for its end, and what the end means for the user."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import ray
from ray.exceptions import RayActorError, RayTaskError

from nemo_rl.distributed.config import ClusterConfig
from nemo_rl.distributed.ray_session import init_ray
from nemo_rl.telemetry.config import TelemetryConfig
from nemo_rl.telemetry.instrumentation import trace_context_kwargs
from nemo_rl.telemetry.setup import init_telemetry_driver, shutdown_telemetry
from nemo_rl.utils.checkpoint import CheckpointingConfig
from nemo_rl.utils.errors import RunError, UserError
from nemo_rl.utils.logger import METRICS_FILE, LoggerConfig

_PROGRESS_PERIOD_S = 0.5
_LAST_PROGRESS_S = 5.0

ProgressCallback = Callable[[dict[str, Any]], None]


class RunConfig(Protocol):
    """What the configs of all algorithms have."""

    cluster: ClusterConfig
    logger: LoggerConfig
    checkpointing: CheckpointingConfig
    telemetry: TelemetryConfig | None


def run_controller(
    config: RunConfig,
    *,
    algorithm: str,
    actor_class: Any,
    build: Callable[[], Any],
    shut_down: Callable[[Any], None],
    on_progress: ProgressCallback | None,
    debug: bool,
) -> dict[str, Any]:
    """What the controller of a run returns. Nothing is left running, however the run ends.

    Args:
        algorithm: its name in telemetry.
        actor_class: the controller, a Ray actor that is built from `config` and what `build` returns.
        build: starts the workers, once Ray is there.
        shut_down: ends them.
        on_progress, debug: see `train_sft`.

    Raises:
        UserError, RunError: see `drive`, and what `build` raises.
    """
    init_telemetry_driver(config.telemetry, algorithm=algorithm)
    try:
        with init_ray(config.cluster, log_dir=config.logger.log_dir, debug=debug):
            actor_args = build()
            controller = None
            try:
                controller = actor_class.remote(config, actor_args)
                return drive(controller, on_progress)
            finally:
                if controller is not None:
                    # First, so that it gives the workers nothing more to do while they are being ended.
                    ray.kill(controller)
                shut_down(actor_args)
    finally:
        shutdown_telemetry()


def logged_metrics(config: RunConfig) -> list[dict[str, Any]]:
    """The lines of the run's metrics; none when a finished run is started again with another `log_dir`."""
    metrics = Path(config.logger.log_dir) / METRICS_FILE
    return [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []


def result_places(config: RunConfig, steps: int) -> dict[str, str | None]:
    """`log_dir`, `checkpoint_dir` and `checkpoint` (the newest) of a run of `steps` steps; None without checkpoints."""
    saved = config.checkpointing.checkpoint_dir if config.checkpointing.enabled else None
    return {
        "log_dir": config.logger.log_dir,
        "checkpoint_dir": saved,
        "checkpoint": None if saved is None else str(Path(saved) / f"step_{steps}"),
    }


def drive(controller: Any, on_progress: ProgressCallback | None) -> dict[str, Any]:
    """Waits for the controller and reports how far it is. Each of its own waits is bounded."""
    run = controller.run_with_trace_context.remote(**trace_context_kwargs())
    asked = controller.progress.remote()
    done: list[Any] = []
    try:
        while not done:
            done, _ = ray.wait([run], timeout=_PROGRESS_PERIOD_S)
            if done:
                asked = controller.progress.remote()
            # Not insisted on: while the loaders open, or on a busy machine, the answer is late and the run is fine.
            answered, _ = ray.wait([asked], timeout=_LAST_PROGRESS_S if done else 0)
            if answered:
                if on_progress is not None:
                    on_progress(ray.get(asked))
                asked = controller.progress.remote()
        return ray.get(run)
    except RayTaskError as error:
        cause = error.cause
        if isinstance(cause, UserError | RunError):
            raise cause from error
        raise RunError(f"the controller failed with {type(cause).__name__}: {cause}") from error
    except RayActorError as error:
        raise _controller_death(error) from error


def _controller_death(error: RayActorError) -> UserError | RunError:
    """What to tell of a dead controller.

    Of what its constructor raised Ray keeps the text alone: a traceback, which ends in `module.Class: message`.
    """
    lines = str(error).strip().splitlines()
    if not error.actor_init_failed:
        return RunError(f"the controller died: {lines[0]}")
    name, _, message = lines[-1].partition(": ")
    kind = name.rpartition(".")[2]
    if kind in (UserError.__name__, RunError.__name__):
        return UserError(message) if kind == UserError.__name__ else RunError(message)
    return RunError(f"the controller could not start: {kind}: {message}")

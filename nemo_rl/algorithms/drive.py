"""Waiting for a controller, and what its end means for the user."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from nemo_rl.telemetry.instrumentation import trace_context_kwargs
from nemo_rl.utils.errors import RunError, UserError

_PROGRESS_PERIOD_S = 0.5
_LAST_PROGRESS_S = 5.0

ProgressCallback = Callable[[dict[str, Any]], None]


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

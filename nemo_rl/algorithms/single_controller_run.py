"""One PPO or GRPO run from a config to a summary: what `onehop ppo` does."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nemo_rl.algorithms.drive import ProgressCallback, logged_metrics, result_places, run_controller
from nemo_rl.algorithms.single_controller import SingleControllerActor
from nemo_rl.algorithms.single_controller_utils.checks import inspect_rl_inputs
from nemo_rl.algorithms.single_controller_utils.config import (
    MasterConfig,
    is_ppo_run,
    read_single_controller_config,
)
from nemo_rl.algorithms.single_controller_utils.setup import setup_single_controller, shut_down
from nemo_rl.data_plane.factory import maybe_configure_data_plane_env
from nemo_rl.utils.errors import ConfigError

log = logging.getLogger(__name__)


def run_ppo(
    path: str | Path,
    overrides: Sequence[str] = (),
    *,
    on_progress: ProgressCallback | None = None,
    debug: bool = False,
) -> dict[str, Any]:
    """Trains as the YAML file `path` with `key=value` overrides says; see `train_ppo`.

    Raises:
        ConfigError: also for unknown keys, wrong types and values out of range; all at once.
    """
    return train_ppo(read_single_controller_config(path, overrides), on_progress=on_progress, debug=debug)


def train_ppo(
    config: MasterConfig, *, on_progress: ProgressCallback | None = None, debug: bool = False
) -> dict[str, Any]:
    """Trains as `config` says, with or without a critic, and leaves nothing running, however it ends.

    Args:
        on_progress: called about twice a second with what the controller's `progress` answers.
        debug: show the output of workers on this terminal.

    Returns:
        `steps`, `first_reward` and `last_reward` (mean reward of the samples of a step), `val_reward` (the last one, or
        None), `step_s`, `samples_per_s`, `consumed_samples`, `policy_updates`, `controller_column_bytes` (bytes of
        columns that went through the controller's process: 0), `dropped` and `skipped_steps` by reason, `seconds`,
        `log_dir`, `checkpoint_dir`, `checkpoint`.

    Raises:
        UserError: input that can't be used as given.
        RunError: the run started and could not go on.
    """
    started = time.monotonic()
    inputs = inspect_rl_inputs(config)
    if inputs.problems:
        raise ConfigError(inputs.problems)
    maybe_configure_data_plane_env(config.data_plane)
    state = run_controller(
        config,
        algorithm="ppo" if is_ppo_run(config) else "grpo",
        actor_class=SingleControllerActor,
        build=lambda: setup_single_controller(config, inputs.tokenizer, inputs),
        shut_down=shut_down,
        on_progress=on_progress,
        debug=debug,
    )
    return _summary(config, state) | {"seconds": round(time.monotonic() - started, 2)}


def _summary(config: MasterConfig, state: dict[str, Any]) -> dict[str, Any]:
    lines = logged_metrics(config)
    steps = [line for line in lines if "reward_mean" in line]
    validations = [line["val_reward"] for line in lines if "val_reward" in line]
    timed = steps[1:] or steps
    return {
        "steps": state["total_steps"],
        "first_reward": steps[0]["reward_mean"] if steps else None,
        "last_reward": steps[-1]["reward_mean"] if steps else None,
        "val_reward": validations[-1] if validations else None,
        "step_s": round(statistics.median(s["total_step_time"] for s in timed), 4) if steps else None,
        "samples_per_s": round(statistics.median(s["samples_per_second"] for s in timed), 1) if steps else None,
        "consumed_samples": state["consumed_samples"],
        "policy_updates": state["policy_updates"],
        "controller_column_bytes": state["controller_column_bytes"],
        "dropped": state["dropped"],
        "skipped_steps": state["skipped_steps"],
        **result_places(config, state["total_steps"]),
    }

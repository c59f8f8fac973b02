"""One SFT run from a config file to a summary: what `onehop sft` does."""

import json
import logging
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nemo_rl.algorithms.drive import ProgressCallback, drive
from nemo_rl.algorithms.sft_checks import inspect_inputs, tokenizer_options
from nemo_rl.algorithms.sft_config import MasterConfig, read_sft_config
from nemo_rl.algorithms.sft_setup import build_actor_args
from nemo_rl.algorithms.sft_v2 import SFTSingleControllerActor
from nemo_rl.data.tokenizer import get_tokenizer
from nemo_rl.distributed.ray_session import init_ray
from nemo_rl.telemetry.setup import init_telemetry_driver, shutdown_telemetry
from nemo_rl.utils.errors import ConfigError
from nemo_rl.utils.logger import METRICS_FILE

log = logging.getLogger(__name__)


def run_sft(
    path: str | Path,
    overrides: Sequence[str] = (),
    *,
    on_progress: ProgressCallback | None = None,
    debug: bool = False,
) -> dict[str, Any]:
    """Trains as the YAML file `path` with `key=value` overrides says; see `train_sft`.

    Raises:
        ConfigError: also for unknown keys, wrong types and values out of range; all at once.
    """
    return train_sft(read_sft_config(path, overrides), on_progress=on_progress, debug=debug)


def train_sft(
    config: MasterConfig, *, on_progress: ProgressCallback | None = None, debug: bool = False
) -> dict[str, Any]:
    """Trains as `config` says and leaves nothing running, however it ends.

    Args:
        config: is completed by what is derived from the data.
        on_progress: called about twice a second with what the controller's `progress` answers.
        debug: show the output of workers on this terminal.

    Returns:
        `steps`, `first_loss`, `last_loss` and `tokens_per_s` (tokens of the rows, without the first step) of the whole
        run, earlier parts included; `val_loss` (or None), `consumed_samples`, `dropped` and `skipped_steps` by reason,
        `seconds`, `log_dir`, `checkpoint_dir`, `checkpoint` (the newest, or None).

    Raises:
        UserError: input that can't be used as given.
        RunError: the run started and could not go on.
    """
    started = time.monotonic()
    inputs = inspect_inputs(config)
    if inputs.problems:
        raise ConfigError(inputs.problems)
    tokenizer = get_tokenizer(tokenizer_options(config))
    init_telemetry_driver(config.telemetry, algorithm="sft_v2")
    try:
        with init_ray(config.cluster, log_dir=config.logger.log_dir, debug=debug):
            actor_args = build_actor_args(config, tokenizer, inputs)
            try:
                actor_class: Any = SFTSingleControllerActor
                state = drive(actor_class.remote(config, actor_args), on_progress)
            finally:
                actor_args.trainer.shutdown()
                actor_args.train_cluster.shutdown()
    finally:
        shutdown_telemetry()
    return _summary(config, state) | {"seconds": round(time.monotonic() - started, 2)}


def _summary(config: MasterConfig, state: dict[str, Any]) -> dict[str, Any]:
    metrics = Path(config.logger.log_dir) / METRICS_FILE
    # There are none when a finished run is started again with another log_dir.
    lines = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    steps = [line for line in lines if "loss" in line]
    validations = [line["val_loss"] for line in lines if "val_loss" in line]
    timed = steps[1:] or steps
    checkpoint = None
    if config.checkpointing.enabled:
        checkpoint = str(Path(config.checkpointing.checkpoint_dir) / f"step_{state['total_steps']}")
    return {
        "steps": state["total_steps"],
        "first_loss": steps[0]["loss"] if steps else None,
        "last_loss": steps[-1]["loss"] if steps else None,
        "tokens_per_s": round(sum(s["tokens"] for s in timed) / sum(s["total_step_time"] for s in timed), 1)
        if steps
        else None,
        "step_s": round(statistics.median(s["total_step_time"] for s in timed), 4) if steps else None,
        "val_loss": validations[-1] if validations else None,
        "consumed_samples": state["consumed_samples"],
        "dropped": state["dropped_samples"],
        "skipped_steps": state["skipped_steps"],
        "log_dir": config.logger.log_dir,
        "checkpoint_dir": config.checkpointing.checkpoint_dir if config.checkpointing.enabled else None,
        "checkpoint": checkpoint,
    }

"""One SFT run from a config file to a summary: what `onehop sft` does."""

import logging
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nemo_rl.algorithms.drive import ProgressCallback, logged_metrics, result_places, run_controller
from nemo_rl.algorithms.sft_checks import inspect_inputs, tokenizer_options
from nemo_rl.algorithms.sft_config import MasterConfig, read_sft_config
from nemo_rl.algorithms.sft_setup import build_actor_args
from nemo_rl.algorithms.sft_state import SFTV2ActorArgs
from nemo_rl.algorithms.sft_v2 import SFTSingleControllerActor
from nemo_rl.data.tokenizer import get_tokenizer
from nemo_rl.utils.errors import ConfigError

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
    state = run_controller(
        config,
        algorithm="sft_v2",
        actor_class=SFTSingleControllerActor,
        build=lambda: build_actor_args(config, tokenizer, inputs),
        shut_down=_shut_down,
        on_progress=on_progress,
        debug=debug,
    )
    return _summary(config, state) | {"seconds": round(time.monotonic() - started, 2)}


def _shut_down(actor_args: SFTV2ActorArgs) -> None:
    actor_args.trainer.shutdown()
    actor_args.train_cluster.shutdown()


def _summary(config: MasterConfig, state: dict[str, Any]) -> dict[str, Any]:
    lines = logged_metrics(config)
    steps = [line for line in lines if "loss" in line]
    validations = [line["val_loss"] for line in lines if "val_loss" in line]
    timed = steps[1:] or steps
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
        **result_places(config, state["total_steps"]),
    }

"""`onehop check`: everything about a run that can be known without starting a worker."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from nemo_rl.algorithms.sft_checks import SFTInputs
    from nemo_rl.algorithms.sft_config import MasterConfig


def check(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="YAML file of the run.", show_default=False)],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Settings that win over the file.")
    ] = None,
) -> None:
    """Check a run's config, model, data and cluster, and list all problems at once (exit code 2)."""
    from rich.console import Console

    from nemo_rl.algorithms.sft_config import read_sft_config
    from nemo_rl.cli.console import print_facts
    from nemo_rl.utils.errors import ConfigError

    config = read_sft_config(file, overrides or [])
    # After the config, because it takes seconds to import.
    from nemo_rl.algorithms.sft_checks import inspect_inputs

    inputs = inspect_inputs(config)
    if inputs.problems:
        raise ConfigError(inputs.problems)
    print_facts(Console(), run_facts(config, inputs))


def run_facts(config: MasterConfig, inputs: SFTInputs) -> dict[str, str]:
    """What would run: model, rows, steps, workers, and where it starts. `inputs` must be without problems."""
    from nemo_rl.data.energon.sources import batches_per_pass
    from nemo_rl.utils.checkpoint import CheckpointManager

    policy, sft, train, plan = config.policy, config.sft, inputs.train, inputs.plan
    assert train is not None
    assert plan is not None
    shards = plan.num_logical_shards
    per_pass = config.data.train.virtual_epoch_length or batches_per_pass(
        train, shards, policy.train_global_batch_size // shards
    )
    steps = min(sft.max_num_steps, sft.max_num_epochs * per_pass)
    facts = {
        "model": f"{policy.model_name}, precision {policy.precision}",
        "training": f"{train.rows:,} rows of {train.path}",
        "steps": f"{steps:,} of {policy.train_global_batch_size} rows; a pass takes {per_pass:,}",
    }
    if train.bad_lines:
        facts["training"] += f", {len(train.bad_lines):,} bad lines left out"
    if inputs.validation is not None:
        facts["validation"] = f"{inputs.validation.rows:,} rows of {inputs.validation.path}"
    workers = config.cluster.gpus_per_node * config.cluster.num_nodes
    facts["workers"] = f"{workers} on {config.cluster.num_nodes} node(s): {plan.logical_world_size} replica(s)"
    facts["data shards"] = str(shards)
    facts["rows"] = f"up to {policy.max_total_sequence_length:,} tokens; {policy.microbatch_tokens():,} tokens at once"
    facts["logs"] = config.logger.log_dir
    if config.checkpointing.enabled:
        last = CheckpointManager(config.checkpointing).get_latest_checkpoint_path()
        facts["checkpoints"] = f"resumes from {last}" if last else f"none in {config.checkpointing.checkpoint_dir} yet"
        if last and config.checkpointing.start_fresh:
            facts["checkpoints"] = f"starts at step 0; {last} and those before it are moved aside"
    return facts

"""`onehop check`: everything about a run that can be known without starting a worker."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from nemo_rl.algorithms.sft_checks import SFTInputs
    from nemo_rl.algorithms.sft_config import MasterConfig
    from nemo_rl.algorithms.single_controller_utils import config as rl
    from nemo_rl.algorithms.single_controller_utils.checks import RLInputs
    from nemo_rl.utils.checkpoint import CheckpointingConfig


def check(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="YAML file of the run.", show_default=False)],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Settings that win over the file.")
    ] = None,
) -> None:
    """Check a run's config, model, data and cluster, and list all problems at once (exit code 2)."""
    from rich.console import Console

    from nemo_rl.cli.console import print_facts
    from nemo_rl.utils.config import load_config

    sections = load_config(file, overrides or [])
    # A stray `ppo.key=value` beside an `sft` section is a mistake in an SFT run, and told as one.
    is_rl = "sft" not in sections and bool({"ppo", "grpo"} & set(sections))
    facts = (_check_rl if is_rl else _check_sft)(file, overrides or [])
    print_facts(Console(), facts)


def _check_sft(file: Path, overrides: list[str]) -> dict[str, str]:
    from nemo_rl.algorithms.sft_config import read_sft_config
    from nemo_rl.utils.errors import ConfigError

    config = read_sft_config(file, overrides)
    # After the config, because it takes seconds to import.
    from nemo_rl.algorithms.sft_checks import inspect_inputs

    inputs = inspect_inputs(config)
    if inputs.problems:
        raise ConfigError(inputs.problems)
    return run_facts(config, inputs)


def _check_rl(file: Path, overrides: list[str]) -> dict[str, str]:
    from nemo_rl.algorithms.single_controller_utils.config import read_single_controller_config
    from nemo_rl.utils.errors import ConfigError

    config = read_single_controller_config(file, overrides)
    # After the config, because it takes seconds to import.
    from nemo_rl.algorithms.single_controller_utils.checks import inspect_rl_inputs

    inputs = inspect_rl_inputs(config)
    if inputs.problems:
        raise ConfigError(inputs.problems)
    return rl_run_facts(config, inputs)


def rl_run_facts(config: rl.MasterConfig, inputs: RLInputs) -> dict[str, str]:
    """What would run: models, prompts, steps, workers, and where it starts. `inputs` must be without problems."""
    from nemo_rl.algorithms.single_controller_utils.config import algo_config, groups_per_chunk, is_ppo_run

    policy, algorithm, generation = config.policy, algo_config(config), config.policy.generation
    prompts, samples = algorithm.num_prompts_per_step, algorithm.num_generations_per_prompt
    facts = {
        "algorithm": "PPO with a critic" if is_ppo_run(config) else "GRPO",
        "policy": f"{policy.model_name}, precision {policy.precision}",
    }
    if config.value is not None:
        facts["critic"] = f"{config.value.model_name}, precision {config.value.precision}"
    facts["training"] = f"{inputs.num_prompts:,} prompts of {config.data.train.path}"
    if inputs.left_out:
        left = ", ".join(f"{count:,} {reason}" for reason, count in sorted(inputs.left_out.items()))
        facts["training"] += f"; left out: {left}"
    if config.data.validation is not None:
        facts["validation"] = f"{inputs.num_validation_prompts:,} prompts of {config.data.validation.path}"
    chunks = -(-prompts // groups_per_chunk(config))
    facts["steps"] = f"{inputs.steps:,} of {prompts:,} prompts x {samples:,} samples, in {chunks} chunk(s)"
    facts["samples"] = (
        f"up to {generation.max_new_tokens:,} tokens by {generation.workers} {generation.backend} worker(s)"
    )
    facts["reward"] = config.env.name
    workers = config.cluster.gpus_per_node * config.cluster.num_nodes
    facts["workers"] = f"{workers} on {config.cluster.num_nodes} node(s)"
    facts["logs"] = config.logger.log_dir
    return facts | _checkpoint_facts(config.checkpointing)


def run_facts(config: MasterConfig, inputs: SFTInputs) -> dict[str, str]:
    """What would run: model, rows, steps, workers, and where it starts. `inputs` must be without problems."""
    from nemo_rl.data.energon.sources import batches_per_pass

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
    at_once = (
        "as many as prove fastest" if policy.train_mb_tokens == "auto" else f"{policy.microbatch_tokens():,} tokens"
    )
    facts["rows"] = f"up to {policy.max_total_sequence_length:,} tokens; {at_once} at once"
    facts["logs"] = config.logger.log_dir
    return facts | _checkpoint_facts(config.checkpointing)


def _checkpoint_facts(config: CheckpointingConfig) -> dict[str, str]:
    from nemo_rl.utils.checkpoint import CheckpointManager

    if not config.enabled:
        return {}
    last = CheckpointManager(config).get_latest_checkpoint_path()
    if last and config.start_fresh:
        return {"checkpoints": f"starts at step 0; {last} and those before it are moved aside"}
    return {"checkpoints": f"resumes from {last}" if last else f"none in {config.checkpoint_dir} yet"}

"""What is wrong with a PPO or GRPO run, as far as that can be known without starting a worker."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nemo_rl.algorithms.sft_identity import model_sizes, optimizer_record, schedule_record
from nemo_rl.algorithms.sft_resume import check_same_model, check_same_run
from nemo_rl.algorithms.single_controller_utils.config import (
    MasterConfig,
    algo_config,
    is_ppo_run,
    validate_single_controller_config,
)
from nemo_rl.algorithms.single_controller_utils.state import SaveState
from nemo_rl.data.prompts import PromptDataConfig, PromptDataset
from nemo_rl.data.tokenizer import get_tokenizer
from nemo_rl.distributed.config import check_cluster
from nemo_rl.environments.config import build_environment
from nemo_rl.models.config import ModelConfig, TokenizerConfig
from nemo_rl.models.config_checks import check_overrides, check_training
from nemo_rl.models.driver import check_parallel_sizes
from nemo_rl.models.engine.model_config import packing_problem, read_model_config
from nemo_rl.utils.checkpoint import CheckpointManager
from nemo_rl.utils.errors import UserError
from nemo_rl.utils.json_values import json_value
from nemo_rl.utils.logger import check_logger

_DECIDES_SAMPLES = ("max_new_tokens", "temperature", "top_p", "top_k", "stop_token_ids")


@dataclass(frozen=True)
class ResumePaths:
    """Where a run starts: the counters, and where weights and optimizers of a checkpoint are; empty for a fresh run."""

    save_state: SaveState
    checkpoint: Path | None = None
    policy: tuple[Path | None, Path | None] = (None, None)
    value: tuple[Path | None, Path | None] = (None, None)


@dataclass
class RLInputs:
    """What a config points at, and every problem found on the way.

    Attributes:
        problems: one line each, naming the key, its value and the remedy; empty when the run can start.
        num_prompts, num_validation_prompts: usable ones.
        steps: of the run.
        identity: the record that the checkpoints of this run keep.
        resume: where the run starts, None when that can't be told.
    """

    problems: list[str] = field(default_factory=list)
    tokenizer: Any = None
    num_prompts: int = 0
    num_validation_prompts: int = 0
    left_out: Mapping[str, int] = field(default_factory=dict)
    steps: int = 0
    identity: Mapping[str, Any] = field(default_factory=dict)
    resume: ResumePaths | None = None


def rl_tokenizer_options(config: MasterConfig) -> TokenizerConfig:
    """`policy.tokenizer` with the model's name filled in."""
    tokenizer = config.policy.tokenizer
    return tokenizer if tokenizer.name else tokenizer.model_copy(update={"name": config.policy.model_name})


def max_prompt_length(config: MasterConfig) -> int:
    """The longest prompt, in tokens, that leaves room for a sample of full length or is allowed explicitly."""
    room = config.policy.max_total_sequence_length - 1
    return min(room, config.data.max_prompt_length or room)


def open_prompts(
    config: MasterConfig, source: PromptDataConfig, tokenizer: Any, *, needs_gold: bool, key: str
) -> PromptDataset:
    """The usable prompts of `data.train` or `data.validation`; the same in the driver and in the rollout workers.

    Raises:
        UserError: see `PromptDataset`.
    """
    return PromptDataset(
        source,
        tokenizer,
        max_prompt_length=max_prompt_length(config),
        needs_gold=needs_gold,
        chat_template_kwargs=config.data.chat_template_kwargs,
        add_bos=config.data.add_bos,
        key=key,
    )


def inspect_rl_inputs(config: MasterConfig) -> RLInputs:
    """Reads models, tokenizer, prompts and the newest checkpoint, and checks the config as a whole; starts nothing."""
    inputs = RLInputs()
    problems = inputs.problems
    world_size = config.cluster.gpus_per_node * config.cluster.num_nodes

    def attempt(action: Callable[[], Any]) -> Any:
        try:
            return action()
        except UserError as error:
            problems.append(str(error))
            return None

    problems += check_cluster(config.cluster)
    problems += check_logger(config.logger)
    problems += validate_single_controller_config(config)
    models: dict[str, Any] = {}
    for model in _models(config):
        problems += check_parallel_sizes(model.parallel, world_size, model.section)
        refused = attempt(lambda model=model: check_overrides(model))
        problems += refused or []
        if refused == []:
            hf_config = attempt(
                lambda model=model: read_model_config(
                    model.model_name, model.hf_config_overrides, section=model.section
                )
            )
            if hf_config is not None and (problem := packing_problem(hf_config)):
                problems.append(f"{model.section}.model_name: {problem}")
            models[model.section] = hf_config
    if models.get("policy") is not None:
        chats = config.data.train.template == "chat"
        inputs.tokenizer = attempt(lambda: get_tokenizer(rl_tokenizer_options(config), needs_chat_template=chats))
    environment = attempt(lambda: build_environment(config.env))
    train = None
    if inputs.tokenizer is not None and environment is not None:
        opened = {
            key: attempt(
                lambda source=source, key=key: open_prompts(
                    config, source, inputs.tokenizer, needs_gold=environment.needs_gold, key=key
                )
            )
            for key, source in (("data.train", config.data.train), ("data.validation", config.data.validation))
            if source is not None
        }
        train, validation = opened["data.train"], opened.get("data.validation")
        inputs.num_validation_prompts = 0 if validation is None else len(validation)
    algorithm = algo_config(config)
    if train is not None:
        inputs.num_prompts, inputs.left_out = len(train), dict(train.counts)
        per_pass = len(train) * algorithm.max_num_epochs
        inputs.steps = min(algorithm.max_num_steps, per_pass // algorithm.num_prompts_per_step)
        if inputs.steps == 0:
            problems.append(
                f"data.train.path: {len(train)} prompts are fewer than the {algorithm.num_prompts_per_step} of a step "
                "(num_prompts_per_step) in all passes (max_num_epochs)"
            )
    for model, ticks in zip(_models(config), updates(config, max(1, inputs.steps)), strict=True):
        problems += check_training(model, ticks)
    if not problems and train is not None:
        if config.checkpointing.enabled:
            inputs.identity = _identity(config, models, inputs.tokenizer, train, inputs.steps)
        inputs.resume = attempt(lambda: find_rl_resume_point(config, inputs.identity))
    return inputs


def updates(config: MasterConfig, steps: int) -> list[int]:
    """Optimizer steps of the policy and, where there is one, of the critic, in a run of `steps` steps."""
    if config.ppo is None:
        assert config.grpo is not None
        return [steps * config.grpo.grpo_epochs]
    trained = max(steps - config.ppo.policy_training_start_step, 0)
    return [max(trained * config.ppo.ppo_epochs, 1), steps * config.ppo.critic_epochs]


def find_rl_resume_point(config: MasterConfig, identity: Mapping[str, Any]) -> ResumePaths:
    """Reads the newest checkpoint, every byte of which is compared with its digest; nothing is changed.

    Raises:
        UserError: it is damaged, of another run, or a part of it is missing.
    """
    checkpointing = config.checkpointing
    manager = CheckpointManager(checkpointing)
    is_resuming = checkpointing.enabled and not checkpointing.start_fresh
    last = manager.get_latest_checkpoint_path() if is_resuming else None
    if last is None:
        return ResumePaths(SaveState())
    manager.verify(last)
    info = manager.load_training_info(last) or {}
    check_same_run(last, info, identity)
    policy = manager.get_resume_paths(last)
    value: tuple[Path | None, Path | None] = (None, None)
    if config.value is not None:
        value = manager.get_resume_paths(last, model_component="value")
    assert policy[0] is not None, "there is a checkpoint"
    check_same_model(config.policy, policy[0])
    return ResumePaths(SaveState.restore(info), last, policy, value)


def _models(config: MasterConfig) -> list[ModelConfig]:
    return [config.policy] if config.value is None else [config.policy, config.value]


def _identity(
    config: MasterConfig, models: Mapping[str, Any], tokenizer: Any, train: PromptDataset, steps: int
) -> dict[str, Any]:
    """What two starts of the same run have in common: rows, sizes, losses and updates."""
    algorithm = algo_config(config)
    record: dict[str, Any] = {
        "algorithm": "ppo" if is_ppo_run(config) else "grpo",
        "prompts": {"file": Path(config.data.train.path).name, "digest": train.digest, "usable": len(train)},
        "shuffle": config.data.shuffle,
        "seed": algorithm.seed,
        "num_prompts_per_step": algorithm.num_prompts_per_step,
        "num_generations_per_prompt": algorithm.num_generations_per_prompt,
        "max_total_sequence_length": config.policy.max_total_sequence_length,
        "adv_estimator": algorithm.adv_estimator.model_dump(mode="json"),
        "loss_fn": config.loss_fn.model_dump(mode="json"),
        "vocabulary": len(tokenizer),
        "template": config.data.train.template,
        "env": config.env.model_dump(mode="json"),
        "generation": config.policy.generation.model_dump(mode="json", include=set(_DECIDES_SAMPLES)),
        "sampler": config.async_rl.sampler.name,
    }
    for model, ticks in zip(_models(config), updates(config, steps), strict=True):
        record[model.section] = {
            "name": Path(model.model_name).name,
            **model_sizes(models[model.section]),
            "optimizer": optimizer_record(model.optimizer_spec()),
            "scheduler": schedule_record(model, ticks),
        }
    return json_value(record)

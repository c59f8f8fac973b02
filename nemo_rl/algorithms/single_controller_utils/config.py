"""The config of a PPO or GRPO run, and the way to it from a file. Importing this loads neither torch nor Ray."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from nemo_rl.algorithms.async_utils.replay_buffer import TQReplayBuffer
from nemo_rl.algorithms.async_utils.sampler_config import InOrderConfig, SamplerConfig
from nemo_rl.algorithms.async_utils.staleness_sampler import build_sampler
from nemo_rl.algorithms.grpo import GRPOConfig
from nemo_rl.algorithms.loss.config import ClippedPGLossConfig, MseValueLossConfig
from nemo_rl.algorithms.ppo import PPOConfig
from nemo_rl.algorithms.sft_config import ONLY_VALUE, refused_recipe_values
from nemo_rl.data.prompts import RLDataConfig
from nemo_rl.data_plane.interfaces import DataPlaneConfig
from nemo_rl.distributed.config import ClusterConfig
from nemo_rl.environments.config import EnvConfig
from nemo_rl.experience.config import RolloutFailureConfig
from nemo_rl.models.config import PolicyConfig
from nemo_rl.models.generation.config import GenerationConfig
from nemo_rl.models.value.config import ValueConfig
from nemo_rl.telemetry.config import TelemetryConfig
from nemo_rl.utils.checkpoint import CheckpointingConfig
from nemo_rl.utils.config import ConfigModel, load_config, validate_config
from nemo_rl.utils.errors import ConfigError, UserError
from nemo_rl.utils.logger import LoggerConfig

log = logging.getLogger(__name__)

# Names of existing recipes that change what is trained, so that a value other than this one can't be passed over.
_ONLY_VALUE: dict[str, Any] = {
    **ONLY_VALUE,
    **{name.replace("policy.", "value.", 1): only for name, only in ONLY_VALUE.items()},
    **{
        f"{section}.{key}": only
        for section in ("ppo", "grpo")
        for key, only in (
            ("use_dynamic_sampling", False),
            ("reward_shaping.enabled", False),
            ("reward_scaling.enabled", False),
            ("async_ppo.enabled", False),
            ("async_grpo.enabled", False),
        )
    },
}


class StallWatchdogConfig(ConfigModel):
    """What happens when neither a rollout nor a step finishes for long."""

    interval_s: float = Field(default=30.0, gt=0)
    """Seconds between two looks."""
    stall_timeout_s: float = Field(default=600.0, gt=0)
    """Seconds without progress that count as a stall."""
    stall_action: Literal["warn", "abort"] = "abort"
    """Say it, or end the run."""

    @model_validator(mode="after")
    def _looks_often_enough(self) -> Self:
        if self.stall_timeout_s <= self.interval_s:
            raise ValueError("stall_timeout_s must be above interval_s")
        return self


class AsyncRLConfig(ConfigModel):
    """How rollouts and training follow each other."""

    sampler: SamplerConfig = Field(default_factory=InOrderConfig)
    """Which samples a step trains on."""
    rollout_failure: RolloutFailureConfig = Field(default_factory=RolloutFailureConfig)
    """What happens to prompts whose rollout fails."""
    stall_watchdog: StallWatchdogConfig = Field(default_factory=StallWatchdogConfig)
    """What happens when nothing moves."""
    min_groups_for_streaming_train: int | None = Field(default=None, ge=1)
    """Prompts whose samples start the next chunk of a step; null waits for the whole step."""
    max_inflight_prompts: int | None = Field(default=None, ge=1)
    """Most prompts in work at once; null is as many as may wait."""
    max_buffered_rollouts: int | None = Field(default=None, ge=1)
    """Most prompts whose finished samples wait; null is what the sampler needs."""


class RLPolicyConfig(PolicyConfig):
    """The `policy` section of a run that samples from its policy."""

    generation: GenerationConfig
    """How samples are drawn."""


class MasterConfig(ConfigModel):
    """A PPO run (`ppo`, `value`, `value_loss_fn`) or a GRPO run (`grpo`)."""

    policy: RLPolicyConfig
    value: ValueConfig | None = None
    """The critic; PPO needs it, GRPO refuses it."""
    loss_fn: ClippedPGLossConfig = Field(default_factory=ClippedPGLossConfig)
    value_loss_fn: MseValueLossConfig | None = None
    ppo: PPOConfig | None = None
    grpo: GRPOConfig | None = None
    env: EnvConfig
    data: RLDataConfig
    data_plane: DataPlaneConfig
    async_rl: AsyncRLConfig = Field(default_factory=AsyncRLConfig)
    logger: LoggerConfig
    cluster: ClusterConfig
    checkpointing: CheckpointingConfig
    telemetry: TelemetryConfig | None = None

    @model_validator(mode="after")
    def _is_one_algorithm(self) -> Self:
        if (self.ppo is None) == (self.grpo is None):
            raise ValueError("give exactly one of the sections ppo and grpo")
        if self.ppo is not None and self.value is None:
            raise ValueError("ppo needs the section value: the critic")
        if self.grpo is not None and (self.value is not None or self.value_loss_fn is not None):
            raise ValueError("grpo has no critic: remove the sections value and value_loss_fn")
        return self


def is_ppo_run(config: MasterConfig) -> bool:
    """Whether the run has a critic."""
    return config.ppo is not None


def algo_config(config: MasterConfig) -> PPOConfig | GRPOConfig:
    """The section of the run's algorithm."""
    algorithm = config.ppo or config.grpo
    assert algorithm is not None, "checked by MasterConfig"
    return algorithm


def groups_per_chunk(config: MasterConfig) -> int:
    """Prompts whose samples make a chunk of a step."""
    return config.async_rl.min_groups_for_streaming_train or algo_config(config).num_prompts_per_step


def needs_reference(config: MasterConfig) -> bool:
    """Whether a KL penalty compares with the reference policy."""
    return config.loss_fn.reference_policy_kl_penalty > 0


def needs_prev_logprobs(config: MasterConfig) -> bool:
    """Whether the policy's own log-probabilities of the samples are needed before it is updated."""
    return (
        not config.loss_fn.force_on_policy_ratio
        or config.loss_fn.use_kl_in_reward
        or algo_config(config).seq_logprob_error_threshold is not None
    )


def validate_single_controller_config(config: MasterConfig) -> list[str]:
    """What is contradictory in a config whose sections are fine by themselves, one line each."""
    problems = []
    algorithm, section = algo_config(config), "ppo" if is_ppo_run(config) else "grpo"
    samples = algorithm.num_prompts_per_step * algorithm.num_generations_per_prompt
    for name, batch in (("policy", config.policy), ("value", config.value)):
        if batch is not None and batch.train_global_batch_size != samples:
            problems.append(
                f"{name}.train_global_batch_size: {batch.train_global_batch_size} is not the {samples} samples of a "
                f"step ({section}.num_prompts_per_step x {section}.num_generations_per_prompt)"
            )
    if groups_per_chunk(config) > algorithm.num_prompts_per_step:
        problems.append(
            f"async_rl.min_groups_for_streaming_train: {groups_per_chunk(config)} is above "
            f"{section}.num_prompts_per_step {algorithm.num_prompts_per_step}"
        )
    if not config.data_plane.enabled:
        problems.append("data_plane.enabled: false leaves the samples no place; set it to true")
    if config.grpo is not None and config.grpo.num_generations_per_prompt < 2:
        problems.append(
            "grpo.num_generations_per_prompt: 1 sample has no group to be compared with; use 2 or more, or ppo"
        )
    if needs_reference(config) and algorithm.skip_reference_policy_logprobs_calculation:
        problems.append(
            f"loss_fn.reference_policy_kl_penalty: {config.loss_fn.reference_policy_kl_penalty} needs reference "
            f"log-probabilities: set {section}.skip_reference_policy_logprobs_calculation: false, or the penalty to 0"
        )
    epochs = config.ppo.ppo_epochs if config.ppo is not None else config.grpo.grpo_epochs if config.grpo else 1
    if config.loss_fn.force_on_policy_ratio and epochs > 1:
        problems.append(
            f"loss_fn.force_on_policy_ratio: true is for one update per step, {section}.{section}_epochs is {epochs}"
        )
    sampler = config.async_rl.sampler
    if sampler.name == "ready_first" and (
        not config.loss_fn.use_importance_sampling_correction or config.loss_fn.force_on_policy_ratio
    ):
        problems.append(
            "async_rl.sampler.name: ready_first trains old samples: set loss_fn.use_importance_sampling_correction: "
            "true and loss_fn.force_on_policy_ratio: false"
        )
    problems += _rollout_problems(config, section)
    metric = config.checkpointing.metric_name
    if metric is not None and metric.startswith("val:") and config.data.validation is None:
        problems.append(f"checkpointing.metric_name: {metric} needs data.validation; use train:reward_mean or null")
    if config.ppo is not None and config.ppo.adv_estimator.name == "raw_reward":
        problems.append("ppo.adv_estimator.name: raw_reward gives no returns to train the critic on; use gae")
    if config.grpo is not None and config.loss_fn.use_kl_in_reward and needs_reference(config):
        problems.append("loss_fn.use_kl_in_reward: true needs token rewards, which grpo has not; set it to false")
    places = config.cluster.gpus_per_node * config.cluster.num_nodes
    if config.policy.generation.workers > places:
        problems.append(
            f"policy.generation.workers: {config.policy.generation.workers} rollout workers share the places of "
            f"{places} workers (cluster.gpus_per_node x cluster.num_nodes); lower it"
        )
    budget = config.policy.generation.max_new_tokens
    if budget >= config.policy.max_total_sequence_length:
        problems.append(
            f"policy.generation.max_new_tokens: {budget} leaves no room for a prompt in "
            f"policy.max_total_sequence_length {config.policy.max_total_sequence_length}"
        )
    if config.value is not None and config.value.max_total_sequence_length < config.policy.max_total_sequence_length:
        problems.append(
            f"value.max_total_sequence_length: {config.value.max_total_sequence_length} is below that of the policy, "
            f"{config.policy.max_total_sequence_length}"
        )
    return problems


def _rollout_problems(config: MasterConfig, section: str) -> list[str]:
    """What is contradictory in `async_rl` and validation."""
    problems = []
    rl, algorithm = config.async_rl, algo_config(config)
    try:
        sampler = build_sampler(rl.sampler, TQReplayBuffer("", _drop_nothing, capacity=0))
        needed = sampler.required_buffer_capacity(algorithm.num_prompts_per_step)
        if rl.max_buffered_rollouts is not None and rl.max_buffered_rollouts < needed:
            problems.append(
                f"async_rl.max_buffered_rollouts: {rl.max_buffered_rollouts} is below the {needed} prompts that the "
                f"sampler {rl.sampler.name} needs; raise it, or set it to null"
            )
    except UserError as error:
        problems.append(str(error))
    if rl.rollout_failure.max_skipped_prompts and rl.sampler.name in ("windowed", "ready_first", "weight_fifo"):
        problems.append(
            f"async_rl.rollout_failure.max_skipped_prompts: {rl.rollout_failure.max_skipped_prompts} makes steps "
            f"smaller, and the sampler {rl.sampler.name} orders for no step; set it to 0, or take in_order"
        )
    if config.data.validation is None:
        wishes = {key: algorithm[key] for key in ("val_period", "val_at_start", "val_at_end") if algorithm[key]}
        problems += [f"{section}.{key}: {wish} needs data.validation" for key, wish in wishes.items()]
    return problems


async def _drop_nothing(sample_ids: list[str]) -> None:
    """The buffer that a sampler is asked with has no rows."""


def read_single_controller_config(path: str | Path, overrides: Sequence[str] = ()) -> MasterConfig:
    """The checked config of `path` with `key=value` overrides. Recipe keys without effect are logged once.

    Raises:
        UserError: the file can't be read.
        ConfigError: unknown keys, wrong types, values out of range; all at once.
    """
    raw: dict[str, Any] = dict(load_config(path, list(overrides)))
    refused = refused_recipe_values(raw, _ONLY_VALUE)
    try:
        config, inert = validate_config(MasterConfig, raw)
    except ConfigError as error:
        raise ConfigError(error.problems + refused) from None
    if inert:
        log.info("recipe keys without effect here: %s", ", ".join(inert))
    if problems := [*refused, *validate_single_controller_config(config)]:
        raise ConfigError(problems)
    return config

"""The block `async_rl.rollout_failure`, and what a rollout process is made of. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field, model_validator

from nemo_rl.data.prompts import RLDataConfig
from nemo_rl.environments.config import EnvConfig
from nemo_rl.models.generation.config import GenerationConfig
from nemo_rl.utils.config import ConfigModel


class NativeRolloutConfig(ConfigModel):
    """Time limits of a sample, in seconds."""

    generation_timeout_s: float | None = Field(default=None, gt=0)
    """Longest time from handing a response to the sampler until it is drawn, waiting for a free place included; null =
    none, so that only the watchdog ends a run whose sampler stands still."""
    env_timeout_s: float | None = Field(default=60.0, gt=0)
    """Longest time that the environment may take for one response; null = none."""


class RolloutFailureConfig(ConfigModel):
    """Failed samples are drawn again with another seed, up to a limit; then their prompt is dropped.

    A failure is never trained as reward 0. *Infrastructure* failures are: the sampler gave a sample up or took too
    long, a log-probability was missing or not finite, the environment took too long or raised `OSError`. *Data*
    failures are: the environment raised anything else, or its reward was not finite.
    """

    max_infra_attempts_per_prompt: int = Field(default=5, ge=1)
    """Attempts of a sample before an infrastructure failure drops its prompt."""
    max_data_attempts_per_prompt: int = Field(default=2, ge=1)
    """Attempts of a sample before a data failure drops its prompt."""
    max_skipped_prompts: int = Field(default=0, ge=0)
    """Prompts that a run may drop without a replacement; one more ends it."""
    max_consecutive_dropped_prompts: int = Field(default=0, ge=0)
    """Prompts that may be dropped in a row, replaced ones included; one more ends the run. 0 = no limit of its own."""
    min_step_batch_fraction: float = Field(default=0.9, gt=0, le=1)
    """Least share of its prompts that a step may go on with after drops."""
    on_dropped_prompt: Literal["shrink", "replace"] = "shrink"
    """A dropped prompt makes the step smaller, or another prompt takes its place."""
    max_replacement_attempts: int = Field(default=1, ge=0)
    """Prompts that may be tried, one after the other, in the place of a dropped one."""
    native: NativeRolloutConfig = Field(default_factory=NativeRolloutConfig)
    """Time limits."""

    @model_validator(mode="after")
    def _replacements_exist(self) -> RolloutFailureConfig:
        if self.on_dropped_prompt == "replace" and not self.max_replacement_attempts:
            raise ValueError("on_dropped_prompt: replace needs max_replacement_attempts of at least 1, it is 0")
        return self


@dataclass(frozen=True)
class RolloutWorkerConfig:
    """What a rollout process is made of.

    Attributes:
        model_name: folder or hub name of the model that is sampled.
        partition_id: where rows go.
        max_total_sequence_length: longest row, in tokens.
        precision: the policy's.
        max_turns: most responses of an episode; None takes `env.max_turns`.
        seed: of the samples of `evaluate`.
        rollouts_path: file that every trained sample is written to; None = none.
    """

    model_name: str
    data: RLDataConfig
    env: EnvConfig
    generation: GenerationConfig
    failure: RolloutFailureConfig
    partition_id: str
    max_total_sequence_length: int
    precision: str = "auto"
    hf_config_overrides: Mapping[str, Any] | None = None
    max_turns: int | None = None
    seed: int = 0
    rollouts_path: str | None = None

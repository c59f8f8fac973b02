"""What the `ppo` and `grpo` sections have in common."""

from __future__ import annotations

from pydantic import Field

from nemo_rl.utils.config import ConfigModel


class RLAlgorithmConfig(ConfigModel):
    """The length of a run, the samples of a step, validation."""

    num_prompts_per_step: int = Field(default=32, ge=1)
    """Prompts of a step."""
    num_generations_per_prompt: int = Field(default=16, ge=1)
    """Samples of each prompt. Times `num_prompts_per_step`, they are `policy.train_global_batch_size`."""
    max_num_steps: int = Field(default=100000, ge=1)
    """Steps of the run, unless `max_num_epochs` ends it earlier."""
    max_num_epochs: int = Field(default=100000, ge=1)
    """Passes over the prompts."""
    max_rollout_turns: int | None = Field(default=None, ge=1)
    """Most turns of the policy in one sample; null takes `env.max_turns`."""
    val_period: int = Field(default=0, ge=0)
    """Validate every so many steps; 0 = not on a period. Needs `data.validation`, as do the next ones."""
    val_batch_size: int = Field(default=256, ge=1)
    """Validation prompts that are sampled together."""
    max_val_samples: int = Field(default=256, ge=1)
    """Validation prompts that are used, one sample each."""
    val_at_start: bool = False
    """Validate before the first step."""
    val_at_end: bool = False
    """Validate after the last step."""
    seed: int = Field(default=42, ge=0, lt=2**32)
    """Of the order of prompts, of sampling and of dropout."""
    overlong_filtering: bool = False
    """Leave samples that were cut at their limit out of training."""
    skip_reference_policy_logprobs_calculation: bool | None = None
    """Keep no reference policy. null = keep one where `loss_fn.reference_policy_kl_penalty` is above 0; true is refused
    there."""
    seq_logprob_error_threshold: float | None = Field(default=None, gt=0)
    """Leave samples out whose mean |trainer - sampler| log-probability difference is above this (nats per token)."""

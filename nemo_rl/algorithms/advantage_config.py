"""How advantages come from rewards. Importing this does not load torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from nemo_rl.algorithms.loss.config import KLType
from nemo_rl.utils.config import ConfigModel


class GAEConfig(ConfigModel):
    """The `adv_estimator` section of PPO."""

    name: Literal["gae", "raw_reward"] = "gae"
    """`gae`: generalized advantage estimates from the critic's values. `raw_reward`: the row's reward at each of its
    tokens; it gives no returns, so no critic can be trained on it."""
    gae_lambda: float = Field(default=0.95, ge=0, le=1)
    """Weight of later steps, for advantages and returns."""
    gae_gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount per trained token."""
    normalize_advantages: bool = True
    """Whiten advantages over the trained tokens of the whole step."""
    gae_lambda_value: float | None = Field(default=None, ge=0, le=1)
    """Lambda of the returns; null = `gae_lambda`."""
    gae_lambda_policy: float | None = Field(default=None, ge=0, le=1)
    """Lambda of the advantages; null = `gae_lambda`."""
    length_adaptive_alpha: float = Field(default=0.0, ge=0)
    """Above 0: lambda of the advantages is `1 - 1 / (alpha * length)` for each row, whatever the two keys above say."""
    reward_kl_type: KLType = "k1"
    """Estimator of the KL penalty that `loss_fn.use_kl_in_reward` takes off the token rewards."""
    bootstrap_truncated: bool = False
    """A response that was cut at its limit did not end: take the critic's value at its last trained token for that of
    the state behind it, instead of 0."""


class GRPOAdvantageConfig(ConfigModel):
    """The `adv_estimator` section of GRPO."""

    name: Literal["grpo"] = "grpo"
    normalize_rewards: bool = True
    """Divide by the sample standard deviation of the group's rewards."""
    use_leave_one_out_baseline: bool = True
    """The baseline of a row is the mean reward of the others of its group; false = of the whole group."""


AdvantageConfig = GAEConfig | GRPOAdvantageConfig

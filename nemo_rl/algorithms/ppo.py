"""The `ppo` section, and what the critic's training results become in the log."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from nemo_rl.algorithms.advantage_config import GAEConfig
from nemo_rl.algorithms.rl_config import RLAlgorithmConfig

# How the values that a critic's passes report for a metric become one: the mean of what all passes report alike, the
# extremes of the extremes, and the sum of everything else, which is divided by global counts already.
_MEANS = ("lr", "wd", "global_valid_seqs", "global_valid_toks", "grad_norm")


class PPOConfig(RLAlgorithmConfig):
    """The `ppo` section."""

    ppo_epochs: int = Field(default=4, ge=1)
    """Policy updates over the samples of a step."""
    critic_ppo_epochs: int | None = Field(default=None, ge=1)
    """Critic updates over the samples of a step; null takes `ppo_epochs`."""
    policy_training_start_step: int = Field(default=0, ge=0)
    """Steps that train the critic only, before the policy is trained too."""
    adv_estimator: GAEConfig = Field(default_factory=GAEConfig)
    """How advantages and returns come from rewards and values."""

    @property
    def critic_epochs(self) -> int:
        """Critic updates per step."""
        return self.critic_ppo_epochs or self.ppo_epochs


def _compute_critic_metrics(value_results: Mapping[str, Any]) -> dict[str, float]:
    """The critic's part of a step's metrics, each name with the prefix `critic/`.

    `critic/explained_var` is `1 - Var(returns - values) / Var(returns)` over the trained tokens; 1 is a perfect critic
    and 0 one that knows the mean return only.

    Raises:
        ValueError: a metric is not a list with one entry per pass.
    """
    metrics: dict[str, float] = {}
    for name, values in value_results["all_mb_metrics"].items():
        if not isinstance(values, list):
            raise ValueError(f"the critic's metric {name!r} is a {type(values).__name__}, not one value per pass")
        if name in _MEANS:
            metrics[name] = sum(values) / len(values)
        elif name.endswith("_min"):
            metrics[name] = min(values)
        elif name.endswith("_max"):
            metrics[name] = max(values)
        else:
            metrics[name] = sum(values)
    metrics |= {"loss": float(value_results["loss"]), "grad_norm": float(value_results["grad_norm"])}
    if {"residual_sq_mean", "returns_mean", "values_mean", "returns_sq_mean"} <= metrics.keys():
        residual = metrics["residual_sq_mean"] - (metrics["returns_mean"] - metrics["values_mean"]) ** 2
        spread = metrics["returns_sq_mean"] - metrics["returns_mean"] ** 2
        metrics["explained_var"] = 1.0 - residual / max(spread, 1e-8)
    return {f"critic/{name}": value for name, value in metrics.items()}

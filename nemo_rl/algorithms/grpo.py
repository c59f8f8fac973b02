"""The `grpo` section: the same controller without a critic."""

from __future__ import annotations

from pydantic import Field

from nemo_rl.algorithms.advantage_config import GRPOAdvantageConfig
from nemo_rl.algorithms.rl_config import RLAlgorithmConfig


class GRPOConfig(RLAlgorithmConfig):
    """The `grpo` section."""

    grpo_epochs: int = Field(default=1, ge=1)
    """Policy updates over the samples of a step."""
    adv_estimator: GRPOAdvantageConfig = Field(default_factory=GRPOAdvantageConfig)
    """How advantages come from the rewards of a prompt's samples."""

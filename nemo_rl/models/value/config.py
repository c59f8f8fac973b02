"""The `value` section of a config."""

from dataclasses import replace
from typing import ClassVar, Literal

from pydantic import Field

from nemo_rl.models.config import ModelConfig
from nemo_rl.models.engine.config import EngineConfig, ValueHeadInit
from nemo_rl.utils.config import ConfigModel


class RewardModelConfig(ConfigModel):
    """The `reward_model_cfg` block of existing recipes; a critic is always a regression to one number per token."""

    enabled: bool = True
    """Accepted, without effect."""
    reward_model_type: Literal["regression"] = "regression"
    """The one kind of critic there is."""


class ValueConfig(ModelConfig):
    """The critic: the keys of a policy, and how its value head starts.

    `model_name` is a causal language model, whose vocabulary projection is dropped, or an exported critic, whose value
    head is taken over. `logprob_batch_size` and `logprob_mb_tokens` are those of passes for values.
    """

    section: ClassVar[str] = "value"

    reward_model_cfg: RewardModelConfig = Field(default_factory=RewardModelConfig)
    """Accepted from existing recipes."""
    value_head_init: ValueHeadInit = "zero"
    """`zero`: the first values are 0. `normal`: weights from N(0, 0.02), from the run's seed, bias 0."""

    def engine_config(self, *, seed: int, init_optimizer: bool = True, temperature: float = 1.0) -> EngineConfig:
        """As `ModelConfig.engine_config`, with a value head; no temperature acts on values."""
        config = super().engine_config(seed=seed, init_optimizer=init_optimizer, temperature=temperature)
        return replace(config, head="value", value_head_init=self.value_head_init)

"""The config of the PPO and GRPO losses. Importing this does not load torch."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from nemo_rl.utils.config import ConfigModel
from nemo_rl.utils.errors import ConfigError

KLType = Literal["k1", "k2", "k3"]


class ClippedPGLossConfig(ConfigModel):
    """The `loss_fn` section: the clipped policy gradient of PPO and GRPO, and its relatives."""

    disable_ppo_ratio: bool = False
    """Train `-advantage * logprob` (REINFORCE): no probability ratio, so nothing is clipped."""
    token_level_loss: bool = True
    """Mean over all trained tokens of the step; false = mean over the tokens of each row, then over rows."""
    sequence_level_importance_ratios: bool = False
    """One ratio per row, the geometric mean over its trained tokens; the weight that corrects for the sampler is the
    product over them. Needs `token_level_loss: false`."""
    ratio_clip_min: float = Field(default=0.2, ge=0)
    """The ratio is clipped below at 1 minus this."""
    ratio_clip_max: float = Field(default=0.2, ge=0)
    """The ratio is clipped above at 1 plus this."""
    ratio_clip_c: float | None = Field(default=None, gt=1)
    """Dual clip: where the advantage is negative, a token's loss is at most `-advantage` times this; null = off."""
    reference_policy_kl_penalty: float = Field(default=0.01, ge=0)
    """Coefficient of the KL divergence from the reference policy; 0 needs no reference log-probs."""
    reference_policy_kl_type: KLType = "k3"
    """Estimator of that divergence in the loss; in the reward, `reward_kl_type` of the advantage estimator decides."""
    kl_input_clamp_value: float | None = Field(default=20.0, gt=0)
    """The log-ratio is clamped to plus and minus this before anything is made of it; null = off."""
    kl_output_clamp_value: float | None = Field(default=10.0, gt=0)
    """The estimate per token is clamped to plus and minus this; null = off."""
    use_kl_in_reward: bool = False
    """Take the KL penalty off the token rewards, before advantages are made, and leave it out of the loss."""
    use_importance_sampling_correction: bool = False
    """Weigh each token by the trainer's probability over the sampler's, `exp(prev_logprobs - generation_logprobs)`."""
    truncated_importance_sampling_type: Literal["tis", "icepop", "seq-mask-tis"] | None = None
    """What becomes of weights outside the interval that the next two keys give: `tis` clamps them, `icepop` sets them
    to zero, `seq-mask-tis` leaves out whole rows whose geometric mean is outside; null keeps all as they are."""
    truncated_importance_sampling_ratio: float | None = Field(default=None, gt=0)
    """The upper end of the interval."""
    truncated_importance_sampling_ratio_min: float | None = Field(default=None, ge=0)
    """The lower end of the interval; null = 0, for `tis` only."""
    use_on_policy_kl_approximation: bool = False
    """Weigh the KL estimate by the current probability over the sampler's, as its samples are the sampler's."""
    force_on_policy_ratio: bool = False
    """Take the current log-probs for `prev_logprobs`: the ratio is 1 and its gradient that of the log-prob. For one
    update per step."""
    use_cispo: bool = False
    """Train `-advantage * ratio * logprob` with the clipped ratio as a constant: clipped tokens keep a gradient."""
    positive_example_nll_weight: float = Field(default=0.0, ge=0)
    """Coefficient of an added negative log-likelihood of the rows with a positive `total_reward`."""

    @model_validator(mode="after")
    def _options_agree(self) -> Self:
        problems = [*self._ratio_problems(), *self._truncation_problems()]
        if problems:
            raise ConfigError(problems)
        return self

    def _ratio_problems(self) -> list[str]:
        problems = []
        if self.sequence_level_importance_ratios and self.token_level_loss:
            problems.append("sequence_level_importance_ratios: true needs token_level_loss: false")
        if self.use_cispo:
            for key in ("disable_ppo_ratio", "force_on_policy_ratio", "sequence_level_importance_ratios"):
                if getattr(self, key):
                    problems.append(f"use_cispo: true excludes {key}: true; turn one of them off")
            if self.ratio_clip_c is not None:
                problems.append(f"use_cispo: true excludes ratio_clip_c: {self.ratio_clip_c}; set it to null")
            if not self.token_level_loss:
                problems.append("use_cispo: true needs token_level_loss: true")
        return problems

    def _truncation_problems(self) -> list[str]:
        prefix = "truncated_importance_sampling"
        kind, upper, lower = (
            self.truncated_importance_sampling_type,
            self.truncated_importance_sampling_ratio,
            self.truncated_importance_sampling_ratio_min,
        )
        if kind is None:
            return [
                f"{prefix}_{name}: {value} has no effect without {prefix}_type; name one or set it to null"
                for name, value in (("ratio", upper), ("ratio_min", lower))
                if value is not None
            ]
        problems = []
        if not self.use_importance_sampling_correction:
            problems.append(f"{prefix}_type: {kind} needs use_importance_sampling_correction: true")
        if upper is None:
            problems.append(f"{prefix}_type: {kind} needs {prefix}_ratio, the largest weight, such as 2.0")
        if lower is None and kind != "tis":
            problems.append(f"{prefix}_type: {kind} needs {prefix}_ratio_min, the smallest weight, such as 0.5")
        if upper is not None and lower is not None and lower > upper:
            problems.append(f"{prefix}_ratio_min: {lower} is above {prefix}_ratio: {upper}")
        if kind == "seq-mask-tis" and self.sequence_level_importance_ratios:
            problems.append(f"{prefix}_type: {kind} excludes sequence_level_importance_ratios: true; turn one off")
        return problems


class MseValueLossConfig(ConfigModel):
    """The `value_loss_fn` section: the critic's squared error."""

    scale: float = Field(default=1.0, gt=0)
    """Factor of the loss and of its gradient."""
    cliprange: float | None = Field(default=None, ge=0)
    """An estimate that leaves the old one by more than this can't lower the loss; null or 0 = no clipping."""

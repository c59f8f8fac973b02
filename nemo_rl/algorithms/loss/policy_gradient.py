"""The policy's loss in PPO and GRPO: the clipped policy gradient, its relatives, and what is logged about them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nemo_rl.algorithms.loss.config import ClippedPGLossConfig
from nemo_rl.algorithms.loss.importance import importance_weights, sampler_mismatch
from nemo_rl.algorithms.loss.interfaces import (
    LossInputType,
    LossType,
    MetricNormalizer,
    masked_mean,
    trained_token_mask,
)
from nemo_rl.algorithms.loss.kl import bounded_exp, calculate_kl
from nemo_rl.utils.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor


_REMEDY = {
    "token_mask": "it comes with the rows",
    "sample_mask": "it comes with the rows",
    "advantages": "run the advantage stage first",
    "prev_logprobs": "compute it with get_logprobs_from_meta, or set loss_fn.force_on_policy_ratio: true",
    "generation_logprobs": "the rollout writes it; or turn off loss_fn.use_importance_sampling_correction and "
    "loss_fn.use_on_policy_kl_approximation",
    "reference_policy_logprobs": "compute it with get_reference_policy_logprobs_from_meta, or set "
    "loss_fn.reference_policy_kl_penalty: 0",
    "total_reward": "the rollout writes it; or set loss_fn.positive_example_nll_weight: 0",
}


@dataclass(frozen=True)
class _Tokens:
    """The targets of a batch, `[B, T]` with `T = S - 1`. Every tensor of log-probs is 0 where `kept` is false.

    They are selected before any arithmetic: the derivative of `exp` at NaN or inf is NaN, even times a zero.
    """

    weight: Tensor
    kept: Tensor
    sample_mask: Tensor
    advantages: Tensor
    logprobs: Tensor
    prev_logprobs: Tensor
    generation_logprobs: Tensor | None


@dataclass(frozen=True)
class _Counts:
    """The denominators: rows with weight and trained tokens of the whole step, or 1 and 1 for raw sums."""

    seqs: Tensor | float
    toks: Tensor | float


class ClippedPGLossFn:
    """The clipped policy gradient of PPO (Schulman et al., 2017), with ratio `exp(logprobs - prev_logprobs)`.

    Per token: `max(-A * ratio, -A * clamp(ratio, 1 - ratio_clip_min, 1 + ratio_clip_max))`, times the weight that
    corrects for the sampler, plus the KL penalty, plus the likelihood of positive examples; `ClippedPGLossConfig` says
    what else each option puts in place. `use_fused_linear_logprobs` is accepted for the interface, see `NLLLossFn`.

    Metrics, means over trained tokens unless said otherwise:

    - `loss`; `kl_penalty`, the KL estimate before its coefficient, and `positive_nll_loss`, both averaged as the loss.
    - `probs_ratio` and `probs_ratio_clamped`, with their extremes `_min` and `_max`; without a clip they are equal.
    - `token_mult_prob_error`, `gen_kl_error`, `policy_kl_error`, `js_divergence_error`, see `sampler_mismatch`, and
      `sampling_importance_ratio`, the correction's weight (mean over rows when there is one per row). These need
      `generation_logprobs` in the data.
    - `is_oob_ratio`, with a truncation type only: share of the tokens, or rows, outside its interval.
    - `approx_entropy`: `-exp(logprobs - sampler's) * logprobs`, in nats.
    - `num_valid_samples`: rows with weight.
    """

    input_type = LossInputType.LOGPROB

    def __init__(self, cfg: ClippedPGLossConfig | Mapping[str, Any], use_fused_linear_logprobs: bool = False):
        """Raises ValueError, naming the key, for options that exclude one another."""
        self.cfg = cfg if isinstance(cfg, ClippedPGLossConfig) else ClippedPGLossConfig.model_validate(cfg)
        self.use_fused_linear_logprobs = use_fused_linear_logprobs
        self.loss_type = LossType.TOKEN_LEVEL if self.cfg.token_level_loss else LossType.SEQUENCE_LEVEL
        tokens, rows = MetricNormalizer.TOKENS, MetricNormalizer.SEQUENCES
        as_loss = tokens if self.cfg.token_level_loss else rows
        weighs_rows = self.cfg.sequence_level_importance_ratios
        judges_rows = weighs_rows or self.cfg.truncated_importance_sampling_type == "seq-mask-tis"
        self.metric_normalizations: Mapping[str, MetricNormalizer] = {
            "loss": as_loss,
            "kl_penalty": as_loss,
            "positive_nll_loss": as_loss,
            "probs_ratio": tokens,
            "probs_ratio_clamped": tokens,
            "probs_ratio_min": MetricNormalizer.MIN,
            "probs_ratio_max": MetricNormalizer.MAX,
            "probs_ratio_clamped_min": MetricNormalizer.MIN,
            "probs_ratio_clamped_max": MetricNormalizer.MAX,
            "token_mult_prob_error": tokens,
            "gen_kl_error": tokens,
            "policy_kl_error": tokens,
            "js_divergence_error": tokens,
            "sampling_importance_ratio": rows if weighs_rows else tokens,
            "is_oob_ratio": rows if judges_rows else tokens,
            "approx_entropy": tokens,
            "num_valid_samples": MetricNormalizer.NONE,
        }

    @property
    def kl_coefficient(self) -> float:
        """Of the KL penalty in the loss: 0 when it is in the reward."""
        return 0.0 if self.cfg.use_kl_in_reward else self.cfg.reference_policy_kl_penalty

    @property
    def required_columns(self) -> tuple[str, ...]:
        """The columns without which a call fails. `generation_logprobs`, where it is there, is read for metrics."""
        cfg = self.cfg
        corrects = cfg.use_importance_sampling_correction
        needs = {
            "prev_logprobs": not cfg.force_on_policy_ratio and (corrects or not cfg.disable_ppo_ratio),
            "generation_logprobs": corrects or (self.kl_coefficient > 0 and cfg.use_on_policy_kl_approximation),
            "reference_policy_logprobs": self.kl_coefficient > 0,
            "total_reward": cfg.positive_example_nll_weight > 0,
        }
        return ("token_mask", "sample_mask", "advantages", *(name for name, needed in needs.items() if needed))

    def __call__(
        self,
        data: Mapping[str, Any],
        global_valid_seqs: Tensor | float,
        global_valid_toks: Tensor | float,
        *,
        next_token_logprobs: Tensor,
    ) -> tuple[Tensor, dict[str, float]]:
        """Loss and metrics of `next_token_logprobs [B, S-1]`, column t being that of token `t + 1`.

        The columns of `data` are `[B, S]`, column t belonging to token t; `sample_mask` and `total_reward` are `[B]`.

        Raises:
            UserError: `data` lacks a column that the options need.
        """
        for name in self.required_columns:
            if name not in data:
                raise UserError(f"{name}: loss_fn needs this column, and nothing wrote it; {_REMEDY[name]}")
        tokens, counts = self._tokens(data, next_token_logprobs), _Counts(global_valid_seqs, global_valid_toks)
        ratio, clamped = self._ratios(tokens)
        token_losses = self._token_losses(tokens, ratio, clamped)
        metrics = _ratio_metrics(tokens, counts, ratio.detach(), clamped.detach())
        if tokens.generation_logprobs is not None:
            weights = self._correction(tokens, tokens.generation_logprobs, counts, metrics)
            if self.cfg.use_importance_sampling_correction:
                token_losses = token_losses * weights
        loss = self._mean(token_losses, tokens, counts)
        metrics["kl_penalty"] = metrics["positive_nll_loss"] = 0.0
        if self.kl_coefficient > 0:
            kl = self._mean(self._kl(tokens, data["reference_policy_logprobs"]), tokens, counts)
            loss = loss + self.kl_coefficient * kl
            metrics["kl_penalty"] = kl.item()
        if self.cfg.positive_example_nll_weight > 0:
            positive = (data["total_reward"] > 0)[:, None]
            nll = self._mean((-tokens.logprobs).where(positive, 0.0), tokens, counts)
            loss = loss + self.cfg.positive_example_nll_weight * nll
            metrics["positive_nll_loss"] = nll.item()
        return loss, {
            "loss": loss.item(),
            **metrics,
            "approx_entropy": _token_mean(_entropy(tokens), tokens, counts),
            "num_valid_samples": tokens.sample_mask.sum().item(),
        }

    def _tokens(self, data: Mapping[str, Any], next_token_logprobs: Tensor) -> _Tokens:
        weight = trained_token_mask(data)
        kept = weight != 0

        def column(name: str) -> Tensor | None:
            return data[name][:, 1:].where(kept, 0.0) if name in data else None

        logprobs = next_token_logprobs.where(kept, 0.0)
        prev = None if self.cfg.force_on_policy_ratio else column("prev_logprobs")
        return _Tokens(
            weight=weight,
            kept=kept,
            sample_mask=data["sample_mask"],
            advantages=data["advantages"][:, 1:].where(kept, 0.0),
            logprobs=logprobs,
            prev_logprobs=logprobs.detach() if prev is None else prev,
            generation_logprobs=column("generation_logprobs"),
        )

    def _ratios(self, tokens: _Tokens) -> tuple[Tensor, Tensor]:
        """The ratio and the clipped ratio, `[B, T]`; both the same where nothing is clipped."""
        log_ratio = tokens.logprobs - tokens.prev_logprobs
        if self.cfg.sequence_level_importance_ratios:
            log_ratio = masked_mean(log_ratio, tokens.kept.float(), dim=1)[:, None].expand_as(log_ratio)
        ratio = bounded_exp(log_ratio)
        if self.cfg.disable_ppo_ratio:
            return ratio, ratio
        return ratio, ratio.clamp(1 - self.cfg.ratio_clip_min, 1 + self.cfg.ratio_clip_max)

    def _token_losses(self, tokens: _Tokens, ratio: Tensor, clamped: Tensor) -> Tensor:
        gain = tokens.advantages
        if self.cfg.disable_ppo_ratio:
            return -gain * tokens.logprobs
        if self.cfg.use_cispo:
            return -gain * clamped.detach() * tokens.logprobs
        losses = (-gain * ratio).maximum(-gain * clamped)
        if self.cfg.ratio_clip_c is not None:
            losses = losses.minimum(-gain * self.cfg.ratio_clip_c).where(gain < 0, losses)
        return losses

    def _correction(self, tokens: _Tokens, generation: Tensor, counts: _Counts, metrics: dict[str, float]) -> Tensor:
        """The correction's weights; adds to `metrics` how far the sampler is from the trainer."""
        weights, outside = importance_weights(tokens.prev_logprobs - generation, tokens.kept, self.cfg)
        for name, numbers in sampler_mismatch(tokens.prev_logprobs, generation).items():
            metrics[name] = _token_mean(numbers, tokens, counts)
        about_weights = {"sampling_importance_ratio": weights}
        if self.cfg.truncated_importance_sampling_type is not None:
            about_weights["is_oob_ratio"] = outside.float()
        for name, numbers in about_weights.items():
            per_row = self.metric_normalizations[name] is MetricNormalizer.SEQUENCES
            metrics[name] = (_row_mean if per_row else _token_mean)(numbers, tokens, counts)
        return weights

    def _kl(self, tokens: _Tokens, reference: Tensor) -> Tensor:
        """KL per token. The weights are 1 in value on policy; their gradient makes that of the mean unbiased."""
        sampler = tokens.logprobs.detach()
        if self.cfg.use_on_policy_kl_approximation and tokens.generation_logprobs is not None:
            sampler = tokens.generation_logprobs
        return calculate_kl(
            tokens.logprobs,
            reference[:, 1:].where(tokens.kept, 0.0),
            self.cfg.reference_policy_kl_type,
            self.cfg.kl_input_clamp_value,
            self.cfg.kl_output_clamp_value,
            importance_sampling_weights=bounded_exp(tokens.logprobs - sampler),
        )

    def _mean(self, values: Tensor, tokens: _Tokens, counts: _Counts) -> Tensor:
        """Mean over trained tokens, or over the rows' means."""
        if self.cfg.token_level_loss:
            return masked_mean(values, tokens.weight, global_normalization_factor=counts.toks)
        rows = masked_mean(values, tokens.kept.float(), dim=1)
        return masked_mean(rows, tokens.sample_mask, global_normalization_factor=counts.seqs)


def _token_mean(values: Tensor, tokens: _Tokens, counts: _Counts) -> float:
    return masked_mean(values, tokens.weight, global_normalization_factor=counts.toks).item()


def _row_mean(values: Tensor, tokens: _Tokens, counts: _Counts) -> float:
    """Of `[B, 1]`. Rows without a trained token take no part: the engine leaves them out of its passes."""
    rows = tokens.sample_mask * tokens.kept.any(1)
    return masked_mean(values.squeeze(1), rows, global_normalization_factor=counts.seqs).item()


def _ratio_metrics(tokens: _Tokens, counts: _Counts, ratio: Tensor, clamped: Tensor) -> dict[str, float]:
    metrics = {}
    any_kept = bool(tokens.kept.any())
    for name, numbers in (("probs_ratio", ratio), ("probs_ratio_clamped", clamped)):
        metrics[name] = _token_mean(numbers, tokens, counts)
        metrics[f"{name}_min"] = numbers.where(tokens.kept, math.inf).min().item() if any_kept else math.inf
        metrics[f"{name}_max"] = numbers.where(tokens.kept, -math.inf).max().item() if any_kept else -math.inf
    return metrics


def _entropy(tokens: _Tokens) -> Tensor:
    sampler = tokens.prev_logprobs if tokens.generation_logprobs is None else tokens.generation_logprobs
    logprobs = tokens.logprobs.detach()
    return -bounded_exp(logprobs - sampler) * logprobs

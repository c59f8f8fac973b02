"""How far the sampler's probabilities are from the trainer's, and the weights that correct for it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from nemo_rl.algorithms.loss.kl import bounded_exp, calculate_kl

if TYPE_CHECKING:
    from torch import Tensor

    from nemo_rl.algorithms.loss.config import ClippedPGLossConfig

_LN_2 = 0.6931471805599453


def importance_weights(log_ratio: Tensor, kept: Tensor, cfg: ClippedPGLossConfig) -> tuple[Tensor, Tensor]:
    """The weights of the importance-sampling correction, without a graph, and where they fell outside the interval.

    Args:
        log_ratio: `prev_logprobs - generation_logprobs [B, T]`, 0 where `kept` is false.
        kept: trained tokens, bool `[B, T]`.
        cfg: its `truncated_importance_sampling_*` keys say what the interval is and what happens outside.

    Returns:
        weights: `[B, T]`, or `[B, 1]` with sequence-level ratios. A weight that is not finite is 0.
        outside: bool `[B, T]` or, where whole rows are judged, `[B, 1]`. Without a truncation type only NaN is.
    """
    log_ratio = log_ratio.detach()
    weights = (log_ratio.sum(1, keepdim=True) if cfg.sequence_level_importance_ratios else log_ratio).exp()
    kind, upper = cfg.truncated_importance_sampling_type, cfg.truncated_importance_sampling_ratio
    lower = cfg.truncated_importance_sampling_ratio_min or 0.0
    judged = weights
    if kind == "seq-mask-tis":
        judged = (log_ratio.sum(1, keepdim=True) / kept.sum(1, keepdim=True).clamp(min=1)).exp()
    # Not `judged < lower`, which NaN would pass.
    outside = ~((judged >= lower) & (judged <= (math.inf if upper is None else upper)))
    truncated = weights.clamp(lower, upper) if kind == "tis" else weights.masked_fill(outside, 0.0)
    return truncated.where(weights.isfinite(), 0.0), outside


def sampler_mismatch(trainer: Tensor, sampler: Tensor) -> dict[str, Tensor]:
    """Measures of how far apart two log-probabilities of the sampled tokens are, one number per token, any shape.

    - `token_mult_prob_error`: the larger probability over the smaller, 1 when they agree.
    - `gen_kl_error`, `policy_kl_error`: k3 of `KL(sampler || trainer)` and of the reverse.
    - `js_divergence_error`: half the sum of k3 from each to their mixture.
    """
    mixture = trainer.logaddexp(sampler) - _LN_2
    return {
        "token_mult_prob_error": bounded_exp((trainer - sampler).abs()),
        "gen_kl_error": calculate_kl(sampler, trainer, output_clamp_value=None),
        "policy_kl_error": calculate_kl(trainer, sampler, output_clamp_value=None),
        "js_divergence_error": (calculate_kl(trainer, mixture) + calculate_kl(sampler, mixture)) / 2,
    }

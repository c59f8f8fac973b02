"""Ratios of probabilities, and estimates of the KL divergence, that stay finite in value and gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to plus and minus this before an exponential: an overflow there gives NaN gradients even where
the result is clipped away, and a ratio of e^20 says no more than "these two models disagree"."""


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """`exp(log_ratio)` within `exp(-MAX_LOG_RATIO)` and `exp(MAX_LOG_RATIO)`; the gradient outside is 0."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def calculate_kl(
    logprobs: Tensor,
    logprobs_reference: Tensor,
    kl_type: str = "k3",
    input_clamp_value: float | None = 20.0,
    output_clamp_value: float | None = 10.0,
    importance_sampling_weights: Tensor | None = None,
) -> Tensor:
    """Estimate per token of `KL(policy || reference)` from tokens that the policy sampled, any shape.

    With `r = logprobs_reference - logprobs`: k1 is `-r`, k2 is `r^2 / 2`, k3 is `exp(r) - 1 - r`
    (J. Schulman, "Approximating KL divergence", 2020).

    Args:
        logprobs: of the policy.
        logprobs_reference: of the reference, same shape.
        kl_type: "k1", "k2" or "k3".
        input_clamp_value: `r` is clamped to plus and minus this, before the exponential; None leaves it.
        output_clamp_value: the estimate, weights included, is clamped to plus and minus this; None leaves it.
        importance_sampling_weights: factors for tokens that another policy sampled, same shape. They carry a gradient
            where `r` was not clamped.

    Raises:
        ValueError: another `kl_type`.
    """
    unclamped = logprobs_reference - logprobs
    log_ratio = unclamped
    if input_clamp_value is not None:
        log_ratio = unclamped.clamp(-input_clamp_value, input_clamp_value)
    match kl_type:
        case "k1":
            kl = -log_ratio
        case "k2":
            kl = log_ratio.square() / 2
        case "k3":
            kl = log_ratio.exp() - 1 - log_ratio
        case _:
            raise ValueError(f"kl_type: expected k1, k2 or k3, got {kl_type!r}")
    if importance_sampling_weights is not None:
        weights = importance_sampling_weights
        kl = kl * weights.where(log_ratio == unclamped, weights.detach())
    if output_clamp_value is not None:
        kl = kl.clamp(-output_clamp_value, output_clamp_value)
    return kl

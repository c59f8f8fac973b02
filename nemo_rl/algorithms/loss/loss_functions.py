"""The losses. Each sums over its rows and divides by the global counts it is given."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from nemo_rl.algorithms.loss.config import ClippedPGLossConfig, MseValueLossConfig
from nemo_rl.algorithms.loss.interfaces import (
    LossInputType,
    LossType,
    MetricNormalizer,
    masked_mean,
    trained_token_mask,
)
from nemo_rl.algorithms.loss.kl import calculate_kl
from nemo_rl.algorithms.loss.policy_gradient import ClippedPGLossFn
from nemo_rl.algorithms.loss.value import MseValueLossFn

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "ClippedPGLossConfig",
    "ClippedPGLossFn",
    "MseValueLossConfig",
    "MseValueLossFn",
    "NLLLossFn",
    "calculate_kl",
]


class NLLLossFn:
    """Negative log-likelihood of the trained tokens, in nats per token.

    `use_fused_linear_logprobs` is accepted for the interface: the engine always runs the LM head at trained positions
    only, which is what a fused kernel would save.
    """

    loss_type = LossType.TOKEN_LEVEL
    input_type = LossInputType.LOGPROB
    metric_normalizations: Mapping[str, MetricNormalizer] = MappingProxyType(
        {
            "loss": MetricNormalizer.TOKENS,
            "num_unmasked_tokens": MetricNormalizer.NONE,
            "num_valid_samples": MetricNormalizer.NONE,
        }
    )

    def __init__(self, use_fused_linear_logprobs: bool = False):
        self.use_fused_linear_logprobs = use_fused_linear_logprobs

    def __call__(
        self,
        data: Mapping[str, Any],
        global_valid_seqs: Tensor | float,
        global_valid_toks: Tensor | float,
        *,
        next_token_logprobs: Tensor,
        dpo_loss: bool = False,
        dpo_average_log_probs: bool = False,
    ) -> tuple[Tensor, dict[str, float]]:
        """Loss and metrics of `next_token_logprobs [B, S-1]`.

        With `dpo_loss` the first value is the negative log-probability of each row, float `[B]`: summed over its
        trained tokens, or their mean with `dpo_average_log_probs`.
        """
        mask = trained_token_mask(data)
        if dpo_loss:
            kept = next_token_logprobs.where(mask != 0, 0.0) * mask
            row_sums = kept.sum(-1)
            rows = row_sums / mask.sum(-1).clamp(min=1) if dpo_average_log_probs else row_sums
            return -rows, {}
        loss = -masked_mean(next_token_logprobs, mask, global_normalization_factor=global_valid_toks)
        return loss, {
            "loss": loss.item(),
            "num_unmasked_tokens": mask.sum().item(),
            "num_valid_samples": data["sample_mask"].sum().item(),
        }

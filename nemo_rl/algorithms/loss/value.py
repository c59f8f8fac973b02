"""The critic's loss: squared error against the returns, optionally clipped around the old estimates."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from nemo_rl.algorithms.loss.config import MseValueLossConfig
from nemo_rl.algorithms.loss.interfaces import (
    LossInputType,
    LossType,
    MetricNormalizer,
    masked_mean,
    trained_token_mask,
)
from nemo_rl.utils.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor


class MseValueLossFn:
    """`0.5 * scale * mean over the trained tokens of (v - R)^2`.

    With a clip range `c` the square is `max((v - R)^2, (clamp(v, old - c, old + c) - R)^2)`
    (Schulman et al., 2017, as in the first public implementation).

    Metrics: `loss`; `vf_clipfrac`, the share of tokens with `|v - old| > c`; the means `values_mean`, `returns_mean`,
    `returns_sq_mean` and `residual_sq_mean`, of `(v - R)^2`, from which the explained variance follows; `values_min`
    and `values_max`, +inf and -inf of no token; `num_valid_samples`, rows with weight.
    """

    loss_type = LossType.TOKEN_LEVEL
    input_type = LossInputType.LOGIT
    metric_normalizations: Mapping[str, MetricNormalizer] = MappingProxyType(
        {
            "loss": MetricNormalizer.TOKENS,
            "vf_clipfrac": MetricNormalizer.TOKENS,
            "values_mean": MetricNormalizer.TOKENS,
            "returns_mean": MetricNormalizer.TOKENS,
            "returns_sq_mean": MetricNormalizer.TOKENS,
            "residual_sq_mean": MetricNormalizer.TOKENS,
            "values_min": MetricNormalizer.MIN,
            "values_max": MetricNormalizer.MAX,
            "num_valid_samples": MetricNormalizer.NONE,
        }
    )

    def __init__(self, cfg: MseValueLossConfig | Mapping[str, Any]):
        self.cfg = cfg if isinstance(cfg, MseValueLossConfig) else MseValueLossConfig.model_validate(cfg)

    @property
    def required_columns(self) -> tuple[str, ...]:
        """The columns that the loss reads; `values`, the old estimates, only when it clips."""
        return ("token_mask", "sample_mask", "returns", *(["values"] if self.cfg.cliprange else []))

    def __call__(
        self,
        data: Mapping[str, Any],
        global_valid_seqs: Tensor | float,
        global_valid_toks: Tensor | float,
        *,
        logits: Tensor,
    ) -> tuple[Tensor, dict[str, float]]:
        """Loss and metrics of the estimates `logits [B, S]` or `[B, S, 1]`.

        Column t of `logits`, of `returns [B, S]` and of `values [B, S]` belongs to the state before token t, so
        `logits` are the head's outputs shifted right by one.

        Raises:
            UserError: `data` lacks a column.
        """
        for name in self.required_columns:
            if name not in data:
                raise UserError(f"{name}: the value loss needs this column; write it before the critic is trained")
        estimates = logits.squeeze(-1) if logits.dim() == 3 else logits
        mask = trained_token_mask(data)
        kept = mask != 0
        # Selected before any arithmetic: the derivative of a square at NaN is NaN, even times a zero.
        values = estimates[:, 1:].float().where(kept, 0.0)
        returns = data["returns"][:, 1:].where(kept, 0.0)

        def mean(numbers: Tensor) -> Tensor:
            return masked_mean(numbers, mask, global_normalization_factor=global_valid_toks)

        squares = (values - returns).square()
        clip_fraction = 0.0
        if self.cfg.cliprange:
            old = data["values"][:, 1:].where(kept, 0.0)
            near = values.clamp(old - self.cfg.cliprange, old + self.cfg.cliprange)
            clip_fraction = mean(((values - old).abs() > self.cfg.cliprange).float()).item()
            loss = 0.5 * self.cfg.scale * mean(squares.maximum((near - returns).square()))
        else:
            loss = 0.5 * self.cfg.scale * mean(squares)
        # In double: the explained variance is a small difference of these means.
        exact, targets = values.detach().double(), returns.double()
        any_kept = bool(kept.any())
        return loss, {
            "loss": loss.item(),
            "vf_clipfrac": clip_fraction,
            "values_mean": mean(exact).item(),
            "returns_mean": mean(targets).item(),
            "returns_sq_mean": mean(targets.square()).item(),
            "residual_sq_mean": mean((exact - targets).square()).item(),
            "values_min": exact.where(kept, math.inf).min().item() if any_kept else math.inf,
            "values_max": exact.where(kept, -math.inf).max().item() if any_kept else -math.inf,
            "num_valid_samples": data["sample_mask"].sum().item(),
        }

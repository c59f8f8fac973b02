"""What a loss is to the engine: a callable over padded rows that says how its sums are normalised."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class LossType(Enum):
    """The denominator of the loss: trained tokens or rows, both counted over all ranks and microbatches of a step."""

    TOKEN_LEVEL = "token_level"
    SEQUENCE_LEVEL = "sequence_level"


class LossInputType(Enum):
    """What the head hands to the loss."""

    LOGIT = "logit"
    LOGPROB = "logprob"


class MetricNormalizer(Enum):
    """How the values that the forward passes of a step report for a metric become one number for the step."""

    TOKENS = "tokens"
    """Sums; the step's number is their total over its trained tokens."""
    SEQUENCES = "sequences"
    """Sums; the step's number is their total over its rows with weight."""
    NONE = "none"
    """Sums; the step's number is their total."""
    MIN = "min"
    """The least of the values; a pass with nothing to report gives +inf."""
    MAX = "max"
    """The greatest of the values; a pass with nothing to report gives -inf."""
    LAST = "last"
    """The value of the last pass, for what all passes report alike."""


class LossFunction(Protocol):
    """A loss over rows.

    Called as `loss_fn(data, global_valid_seqs, global_valid_toks, next_token_logprobs=...)`; `data` holds
    `token_mask [B, S]` and `sample_mask [B]`, `next_token_logprobs [B, S-1]` has the log-probability of token `t + 1`
    in column `t`. Returns a scalar with a graph and a dict of float metrics.

    With both global counts 1 the loss is a raw sum; the engine then divides once, at the end of the step.

    `metric_normalizations` states the rule of each metric, see `metric_rule` for one that is not listed.
    """

    loss_type: LossType
    input_type: LossInputType
    metric_normalizations: Mapping[str, MetricNormalizer]

    def __call__(
        self,
        data: Mapping[str, Any],
        global_valid_seqs: Tensor | float,
        global_valid_toks: Tensor | float,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, dict[str, float]]: ...


def metric_rule(
    name: str, stated: Mapping[str, MetricNormalizer], loss_type: LossType = LossType.TOKEN_LEVEL
) -> MetricNormalizer:
    """The rule of a metric: the stated one.

    One that the loss does not state is an extremum when its name ends in `_min` or `_max`, else divided like the loss.
    """
    if name in stated:
        return stated[name]
    if name.endswith("_min"):
        return MetricNormalizer.MIN
    if name.endswith("_max"):
        return MetricNormalizer.MAX
    return MetricNormalizer.TOKENS if loss_type is LossType.TOKEN_LEVEL else MetricNormalizer.SEQUENCES


def reduce_metric(rule: MetricNormalizer, values: Sequence[float]) -> float:
    """The step's number of a metric; `values` has one entry per forward pass, sums already divided by their count.

    NaN among them gives NaN, whatever the rule and the order.
    """
    if rule is MetricNormalizer.LAST:
        return values[-1]
    if any(math.isnan(value) for value in values):
        return math.nan
    if rule is MetricNormalizer.MIN:
        return min(values)
    if rule is MetricNormalizer.MAX:
        return max(values)
    return sum(values)


def masked_mean(
    values: Tensor, mask: Tensor, dim: int | None = None, global_normalization_factor: Tensor | float | None = None
) -> Tensor:
    """`sum(values * mask) / (F + 1e-8)`, F being the given factor, else the sum of the mask over `dim`.

    Masked values take no part, NaN and inf included: they are selected away, not multiplied by zero.
    """
    kept = values.where(mask != 0, 0.0) * mask
    total = kept.sum() if dim is None else kept.sum(dim)
    if global_normalization_factor is None:
        global_normalization_factor = mask.sum() if dim is None else mask.sum(dim)
    return total / (global_normalization_factor + 1e-8)


def trained_token_mask(data: Mapping[str, Any]) -> Tensor:
    """`token_mask * sample_mask` over the targets, columns 1 to S-1: float `[B, S-1]`.

    Column 0 has no prediction, so it is never a trained token.
    """
    return data["token_mask"][:, 1:] * data["sample_mask"][:, None]

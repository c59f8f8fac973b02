"""What a loss is to the engine: a callable over padded rows that says how its sums are normalised."""

from __future__ import annotations

from collections.abc import Mapping
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
    """How a metric that was summed over a microbatch becomes one number for the step."""

    TOKENS = "tokens"
    SEQUENCES = "sequences"
    NONE = "none"


class LossFunction(Protocol):
    """A loss over rows.

    Called as `loss_fn(data, global_valid_seqs, global_valid_toks, next_token_logprobs=...)`; `data` holds
    `token_mask [B, S]` and `sample_mask [B]`, `next_token_logprobs [B, S-1]` has the log-probability of token `t + 1`
    in column `t`. Returns a scalar with a graph and a dict of float metrics.

    With both global counts 1 the loss is a raw sum; the engine then divides once, at the end of the step.
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

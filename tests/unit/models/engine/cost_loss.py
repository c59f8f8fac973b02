"""A loss with stated costs in place of log-probabilities, so that a case's numbers can be checked to the last digit."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from nemo_rl.algorithms.loss.interfaces import LossInputType, LossType, MetricNormalizer, trained_token_mask
from nemo_rl.models.engine.engine import Engine


class CostLoss:
    """Each trained token of a row costs `w * cost[row]`; no weight but `w` has a gradient.

    `w` is the first weight of the model's last norm, which is 1 in a fresh model.
    """

    loss_type = LossType.TOKEN_LEVEL
    input_type = LossInputType.LOGPROB
    metric_normalizations: Mapping[str, MetricNormalizer] = MappingProxyType(
        {
            "loss": MetricNormalizer.TOKENS,
            "cost_per_row": MetricNormalizer.SEQUENCES,
            "rows": MetricNormalizer.NONE,
            "cheapest": MetricNormalizer.MIN,
            "dearest": MetricNormalizer.MAX,
            "temperature": MetricNormalizer.LAST,
        }
    )

    def __init__(self, module: nn.Module):
        self._norm: Any = module.get_submodule("model.norm")

    def __call__(
        self,
        data: Mapping[str, Any],
        global_valid_seqs: Tensor | float,
        global_valid_toks: Tensor | float,
        *,
        next_token_logprobs: Tensor,
    ) -> tuple[Tensor, dict[str, float]]:
        costs = trained_token_mask(data) * data["cost"][:, None]
        loss = self._norm.weight[0] * costs.sum() / global_valid_toks + 0.0 * next_token_logprobs.sum()
        real = data["cost"][data["sample_mask"] > 0]
        return loss, {
            "loss": loss.item(),
            "cost_per_row": costs.sum().item(),
            "rows": float(len(real)),
            "cheapest": real.min().item(),
            "dearest": real.max().item(),
            "temperature": 0.7,
        }


def rows_with_costs(tokens: list[int], costs: list[float]) -> dict[str, Tensor]:
    """A row of `tokens[i]` trained tokens, each with a cost of `costs[i]`; it has one token more, which comes first."""
    lengths = torch.tensor(tokens) + 1
    columns = torch.arange(int(lengths.max()))[None]
    inside = columns < lengths[:, None]
    return {
        "input_ids": (columns + 1) * inside,
        "input_lengths": lengths,
        "token_mask": (inside & (columns > 0)).float(),
        "sample_mask": torch.ones(len(tokens)),
        "cost": torch.tensor(costs),
    }


def cost_weight(engine: Engine) -> float:
    """`w`. On all ranks of a sharded model together."""
    weight: Any = engine.model.module.get_submodule("model.norm").weight
    return float((weight.full_tensor() if isinstance(weight, DTensor) else weight)[0])

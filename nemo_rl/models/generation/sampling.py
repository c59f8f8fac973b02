"""Drawing tokens: one number per sample and position, hashed from the sample's seed, through the inverse of the CDF.

Nothing here depends on which other samples stand in the batch, so a sample's draws are its own.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_A = np.uint64(0xBF58476D1CE4E5B9)
_MIX_B = np.uint64(0x94D049BB133111EB)
_UNIFORM_BITS = 23


@dataclass(frozen=True)
class SamplingRows:
    """How each row of a batch is drawn, arrays `[B]`.

    Attributes:
        temperature: 0 takes the likeliest token.
        top_k: a number as large as the vocabulary keeps all.
        seeds: uint64.
        positions: index of the token to be drawn in its sample, prompt included.
    """

    temperature: NDArray[np.float32]
    top_p: NDArray[np.float32]
    top_k: NDArray[np.int64]
    seeds: NDArray[np.uint64]
    positions: NDArray[np.int64]


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finalizer of SplitMix64 (Steele, Lea and Flood, 2014)."""
    x = (x ^ (x >> np.uint64(30))) * _MIX_A
    x = (x ^ (x >> np.uint64(27))) * _MIX_B
    return x ^ (x >> np.uint64(31))


def uniform(seeds: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float32]:
    """One number in [0, 1) per (seed, position), float32 `[B]`.

    A multiple of 2^-23, so that times a float32 total it stays below that total.
    """
    with np.errstate(over="ignore"):
        state = _mix(seeds + _GOLDEN) + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN
        bits = _mix(state) >> np.uint64(64 - _UNIFORM_BITS)
    return bits.astype(np.float32) * np.float32(2.0**-_UNIFORM_BITS)


def draw_tokens(logits: Tensor, rows: SamplingRows) -> tuple[Tensor, Tensor]:
    """A token for each row of `logits [B, V]`, and its log-probability.

    Returns:
        Tokens int64 `[B]`, and float32 `[B]`: log-probability at the row's temperature (at 1 where it is 0) before
        `top_k` and `top_p` cut, nats; NaN where the logits hold one, or no token is possible.
    """
    device = logits.device
    greedy = rows.temperature == 0
    scaled = logits.float()
    divisors = np.where(greedy, np.float32(1), rows.temperature)
    if (divisors != 1).any():
        scaled = scaled / torch.from_numpy(divisors).to(device)[:, None]
    peak, likeliest = scaled.max(-1)
    weights = (scaled - peak[:, None]).exp_()
    cumulative = weights.cumsum(-1)
    total = cumulative[:, -1]
    if greedy.all():
        tokens = likeliest
    else:
        numbers = torch.from_numpy(uniform(rows.seeds, rows.positions)).to(device)
        tokens = _pick(cumulative, numbers)
        cut = np.flatnonzero(((rows.top_p < 1) | (rows.top_k < logits.size(1))) & ~greedy)
        if len(cut):
            index = torch.from_numpy(cut).to(device)
            top_p, top_k = (torch.from_numpy(x[cut]).to(device) for x in (rows.top_p, rows.top_k))
            tokens[index] = _draw_from_cut(weights[index], top_k, top_p, numbers[index])
        if greedy.any():
            tokens = torch.where(torch.from_numpy(greedy).to(device), likeliest, tokens)
    logprobs = scaled.gather(1, tokens[:, None]).squeeze(1) - peak - total.log()
    return tokens, logprobs


def _pick(cumulative: Tensor, numbers: Tensor) -> Tensor:
    """The first entry of each row of `cumulative [B, V]` above `numbers` times its last one."""
    thresholds = (numbers * cumulative[:, -1])[:, None]
    return torch.searchsorted(cumulative, thresholds, right=True).squeeze(1).clamp_(max=cumulative.size(1) - 1)


def _draw_from_cut(weights: Tensor, top_k: Tensor, top_p: Tensor, numbers: Tensor) -> Tensor:
    """Tokens `[B]` drawn among the `top_k` heaviest, then among the fewest of those that reach `top_p` of their sum."""
    heavy, order = torch.sort(weights, dim=-1, descending=True, stable=True)
    ranks = torch.arange(weights.size(1), device=weights.device)
    heavy = heavy.masked_fill_(ranks >= top_k[:, None], 0)
    reached = heavy.cumsum(-1)
    heavy = heavy.masked_fill_(reached - heavy >= top_p[:, None] * reached[:, -1:], 0)
    return order.gather(1, _pick(heavy.cumsum(-1), numbers)[:, None]).squeeze(1)

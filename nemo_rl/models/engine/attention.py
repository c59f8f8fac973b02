"""Causal attention inside each document of a pack, as a transformers attention function.

A pack lays documents end to end in one sequence `[1, T]`. Documents of equal length that stand side by side form a
group and run as one batch, so nothing is computed across a border and nothing is padded.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from nemo_rl.models.engine.precision import compiles_per_shape
from nemo_rl.utils.phases import phase

ATTENTION_NAME = "per_document"

# In bfloat16 the backward of torch's fused CPU kernel takes several times that of the plain formula on short documents,
# and wins on long ones; in float32 it loses by a few tokens only. `python benchmarks/attention.py` shows where they
# cross.
_EXPLICIT_UP_TO = {torch.bfloat16: 256, torch.float32: 32}

# What the lengths of documents are rounded up to there, where every new shape costs a kernel.
_LENGTH_MULTIPLE = 32


class DocumentGroup(NamedTuple):
    """`count` documents of equal length that fill positions `start` to `end` of a pack."""

    start: int
    end: int
    count: int

    @property
    def length(self) -> int:
        """Tokens of each document."""
        return (self.end - self.start) // self.count


@dataclass(eq=False)
class Documents:
    """Where the documents of a pack lie.

    An object and no tuple: compiled code that hands a tuple on is bound to what is in it.

    Attributes:
        groups: in order, from position 0 on, without gaps.
    """

    groups: tuple[DocumentGroup, ...]


def _visible(length: int, window: int | None, device: torch.device) -> Tensor:
    """Bool `[length, length]`: True where position i may see j: `j <= i`, and `i - window < j` with a window."""
    i = torch.arange(length, device=device)
    distance = i[:, None] - i[None, :]
    return (distance >= 0) if window is None else (distance >= 0) & (distance < window)


def _explicit_attention(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None, softcap: float | None, dropout: float
) -> Tensor:
    """Attention as its formula says, with the score matrix in memory. q `[n, H, L, D]`, k and v `[n, KV, L, D]`.

    With `softcap`, scores are `softcap * tanh(scores / softcap)` before the mask, as Gemma has it.
    """
    n, heads, length, width = q.shape
    kv_heads = k.size(1)
    grouped = (q * scale).reshape(n, kv_heads, -1, width)  # the query heads of one key head, one below the other
    scores = (grouped @ k.transpose(-1, -2)).view(n, heads, length, length)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    hidden = torch.zeros(length, length, dtype=scores.dtype, device=q.device)
    hidden.masked_fill_(~_visible(length, window, q.device), float("-inf"))
    weights = torch.softmax(scores + hidden, -1, dtype=torch.float32).to(v.dtype)
    if dropout:
        weights = F.dropout(weights, dropout)
    return (weights.view(n, kv_heads, -1, length) @ v).view(n, heads, length, width)


@torch.compiler.disable
def per_document_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    documents: Documents | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """query `[1, H, T, D]`, key and value `[1, KV, T, D]` to `[1, T, H, D]`; no token sees another document.

    Positions behind the last document come out as 0.

    Raises:
        ValueError: the model did not pass the pack's `documents` on, or uses attention sinks.
    """
    if documents is None:
        raise ValueError(f"{type(module).__name__} does not pass `documents` to its attention: it can't be packed")
    if kwargs.get("s_aux") is not None:
        raise ValueError(f"{type(module).__name__} uses attention sinks: it can't be packed yet")
    with phase("forward attention"):
        groups = documents.groups
        sizes = [group.end - group.start for group in groups]
        sizes.append(query.size(2) - groups[-1].end)
        # One split and not a slice per group: the gradient of a slice is a whole tensor of zeros around it.
        parts = zip(groups, *(x[0].split(sizes, dim=1)[:-1] for x in (query, key, value)), strict=True)
        outputs = [
            _group_attention(
                *part,
                group=group,
                scale=query.size(-1) ** -0.5 if scaling is None else scaling,
                dropout=dropout,
                window=sliding_window,
                softcap=softcap,
            )
            for group, *part in parts
        ]
        outputs.append(outputs[0].new_zeros(sizes[-1], *outputs[0].shape[1:]))
        return torch.cat(outputs)[None], None


def _group_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    group: DocumentGroup,
    scale: float,
    dropout: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """Attention in documents of equal length: query `[H, n L, D]`, key and value `[KV, n L, D]` to `[n L, H, D]`."""
    length, heads, kv_heads = group.length, query.size(0), key.size(0)

    def documents(x: Tensor) -> Tensor:
        return x.reshape(x.size(0), group.count, length, -1).transpose(0, 1)

    q, k, v = documents(query), documents(key), documents(value)
    window = window if window is not None and length > window else None
    per_shape = compiles_per_shape(query.device, query.dtype)
    short = query.device.type == "cpu" and length <= _EXPLICIT_UP_TO.get(query.dtype, 0)
    if short or softcap is not None:
        multiple = _LENGTH_MULTIPLE if per_shape else 1
        # Positions behind a document's end are seen by no position of it.
        q, k, v = (F.pad(x, (0, 0, 0, -length % multiple)) for x in (q, k, v))
        out = _explicit_attention(q, k, v, scale=scale, window=window, softcap=softcap, dropout=dropout)
        out = out[:, :, :length]
    else:
        out = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=None if window is None else _visible(length, window, query.device),
            dropout_p=dropout,
            is_causal=window is None,
            scale=scale,
            enable_gqa=heads != kv_heads,
        )
    return out.transpose(1, 2).reshape(group.count * length, heads, -1)


def register_attention() -> None:
    """Makes `attn_implementation="per_document"` known to transformers; it builds no mask for it."""
    AttentionInterface.register(ATTENTION_NAME, per_document_attention)
    AttentionMaskInterface.register(ATTENTION_NAME, lambda *args, **kwargs: None)

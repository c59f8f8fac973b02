"""Keys and values of a fixed number of slots, and attention of one pass over them, for any transformers model.

A pass is one sequence `[1, T]`: first a token for each decoding slot, then whole documents that fill the cache of new
slots. Keys and values go to their place in the slot's cache; a decoded token attends to its slot up to itself, a
document's tokens to their document.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from nemo_rl.models.engine.attention import DocumentGroup, Documents, per_document_attention

ATTENTION_NAME = "slots"

# On a CPU documents up to this length are faster in float32, whatever the model computes in.
_FLOAT32_UP_TO = 32


@dataclass
class _LayerCache:
    """Keys and values `[slots + 1, KV, room, D]`; the last slot takes what nobody reads."""

    keys: Tensor
    values: Tensor


class SlotCache:
    """Keys and values of all layers, made as layers first run; position p of a slot is token p of its sample.

    On a CPU they are float32: small matmuls in bfloat16 are slower there, and compile a kernel for each shape.

    Args:
        num_slots: samples it holds.
        room: most tokens of a sample; `grow` raises it.
    """

    def __init__(self, num_slots: int, room: int):
        self.num_slots = num_slots
        self.room = room
        self._layers: dict[int, _LayerCache] = {}

    @property
    def num_layers(self) -> int:
        """Layers that have run."""
        return len(self._layers)

    def layer(self, index: int, key: Tensor, value: Tensor) -> _LayerCache:
        """The cache of a layer whose keys and values look like these `[1, KV, T, D]`."""
        cache = self._layers.get(index)
        if cache is None:
            dtype = torch.float32 if key.device.type == "cpu" else key.dtype
            # Zeros: what is masked is multiplied by zero, and must be finite for that.
            keys, values = (
                x.new_zeros(self.num_slots + 1, x.size(1), self.room, x.size(3), dtype=dtype) for x in (key, value)
            )
            cache = self._layers[index] = _LayerCache(keys, values)
        return cache

    def grow(self, room: int) -> None:
        """Makes place for samples of `room` tokens; keeps what is there."""
        for cache in self._layers.values():
            cache.keys = F.pad(cache.keys, (0, 0, 0, room - self.room))
            cache.values = F.pad(cache.values, (0, 0, 0, room - self.room))
        self.room = room

    def copy(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        """Gives slots `targets` the first `length` positions of slots `sources`."""
        for cache in self._layers.values():
            for tensor in (cache.keys, cache.values):
                tensor[list(targets), :, :length] = tensor[list(sources), :, :length]

    def clear(self, slots: Sequence[int] | None = None) -> None:
        """Zeros in some slots, or in all."""
        for cache in self._layers.values():
            for tensor in (cache.keys, cache.values):
                if slots is None:
                    tensor.zero_()
                else:
                    tensor[list(slots)] = 0


class SlotBlock(NamedTuple):
    """Slots `start` to `end`, whose contexts have at most `length` tokens."""

    start: int
    end: int
    length: int


@dataclass
class SlotPass:
    """One forward pass over slots.

    Attributes:
        cache: what it reads and fills.
        slots: of each token, int64 `[T]`.
        positions: of each token in its slot, int64 `[T]`.
        blocks: the slots that decode, from slot 0 on; the first tokens of the pass are one of each of these slots.
        documents: groups of equal length among the remaining tokens, counted from their first.
    """

    cache: SlotCache
    slots: Tensor
    positions: Tensor
    blocks: tuple[SlotBlock, ...]
    documents: tuple[DocumentGroup, ...]
    _rows: dict[int, Tensor] = field(default_factory=dict)
    _masks: dict[tuple[int | None, torch.dtype], list[Tensor]] = field(default_factory=dict)

    @property
    def num_decoding(self) -> int:
        """Tokens of the pass that are decoded."""
        return self.blocks[-1].end if self.blocks else 0

    def write(self, cache: _LayerCache, key: Tensor, value: Tensor) -> None:
        """Puts the keys and values `[1, KV, T, D]` of the pass in their places."""
        for kept, fresh in ((cache.keys, key), (cache.values, value)):
            rows = fresh[0].transpose(0, 1).to(kept.dtype).reshape(-1, kept.size(3))
            kept.view(-1, kept.size(3)).index_copy_(0, self._rows_of(fresh.size(1)), rows)

    def _rows_of(self, kv_heads: int) -> Tensor:
        """Where `[T * KV, D]` goes in the cache seen as `[slots * KV * room, D]`."""
        found = self._rows.get(kv_heads)
        if found is None:
            heads = torch.arange(kv_heads, device=self.slots.device)
            at_head = self.slots[:, None] * kv_heads + heads
            found = self._rows[kv_heads] = (at_head * self.cache.room + self.positions[:, None]).flatten()
        return found

    def masks(self, window: int | None, kv_heads: int, dtype: torch.dtype) -> list[Tensor]:
        """For each block `[slots * KV, 1, L]`: 0 where a decoded token may look, -inf elsewhere."""
        found = self._masks.get((window, dtype))
        if found is None:
            found = []
            for start, end, length in self.blocks:
                distance = self.positions[start:end, None] - torch.arange(length, device=self.positions.device)
                hidden = distance < 0
                if window is not None:
                    hidden |= distance >= window
                mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, float("-inf"))
                found.append(mask.repeat_interleave(kv_heads, 0)[:, None])
            self._masks[(window, dtype)] = found
        return found


def slot_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    slot_pass: SlotPass | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """query `[1, H, T, D]`, key and value `[1, KV, T, D]` to `[1, T, H, D]`; keys and values are kept in the cache.

    Raises:
        ValueError: the model did not pass `slot_pass` on, or uses attention sinks.
    """
    name = type(module).__name__
    if slot_pass is None:
        raise ValueError(f"{name} does not pass `slot_pass` to its attention")
    if kwargs.get("s_aux") is not None:
        raise ValueError(f"{name} uses attention sinks")
    layer_index = module.layer_idx
    if not isinstance(layer_index, int):
        raise ValueError(f"{name} does not know its layer")
    cache = slot_pass.cache.layer(layer_index, key, value)
    slot_pass.write(cache, key, value)
    count = slot_pass.num_decoding
    parts = []
    if count:
        parts.append(_decode(query[0, :, :count], cache, slot_pass, scaling, sliding_window, softcap))
    if slot_pass.documents:
        q, k, v = (x[:, :, count:] for x in (query, key, value))
        longest = max(group.length for group in slot_pass.documents)
        if softcap is None and (sliding_window is None or longest <= sliding_window):
            parts.append(_prefill(q, k, v, slot_pass.documents, scaling))
        else:
            out, _ = per_document_attention(
                module, q, k, v, None, scaling, 0.0, sliding_window, softcap, documents=Documents(slot_pass.documents)
            )
            parts.append(out[0])
    return (parts[0] if len(parts) == 1 else torch.cat(parts))[None], None


def _prefill(
    query: Tensor, key: Tensor, value: Tensor, documents: tuple[DocumentGroup, ...], scaling: float | None
) -> Tensor:
    """query `[1, H, T, D]`, key and value `[1, KV, T, D]` to `[T, H, D]`; positions behind the documents are 0.

    The trainer's attention is made for a backward pass; without one the fused kernel is faster at every length.
    """
    tiny = query.device.type == "cpu" and documents[-1].length <= _FLOAT32_UP_TO
    dtype = torch.float32 if tiny else query.dtype
    heads = query.size(1)
    outputs = []
    for start, end, count in documents:
        q, k, v = (
            x[0, :, start:end].reshape(x.size(1), count, (end - start) // count, -1).transpose(0, 1).to(dtype)
            for x in (query, key, value)
        )
        grouped = heads != key.size(1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=grouped)
        outputs.append(out.transpose(1, 2).reshape(end - start, heads, -1))
    outputs.append(outputs[0].new_zeros(query.size(2) - documents[-1].end, *outputs[0].shape[1:]))
    return torch.cat(outputs).to(query.dtype)


def _decode(
    query: Tensor,
    cache: _LayerCache,
    slot_pass: SlotPass,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """query `[H, B, D]` of one token per slot to `[B, H, D]`."""
    heads, count, width = query.shape
    kv_heads, dtype = cache.keys.size(1), cache.keys.dtype
    scale = width**-0.5 if scaling is None else scaling
    # The query heads of one key head see the same keys, so they stand where a query's positions would.
    grouped = query.transpose(0, 1).to(dtype).reshape(count * kv_heads, heads // kv_heads, width)
    parts = []
    for block, mask in zip(slot_pass.blocks, slot_pass.masks(window, kv_heads, dtype), strict=True):
        at = slice(block.start * kv_heads, block.end * kv_heads)
        keys = cache.keys.flatten(0, 1)[at, : block.length].transpose(1, 2)
        values = cache.values.flatten(0, 1)[at, : block.length]
        if softcap is None:
            scores = torch.baddbmm(mask, grouped[at], keys, alpha=scale)
        else:
            scores = softcap * torch.tanh(torch.bmm(grouped[at], keys) * (scale / softcap)) + mask
        weights = torch.softmax(scores, -1, dtype=torch.float32)
        parts.append(torch.bmm(weights.to(dtype), values))
    out = parts[0] if len(parts) == 1 else torch.cat(parts)
    return out.to(query.dtype).reshape(count, heads, -1)


def register_slot_attention() -> None:
    """Makes `attn_implementation="slots"` known to transformers; it builds no mask for it."""
    AttentionInterface.register(ATTENTION_NAME, slot_attention)
    AttentionMaskInterface.register(ATTENTION_NAME, lambda *args, **kwargs: None)

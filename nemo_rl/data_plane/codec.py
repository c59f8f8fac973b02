"""Between padded batches and what a data plane stores: ragged columns without padding, rows of any object.

What goes in comes out: dtype, row order and the content of each row, whether or not the rows happen to have equal
lengths.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict
from torch import Tensor
from torch.nested import nested_tensor_from_jagged

from nemo_rl.data_plane.schema import TOKEN_ALIGNED_FIELDS, Layout
from nemo_rl.distributed.batched_data_dict import BatchedDataDict


def column_names(td: TensorDict) -> list[str]:
    """Names of the columns, in the order they were set."""
    return [str(name) for name in td.keys()]  # noqa: SIM118  a TensorDict iterates over its rows


def to_nested_by_length(padded: Tensor, lengths: Tensor) -> Tensor:
    """`[N, S, ...]`, padded on the right, as a jagged tensor whose row `i` keeps its first `lengths[i]` entries.

    Columns beyond the longest row are dropped, whatever they hold. Lengths on a GPU cost one host sync.

    Raises:
        ValueError: fewer than two dims, `lengths` not `[N]`, or a row longer than `S`.
    """
    if padded.dim() < 2 or lengths.shape != padded.shape[:1]:
        raise ValueError(f"cannot cut {tuple(padded.shape)} by lengths of shape {tuple(lengths.shape)}")
    lengths = lengths.to(padded.device, torch.int64)
    width = padded.shape[1]
    if lengths.numel() and int(lengths.max()) > width:
        raise ValueError(f"row {int(lengths.argmax())} has {int(lengths.max())} tokens in a column of width {width}")
    kept = torch.arange(width, device=padded.device) < lengths[:, None]
    return _jagged(padded[kept], lengths)


def to_padded(jagged: Tensor, pad_value: float = 0, width: int = 0) -> Tensor:
    """A jagged tensor as `[N, S, ...]`, padded on the right; `S` is the longest row, or `width` if that is more."""
    lengths = row_lengths(jagged)
    rows = lengths.numel()
    width = max(width, int(lengths.max()) if rows else 0)
    values = jagged.values()
    padded = values.new_full((rows, width, *values.shape[1:]), pad_value)
    padded[torch.arange(width, device=values.device) < lengths[:, None]] = values
    return padded


def row_lengths(jagged: Tensor) -> Tensor:
    """Entries of each row of a jagged tensor: int64 `[N]`."""
    return cast(Any, jagged).offsets().diff()  # torch declares the methods of jagged tensors nowhere


def nest(rows: Sequence[Tensor]) -> Tensor:
    """Rows `[len, ...]` as one jagged tensor, jagged even when all rows have one length."""
    lengths = torch.tensor([row.shape[0] for row in rows], device=rows[0].device)
    return _jagged(torch.cat(list(rows)), lengths)


def pack_jagged_fields(
    fields: Mapping[str, Any],
    *,
    lengths: Tensor,
    token_aligned_fields: Collection[str] = TOKEN_ALIGNED_FIELDS,
) -> TensorDict:
    """The columns of a batch as a data plane stores them; `lengths` is int64 `[N]`, the tokens of each row.

    Named per-token tensors `[N, S, ...]` become jagged, other tensors stay as they are, object arrays and lists become
    one object per row.

    Raises:
        TypeError: a column of any other type.
        ValueError: a column without `N` rows, or with fewer tokens than a row has.
    """
    columns = {
        name: to_nested_by_length(value, lengths)
        if name in token_aligned_fields and isinstance(value, Tensor) and not value.is_nested and value.dim() > 1
        else value
        for name, value in fields.items()
    }
    return to_tensordict(columns, batch_size=lengths.numel())


def to_tensordict(columns: Mapping[str, Any], *, batch_size: int) -> TensorDict:
    """Columns as they are in a `TensorDict` of `batch_size` rows; lists and object arrays hold one object per row.

    Raises:
        TypeError: a column that is no tensor, list or object array.
        ValueError: no rows at all, or a column with another number of them.
    """
    if batch_size < 1:
        raise ValueError("a batch needs at least one row")
    stored: dict[str, Any] = {}
    for name, value in columns.items():
        if not isinstance(value, Tensor | list) and not (isinstance(value, np.ndarray) and value.dtype == object):
            raise TypeError(f"column {name!r} is a {type(value).__name__}; use a tensor, a list or an object array")
        if isinstance(value, Tensor) and value.dim() == 0:
            raise ValueError(f"column {name!r} is one number; it needs one entry per row")
        if len(value) != batch_size:
            raise ValueError(f"column {name!r} has {len(value)} rows, the batch has {batch_size}")
        if isinstance(value, Tensor):
            stored[name] = value
        else:
            stored[name] = NonTensorStack(*[NonTensorData(item) for item in value])
    return TensorDict(stored, batch_size=[batch_size])


def materialize(
    td: TensorDict,
    layout: Layout = "padded",
    pad_value_dict: Mapping[str, float] | None = None,
    pad_to_seqlen: int = 0,
) -> BatchedDataDict:
    """Columns read from a data plane as a batch.

    Jagged columns become `[N, S, ...]`, padded on the right with their entry of `pad_value_dict`, else 0; rows of
    objects become a list. A padded column that is already wide enough is handed over as it is, without a copy.

    Args:
        layout: "jagged" leaves jagged columns jagged.
        pad_to_seqlen: least width `S` of per-token columns, in tokens.

    Raises:
        TypeError: a column of an unknown type.
    """
    pad_values = pad_value_dict or {}
    batch: dict[str, Any] = {}
    for name in column_names(td):
        value = td.get(name)
        if isinstance(value, NonTensorStack | NonTensorData):
            batch[name] = list(value.tolist())
        elif not isinstance(value, Tensor):
            raise TypeError(f"column {name!r} is a {type(value).__name__}; cannot make a batch of it")
        elif value.is_nested:
            pad_value = pad_values.get(name, 0)
            batch[name] = value if layout == "jagged" else to_padded(value, pad_value, pad_to_seqlen)
        elif layout == "padded" and name in TOKEN_ALIGNED_FIELDS and value.dim() > 1:
            batch[name] = _widen(value, pad_values.get(name, 0), pad_to_seqlen)
        else:
            batch[name] = value
    return BatchedDataDict(batch)


def _widen(padded: Tensor, pad_value: float, width: int) -> Tensor:
    if padded.shape[1] >= width:
        return padded
    wide = padded.new_full((padded.shape[0], width, *padded.shape[2:]), pad_value)
    wide[:, : padded.shape[1]] = padded
    return wide


def _jagged(values: Tensor, lengths: Tensor) -> Tensor:
    offsets = torch.zeros(lengths.numel() + 1, dtype=torch.int64, device=values.device)
    torch.cumsum(lengths, 0, out=offsets[1:])
    return nested_tensor_from_jagged(values, offsets)

"""Columns of a batch as one run of bytes per row, and back.

A queue that keeps tensors as tensors sends every row of every column as a message of its own and decides by the
lengths it happens to see whether a column comes back dense or jagged. As bytes, all columns of a call are one message,
and each row says itself what it is: its payload is followed by a short descriptor, and that by one byte with the
descriptor's length. Long rows are arrays of bytes: the queue sends those as frames of their own, without copying them
into the message and out of it.

| column | descriptor | payload of a row |
|---|---|---|
| dense `[N, 5]` of int64 | `dense:int64:5` | its 40 bytes |
| one bool per row `[N]` | `dense:bool:` | 1 byte |
| jagged, rows `[len, 2]` of bfloat16 | `jagged:bfloat16:2` | `len * 4` bytes |
| objects | `json` | JSON text |
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack
from torch import Tensor
from torch.nested import nested_tensor_from_jagged

_JSON = "json"

# Bytes from which a row is cheaper as a frame than as a part of a message.
_FRAME_BYTES = 32 * 1024

Row: TypeAlias = bytes | np.ndarray
"""Payload and descriptor of a row; an array is of uint8, with one dimension."""


def encode_rows(name: str, column: Any) -> list[Row]:
    """The rows of a column of a `TensorDict`: dense, jagged, or objects that are plain data.

    Plain data is text, numbers, booleans, None, lists of it, and dicts of it with text as keys.

    Raises:
        TypeError: a strided nested tensor, or an object that JSON would change.
        ValueError: jagged rows without bytes, whose length would be lost.
    """
    if isinstance(column, NonTensorStack | NonTensorData):
        return _encode_objects(name, column.tolist())
    if not isinstance(column, Tensor):
        raise TypeError(f"column {name!r} is a {type(column).__name__}; use a tensor or rows of plain data")
    column = column.detach().cpu()
    return _encode_jagged(name, column) if column.is_nested else _encode_dense(column)


def decode_rows(name: str, rows: Sequence[Row]) -> Tensor | NonTensorStack:
    """The column whose rows `encode_rows` made, at least one, in memory of its own.

    Raises:
        ValueError: the rows differ in kind, dtype or shape, because they were written that way.
    """
    views = [_view_of(row) for row in rows]
    footer = _footer_of(views[0])
    if not all(view[-len(footer) :] == footer for view in views):
        kinds = sorted({_footer_of(view)[:-1].decode() for view in views})
        raise ValueError(
            f"column {name!r} was written as {' and as '.join(kinds)}; its rows can't be read together. Rows whose "
            "length differs between writers have to be written jagged"
        )
    cut = len(footer)
    descriptor = footer[:-1].decode()
    if descriptor == _JSON:
        return NonTensorStack(*[NonTensorData(json.loads(bytes(view[:-cut]))) for view in views])
    kind, dtype_name, sizes = descriptor.split(":")
    dtype = getattr(torch, dtype_name)
    shape = [int(size) for size in sizes.split(",") if size]
    buffer = bytearray().join([view[:-cut] for view in views])
    values = torch.frombuffer(buffer, dtype=dtype) if buffer else torch.empty(0, dtype=dtype)
    if kind == "dense":
        return values.view(len(rows), *shape)
    entry = dtype.itemsize * math.prod(shape)
    ends = list(itertools.accumulate((len(row) - cut) // entry for row in rows))
    return nested_tensor_from_jagged(values.view(ends[-1], *shape), torch.tensor([0, *ends]))


def payload_bytes(rows: Sequence[Row]) -> int:
    """Bytes of the rows of one column without their descriptors."""
    return sum(map(len, rows)) - len(rows) * len(_footer_of(_view_of(rows[0]))) if rows else 0


def _encode_dense(column: Tensor) -> list[Row]:
    footer = _footer("dense", column.dtype, column.shape[1:])
    step = column.element_size() * math.prod(column.shape[1:])
    data = _bytes_of(column)
    return [_row(data[i * step : (i + 1) * step], footer) for i in range(column.shape[0])]


def _encode_jagged(name: str, column: Tensor) -> list[Row]:
    nested: Any = column  # torch declares the methods of jagged tensors nowhere
    if column.layout != torch.jagged or nested._ragged_idx != 1:
        raise TypeError(f"column {name!r} is nested but not jagged in its first dim; build it with `codec.nest`")
    if nested._lengths is not None:
        # A view with holes between its rows.
        lengths, values = nested._lengths, torch.cat(nested.unbind())
    else:
        lengths, values = nested.offsets().diff(), nested.values()[nested.offsets()[0] : nested.offsets()[-1]]
    entry = column.element_size() * math.prod(values.shape[1:])
    if entry == 0:
        raise ValueError(f"column {name!r}: jagged rows of shape [len, {tuple(values.shape[1:])}] hold nothing")
    footer = _footer("jagged", column.dtype, values.shape[1:])
    data = _bytes_of(values)
    ends = [0, *itertools.accumulate(length * entry for length in lengths.tolist())]
    return [_row(data[start:end], footer) for start, end in itertools.pairwise(ends)]


def _encode_objects(name: str, rows: list[Any]) -> list[Row]:
    for position, row in enumerate(rows):
        if (kind := _changed_by_json(row)) is not None:
            raise TypeError(
                f"column {name!r}, row {position}: a {kind.__name__} would not come back as it is; use text, numbers, "
                "booleans, None, lists, or dicts with text as keys"
            )
    footer = _close(_JSON)
    return [_row(json.dumps(row).encode(), footer) for row in rows]


def _changed_by_json(value: Any) -> type | None:
    if type(value) is list:
        return next((kind for item in value if (kind := _changed_by_json(item))), None)
    if type(value) is dict:
        return next((kind for item in (*value, *value.values()) if (kind := _changed_by_json(item))), None) or next(
            (type(key) for key in value if type(key) is not str), None
        )
    return None if value is None or type(value) in (str, int, float, bool) else type(value)


def _bytes_of(tensor: Tensor) -> memoryview:
    array: Any = tensor.contiguous().view(-1).view(torch.uint8).numpy()  # typed without the buffer protocol
    return memoryview(array)


def _row(payload: bytes | memoryview, footer: bytes) -> Row:
    row = b"".join((payload, footer))
    return row if len(row) < _FRAME_BYTES else np.frombuffer(row, dtype=np.uint8)


def _footer(kind: str, dtype: torch.dtype, shape: Sequence[int]) -> bytes:
    return _close(f"{kind}:{str(dtype).removeprefix('torch.')}:{','.join(map(str, shape))}")


def _close(descriptor: str) -> bytes:
    return descriptor.encode() + bytes([len(descriptor)])


def _view_of(row: Row) -> memoryview:
    readable: Any = row  # arrays are typed without the buffer protocol
    return memoryview(readable)


def _footer_of(row: memoryview) -> bytes:
    return bytes(row[-1 - row[-1] :])

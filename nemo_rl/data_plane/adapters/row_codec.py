"""Columns of a batch as one `bytes` per row, and back.

A queue that keeps tensors as tensors sends every row of every column as a message of its own and decides by the
lengths it happens to see whether a column comes back dense or jagged. As bytes, all columns of a call are one message,
and each row says itself what it is: its payload is followed by a short descriptor, and that by one byte with the
descriptor's length.

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
from typing import Any

import torch
from tensordict import NonTensorData, NonTensorStack
from torch import Tensor
from torch.nested import nested_tensor_from_jagged

_JSON = "json"


def encode_rows(name: str, column: Any) -> list[bytes]:
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


def decode_rows(name: str, rows: Sequence[bytes]) -> Tensor | NonTensorStack:
    """The column whose rows `encode_rows` made, at least one, in memory of its own.

    Raises:
        ValueError: the rows differ in kind, dtype or shape, because they were written that way.
    """
    footer = _footer_of(rows[0])
    if not all(row.endswith(footer) for row in rows):
        kinds = sorted({_descriptor_of(row) for row in rows})
        raise ValueError(
            f"column {name!r} was written as {' and as '.join(kinds)}; its rows can't be read together. Rows whose "
            "length differs between writers have to be written jagged"
        )
    cut = len(footer)
    descriptor = _descriptor_of(rows[0])
    if descriptor == _JSON:
        return NonTensorStack(*[NonTensorData(json.loads(row[:-cut])) for row in rows])
    kind, dtype_name, sizes = descriptor.split(":")
    dtype = getattr(torch, dtype_name)
    shape = [int(size) for size in sizes.split(",") if size]
    buffer = bytearray().join([memoryview(row)[:-cut] for row in rows])
    values = torch.frombuffer(buffer, dtype=dtype) if buffer else torch.empty(0, dtype=dtype)
    if kind == "dense":
        return values.view(len(rows), *shape)
    entry = dtype.itemsize * math.prod(shape)
    ends = list(itertools.accumulate((len(row) - cut) // entry for row in rows))
    return nested_tensor_from_jagged(values.view(ends[-1], *shape), torch.tensor([0, *ends]))


def payload_bytes(rows: Sequence[bytes]) -> int:
    """Bytes of the rows of one column without their descriptors."""
    return sum(map(len, rows)) - len(rows) * len(_footer_of(rows[0])) if rows else 0


def _encode_dense(column: Tensor) -> list[bytes]:
    footer = _footer("dense", column.dtype, column.shape[1:])
    step = column.element_size() * math.prod(column.shape[1:])
    data = _bytes_of(column)
    return [b"".join((data[i * step : (i + 1) * step], footer)) for i in range(column.shape[0])]


def _encode_jagged(name: str, column: Tensor) -> list[bytes]:
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
    return [b"".join((data[start:end], footer)) for start, end in itertools.pairwise(ends)]


def _encode_objects(name: str, rows: list[Any]) -> list[bytes]:
    for position, row in enumerate(rows):
        if (kind := _changed_by_json(row)) is not None:
            raise TypeError(
                f"column {name!r}, row {position}: a {kind.__name__} would not come back as it is; use text, numbers, "
                "booleans, None, lists, or dicts with text as keys"
            )
    footer = _close(_JSON)
    return [json.dumps(row).encode() + footer for row in rows]


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


def _footer(kind: str, dtype: torch.dtype, shape: Sequence[int]) -> bytes:
    return _close(f"{kind}:{str(dtype).removeprefix('torch.')}:{','.join(map(str, shape))}")


def _close(descriptor: str) -> bytes:
    return descriptor.encode() + bytes([len(descriptor)])


def _footer_of(row: bytes) -> bytes:
    return row[-1 - row[-1] :]


def _descriptor_of(row: bytes) -> str:
    return _footer_of(row)[:-1].decode()

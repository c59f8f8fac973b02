"""Columns as bytes and back, bit for bit, against the tensors they came from. No queue takes part."""

import math
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from nemo_rl.data_plane.adapters.row_codec import decode_rows, encode_rows, payload_bytes
from nemo_rl.data_plane.codec import nest, to_tensordict

BF16_BITS = [0x4049, 0x3A83, 0x4789, 0x7F62, 0x8000, 0x7FC1]  # pi, 0.001, 70144, 3e38, -0.0, a NaN with a payload


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Equal dtype, shape and bytes; NaNs count by their bits."""
    left, right = left.contiguous(), right.contiguous()
    return (left.dtype, left.shape) == (right.dtype, right.shape) and torch.equal(
        left.view(-1).view(torch.uint8), right.view(-1).view(torch.uint8)
    )


def there_and_back(column: Any, order: list[int] | None = None) -> Any:
    rows = encode_rows("x", column)
    return decode_rows("x", rows if order is None else [rows[i] for i in order])


@pytest.mark.parametrize(
    "column",
    [
        torch.tensor([1.5, -0.0, math.nan, math.inf]),
        torch.tensor([2**53 + 1, -(2**63), 0]),
        torch.tensor([True, False, True]),
        torch.tensor(BF16_BITS, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16),
        torch.arange(12).reshape(3, 4)[:, ::2],
        torch.arange(24.0).reshape(2, 3, 4).to(torch.float16),
        torch.zeros(2, 0),
        torch.tensor([1 + 2j, 3 - 4j]),
    ],
    ids=lambda column: f"{str(column.dtype).removeprefix('torch.')}{list(column.shape)}",
)
def test_dense_columns(column: Tensor) -> None:
    back = there_and_back(column)
    assert not back.is_nested
    assert same_bits(back, column)
    reverse = list(range(len(column)))[::-1]
    assert same_bits(there_and_back(column, reverse), column[reverse])
    back.zero_()
    assert payload_bytes(encode_rows("x", column)) == column.nbytes


@pytest.mark.parametrize("lengths", [[3, 3], [3, 5], [3, 0], [0, 0], [1]])
@pytest.mark.parametrize("dtype", [torch.int64, torch.bfloat16, torch.bool])
@pytest.mark.parametrize("entry", [[], [2]])
def test_jagged_columns_stay_jagged(lengths: list[int], dtype: torch.dtype, entry: list[int]) -> None:
    rows = [torch.randn(length, *entry).to(dtype) for length in lengths]
    back = there_and_back(nest(rows))
    assert back.is_nested and back.layout == torch.jagged
    assert all(same_bits(got, row) for got, row in zip(back.unbind(), rows, strict=True))


def test_a_part_of_a_jagged_column() -> None:
    rows = [torch.arange(n) for n in (4, 1, 3)]
    part = TensorDict({"x": nest(rows)}, [3])[1:].get("x")
    assert [row.tolist() for row in there_and_back(part).unbind()] == [[0], [0, 1, 2]]
    narrow = torch.nested.narrow(torch.arange(12).reshape(3, 4), 1, torch.tensor([0, 1, 2]), 2, layout=torch.jagged)
    assert [row.tolist() for row in there_and_back(narrow).unbind()] == [[0, 1], [5, 6], [10, 11]]


def test_objects() -> None:
    objects = ["a\u2028b", "\ud800", None, True, 2**70, 0.1, [1, {"k": [math.inf]}], ""]
    td = to_tensordict({"x": objects}, batch_size=len(objects))
    back = there_and_back(td.get("x")).tolist()
    assert back == objects
    assert [type(item) for item in back] == [type(item) for item in objects]
    for wrong in ((1, 2), {1: "a"}, {"a": {3}}, b"raw", torch.ones(1)):
        td = to_tensordict({"x": ["fine", wrong]}, batch_size=2)
        with pytest.raises(TypeError, match=r"column 'x', row 1: a .* would not come back"):
            encode_rows("x", td.get("x"))


def test_rows_of_different_kinds_are_never_mixed() -> None:
    ints, floats = encode_rows("x", torch.tensor([1])), encode_rows("x", torch.tensor([1.0]))
    with pytest.raises(ValueError, match=r"'x' was written as dense:float32: and as dense:int64:"):
        decode_rows("x", ints + floats)
    wide = encode_rows("x", torch.zeros(1, 3))
    with pytest.raises(ValueError, match="have to be written jagged"):
        decode_rows("x", wide + encode_rows("x", torch.zeros(1, 4)))


def test_refused_columns() -> None:
    with pytest.raises(TypeError, match="nested but not jagged"):
        encode_rows("x", torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.strided))
    with pytest.raises(ValueError, match="hold nothing"):
        encode_rows("x", nest([torch.zeros(3, 0), torch.zeros(2, 0)]))
    with pytest.raises(TypeError, match="'x' is a int"):
        encode_rows("x", 3)
    grown = torch.ones(2, requires_grad=True) * 2
    assert there_and_back(grown).tolist() == [2.0, 2.0]

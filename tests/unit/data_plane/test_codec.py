"""The codec against row-by-row references: what goes in comes out, bit for bit. CPU tensors only."""

import numpy as np
import pytest
import torch
from torch import Tensor

from nemo_rl.data_plane.codec import (
    column_names,
    materialize,
    nest,
    pack_jagged_fields,
    row_lengths,
    to_nested_by_length,
    to_padded,
    to_tensordict,
)


def pad_slowly(rows: list[Tensor], pad_value: float, width: int) -> Tensor:
    padded = torch.full((len(rows), width, *rows[0].shape[1:]), pad_value, dtype=rows[0].dtype)
    for i, row in enumerate(rows):
        for t in range(len(row)):
            padded[i, t] = row[t]
    return padded


@pytest.mark.parametrize("lengths", [[3, 3], [3, 5], [3, 0], [1], [0, 0], [7, 1, 4, 2]])
@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.bfloat16, torch.bool, torch.uint8])
def test_b29_ragged_rows_round_trip(lengths: list[int], dtype: torch.dtype) -> None:
    rows = [(torch.arange(n) + 10 * i).to(dtype) for i, n in enumerate(lengths)]
    width = max(lengths) + 2
    padded = pad_slowly(rows, 1, width)
    jagged = to_nested_by_length(padded, torch.tensor(lengths))
    assert jagged.is_nested
    assert jagged.dtype == dtype
    assert row_lengths(jagged).tolist() == lengths
    for row, stored in zip(rows, jagged.unbind(), strict=True):
        assert torch.equal(row, stored)
    assert torch.equal(to_padded(jagged, 1, width), padded)
    assert torch.equal(to_padded(nest(rows), 1, width), padded)
    assert to_padded(jagged).shape == (len(lengths), max(lengths))


def test_b29_bits_survive() -> None:
    bits = torch.tensor([0x4049, 0x3A83, 0x4789, 0x7F62, 0x8000 - 0x10000, 0x7FC0], dtype=torch.int16)
    values = bits.view(torch.bfloat16)[None].repeat(2, 1)
    lengths = torch.tensor([6, 4])
    back = materialize(pack_jagged_fields({"values": values, "input_lengths": lengths}, lengths=lengths))
    assert torch.equal(back["values"].view(torch.int16)[0], bits)
    assert torch.equal(back["values"].view(torch.int16)[1, :4], bits[:4])
    large = torch.tensor([[2**53 + 1]])
    assert to_padded(to_nested_by_length(large, torch.tensor([1]))).item() == 2**53 + 1


def test_trailing_dims_travel_with_their_token() -> None:
    padded = torch.arange(24.0).reshape(2, 4, 3)
    jagged = to_nested_by_length(padded, torch.tensor([4, 1]))
    expected = padded.clone()
    expected[1, 1:] = -1
    assert torch.equal(to_padded(jagged, -1), expected)


def test_pack_and_materialize_a_whole_batch() -> None:
    lengths = torch.tensor([2, 4, 3])
    ids = torch.arange(15).reshape(3, 5) + 1
    batch = {
        "input_ids": ids,
        "input_lengths": lengths,
        "sample_mask": torch.tensor([1.0, 0.0, 1.0]),
        "total_reward": torch.tensor([0.5, -1.0, 2.0]),
        "text": ["eins", "zwei\u2028zwei", ""],
        "log": np.array([{"n": 1}, [1, 2], None], dtype=object),
    }
    td = pack_jagged_fields(batch, lengths=lengths)
    assert column_names(td) == list(batch)
    back = materialize(td, pad_value_dict={"input_ids": 9}, pad_to_seqlen=6)
    expected = torch.full((3, 6), 9)
    for i, n in enumerate(lengths.tolist()):
        expected[i, :n] = ids[i, :n]
    assert torch.equal(back["input_ids"], expected)
    assert torch.equal(back["sample_mask"], batch["sample_mask"])
    assert torch.equal(back["total_reward"], batch["total_reward"])
    assert back["text"] == batch["text"]
    assert back["log"] == [{"n": 1}, [1, 2], None]
    assert materialize(td, "jagged")["input_ids"].is_nested


def test_padded_columns_are_widened_only_when_too_narrow() -> None:
    ids, other = torch.ones(2, 3, dtype=torch.int64), torch.ones(2, 3)
    td = to_tensordict({"input_ids": ids, "pixels": other}, batch_size=2)
    assert materialize(td)["input_ids"] is ids
    assert materialize(td, pad_to_seqlen=3)["input_ids"] is ids
    wide = materialize(td, pad_value_dict={"input_ids": 7}, pad_to_seqlen=5)
    assert wide["input_ids"].tolist() == [[1, 1, 1, 7, 7]] * 2
    assert wide["pixels"] is other


def test_refusals_name_what_is_wrong() -> None:
    with pytest.raises(ValueError, match=r"\(3,\)"):
        to_nested_by_length(torch.ones(3), torch.ones(3, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"\(2, 4\) by lengths of shape \(3,\)"):
        to_nested_by_length(torch.ones(2, 4), torch.tensor([1, 2, 3]))
    with pytest.raises(ValueError, match="row 1 has 5 tokens in a column of width 4"):
        to_nested_by_length(torch.ones(2, 4), torch.tensor([1, 5]))
    with pytest.raises(TypeError, match="'x' is a dict"):
        to_tensordict({"x": {"a": 1}}, batch_size=1)
    with pytest.raises(TypeError, match="'x' is a ndarray"):
        to_tensordict({"x": np.zeros(2)}, batch_size=2)
    with pytest.raises(ValueError, match="'x' has 3 rows, the batch has 2"):
        to_tensordict({"x": torch.zeros(3)}, batch_size=2)
    with pytest.raises(ValueError, match="'x' is one number"):
        to_tensordict({"x": torch.tensor(1)}, batch_size=1)
    with pytest.raises(ValueError, match="at least one row"):
        to_tensordict({}, batch_size=0)

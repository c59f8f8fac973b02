"""Rows that are longer than the window, and the names of what drops a row."""

import pytest

from nemo_rl.data.tokenize import DropReason, TokenizedConversation, fit_row
from nemo_rl.utils.errors import UserError


def _row(length: int, trained: range) -> TokenizedConversation:
    return TokenizedConversation("", list(range(length)), [int(i in trained) for i in range(length)], ())


def test_fit_row_policies():
    row = _row(10, range(1, 10))
    assert fit_row(row, 10) == [row]
    assert [(p.input_ids, p.token_mask) for p in fit_row(row, 4)] == [([0, 1, 2, 3], [0, 1, 1, 1])]
    assert fit_row(row, 4, "drop") is DropReason.OVERLONG
    with pytest.raises(UserError, match="10 tokens, 4 allowed"):
        fit_row(row, 4, "fail")
    pieces = fit_row(row, 4, "split")
    assert [p.input_ids for p in pieces] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert [p.token_mask for p in pieces] == [[0, 1, 1, 1], [0, 1, 1, 1], [0, 1]]


def test_fit_row_returns_no_piece_without_a_trained_token():
    assert [p.input_ids for p in fit_row(_row(10, range(6, 10)), 4, "split")] == [[4, 5, 6, 7], [8, 9]]
    assert fit_row(_row(9, range(8, 9)), 4, "split") is DropReason.NO_TRAINED_TOKEN
    assert fit_row(_row(0, range(0)), 4) is DropReason.EMPTY


def test_drop_reasons_are_plain_texts():
    assert [str(reason) for reason in DropReason] == [
        "overlong",
        "no_trained_token",
        "empty",
        "bad_line",
        "cook_error",
        "encode_error",
    ]

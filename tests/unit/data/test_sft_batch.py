"""Padded batches: columns worked out by hand, conversations against the tokenizer path, and every refusal.

Not covered: media columns, which this library doesn't read.
"""

import logging
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from unit.data.chat_cases import byte_tokenizer, case_rows, case_tokenizer

from nemo_rl.data.sft_batch import batch_rows, prepare_sft_batch
from nemo_rl.data.tokenize import tokenize_conversation
from nemo_rl.utils.errors import UserError


@dataclass(frozen=True)
class Row:
    input_ids: np.ndarray
    token_mask: np.ndarray
    weight: float = 1.0
    source_id: str = "r"


def row(ids, mask, weight=1.0):
    return Row(np.array(ids, dtype=np.int64), np.array(mask, dtype=np.uint8), weight)


def prepare(batch, *, tokenizer=None, only_unmask_final=False, multiple=1):
    return prepare_sft_batch(
        batch,
        tokenizer=tokenizer or case_tokenizer("c0_plain"),
        only_unmask_final=only_unmask_final,
        make_sequence_length_divisible_by=multiple,
    )


def equal(batch, columns):
    assert set(batch) == set(columns)
    for name, wanted in columns.items():
        if isinstance(wanted, torch.Tensor):
            assert batch[name].dtype == wanted.dtype, name
            assert torch.equal(batch[name], wanted), name
        else:
            assert batch[name] == wanted, name


def test_batch_rows_by_hand():
    batch = batch_rows([row([5, 6, 7], [1, 0, 1]), row([8], [1], weight=0.0)], pad_id=9, multiple=4)
    equal(
        batch,
        {
            "input_ids": torch.tensor([[5, 6, 7, 9], [8, 9, 9, 9]]),
            "input_lengths": torch.tensor([3, 1]),
            "token_mask": torch.tensor([[0.0, 0, 1, 0], [0, 0, 0, 0]]),
            "sample_mask": torch.tensor([1.0, 0.0]),
        },
    )
    assert batch_rows([], pad_id=0)["input_ids"].shape == (0, 0)


def test_b03_padding_is_masked_by_position():
    batch = batch_rows([row([5, 6, 7, 2], [0, 0, 1, 1]), row([1] * 6, [0] * 6)], pad_id=2)
    assert batch["input_ids"][0].tolist() == [5, 6, 7, 2, 2, 2]
    assert batch["input_ids"][0, 1:].tolist() == [6, 7, 2, 2, 2]
    assert batch["token_mask"][0, 1:].tolist() == [0, 1, 1, 0, 0]


def test_conversations_go_through_the_tokenizer_path():
    tokenizer = case_tokenizer("c0_plain")
    logs = [case["messages"] for case in case_rows("b01_three_turns") + case_rows("b06_prompt_fills_window")]
    for final in (False, True):
        rows = [tokenize_conversation(tokenizer, log, only_unmask_final=final) for log in logs]
        batch = prepare(
            {
                "message_log": logs,
                "loss_multiplier": torch.tensor([1.0, 0.5, 1, 1]),
                "source_ids": ["a", "b", "c", "d"],
            },
            tokenizer=tokenizer,
            only_unmask_final=final,
            multiple=8,
        )
        wanted = batch_rows([row(r.input_ids, r.token_mask) for r in rows], pad_id=256, multiple=8)
        wanted["sample_mask"] = torch.tensor([1.0, 0.5, 1, 1])
        equal(batch, {**wanted, "source_ids": ["a", "b", "c", "d"]})
        assert batch["input_ids"].shape[1] == 104


LOG = [
    {"role": "user", "token_ids": torch.tensor([1, 2])},
    {"role": "assistant", "token_ids": torch.tensor([3, 4])},
    {"role": "user", "token_ids": torch.tensor([5])},
    {"role": "assistant", "token_ids": [6, 7]},
]


@pytest.mark.parametrize(("final", "mask"), [(False, [0, 0, 1, 1, 0, 1, 1]), (True, [0, 0, 0, 0, 0, 1, 1])])
def test_turns_with_ids_are_joined(final, mask):
    batch = prepare({"message_log": [LOG], "loss_multiplier": [1.0]}, only_unmask_final=final)
    assert batch["input_ids"].tolist() == [[1, 2, 3, 4, 5, 6, 7]]
    assert batch["token_mask"].tolist() == [mask]


@pytest.mark.parametrize("mode", ["precomputed", ["precomputed"]])
def test_precomputed_masks(mode):
    masks = ([1, 1], [0, 1], torch.tensor([1]), [0, 0])
    log = [{**turn, "token_loss_mask": mask} for turn, mask in zip(LOG, masks, strict=True)]
    batch = {"message_log": [log], "loss_multiplier": torch.ones(1), "loss_mask_mode": mode}
    # Column 0 has nothing to predict it.
    assert prepare(batch)["token_mask"].tolist() == [[0, 1, 0, 1, 1, 0, 0]]
    with pytest.raises(UserError, match=r"row 0: .* so sft\.only_unmask_final must be false"):
        prepare(batch, only_unmask_final=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"token_loss_mask": [1]}, "token_loss_mask of turn 1 has 1 entries for 2 tokens"),
        ({"token_loss_mask": [1, 2]}, "token_loss_mask of turn 1 holds values other than 0 and 1"),
        ({}, "turn 1 has no token_loss_mask"),
    ],
)
def test_bad_precomputed_masks(change, message):
    log = [{**LOG[0], "token_loss_mask": [0, 0]}, {**LOG[1], **change}]
    with pytest.raises(UserError, match=f"message_log row 0: {message}"):
        prepare({"message_log": [log], "loss_multiplier": [1.0], "loss_mask_mode": "precomputed"})


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"message_log": [LOG]}, "message_log but no loss_multiplier"),
        ({"message_log": [LOG], "loss_multiplier": [1.0, 1.0]}, "loss_multiplier has 2 rows, message_log has 1"),
        ({"message_log": [LOG], "loss_multiplier": [1.0], "loss_mask_mode": "all"}, "loss_mask_mode is 'all'"),
        ({"message_log": [[LOG[0], {"role": "user"}]], "loss_multiplier": [1.0]}, "row 0: turn 1 has no token_ids"),
        ({"message_log": [[]], "loss_multiplier": [1.0]}, "row 0: messages is empty"),
        ({"input_ids": torch.zeros(1, 2)}, "neither message_log nor input_lengths, token_mask, sample_mask"),
    ],
)
def test_refusals(batch, message):
    with pytest.raises(UserError, match=message):
        prepare(batch)


def prepared(**changes):
    batch = dict(batch_rows([row([1, 2, 3], [0, 1, 1]), row([4, 5], [0, 1])], pad_id=0))
    return {**batch, **changes}


def test_prepared_columns_pass_unchanged():
    batch = prepared(source_ids=["a", "b"], extra=torch.ones(2, 5))
    equal(prepare(batch), batch)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"token_mask": torch.ones(2, 4)}, r"token_mask has shape \[2, 4\], \[2, 3\] is needed"),
        ({"sample_mask": torch.ones(3)}, r"sample_mask has shape \[3\], \[2\] is needed"),
        ({"input_ids": torch.ones(2)}, r"input_ids has shape \[2\], \[B, S\] is needed"),
        ({"input_lengths": torch.tensor([3, 4])}, r"lengths outside 0..3"),
        ({"extra": torch.ones(3)}, "extra has 3 rows, input_ids has 2"),
        ({"extra": torch.tensor(1.0)}, "extra is a single number"),
        ({"source_ids": ["a"]}, "source_ids has 1 rows"),
    ],
)
def test_prepared_columns_that_do_not_fit(change, message):
    with pytest.raises(UserError, match=message):
        prepare(prepared(**change))


def test_prepared_columns_must_be_tensors():
    with pytest.raises(TypeError, match="sample_mask is list, a tensor is needed"):
        prepare(prepared(sample_mask=[1.0, 1.0]))


def test_active_row_without_a_trained_token_is_left_out(caplog):
    # The only mark of row 1 is in column 0, which is never trained; row 0 of the caller stays as it was.
    batch = prepared(token_mask=torch.tensor([[0.0, 1, 1], [1, 0, 0]]))
    with caplog.at_level(logging.WARNING):
        result = prepare(batch)
    assert result["sample_mask"].tolist() == [1, 0]
    assert batch["sample_mask"].tolist() == [1, 1]
    assert "1 of 2 rows have no trained token" in caplog.text


def test_pad_token_is_needed():
    tokenizer = byte_tokenizer("{{ messages[0].content }}")
    tokenizer.pad_token = None
    with pytest.raises(UserError, match="has no pad token; load it with get_tokenizer"):
        prepare({"message_log": [LOG], "loss_multiplier": [1.0]}, tokenizer=tokenizer)

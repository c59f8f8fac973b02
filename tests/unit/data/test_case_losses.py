"""What the cases say about the loss of a uniform model, from the conversation to the number.

The engine's own step is tested in tests/unit/models/engine; here the logits are all equal and no model takes part.
"""

import math

import pytest
import torch
from unit.data.chat_cases import case_rows, case_tokenizer

from nemo_rl.algorithms.loss.loss_functions import NLLLossFn
from nemo_rl.data.sft_batch import batch_rows, prepare_sft_batch
from nemo_rl.data.tokenize import fit_row, tokenize_conversation
from nemo_rl.distributed.batched_data_dict import BatchedDataDict

VOCABULARY = 266
UNIFORM = 5.583496


def loss_and_gradient(batches: list[BatchedDataDict]) -> tuple[float, float]:
    """The step's loss over microbatches of equal logits, and the norm of its gradient."""
    tokens = sum(float((batch["token_mask"] * batch["sample_mask"][:, None]).sum()) for batch in batches)
    loss, squares = 0.0, 0.0
    for batch in batches:
        logits = torch.zeros(*batch["input_ids"].shape, VOCABULARY, requires_grad=True)
        targets = batch["input_ids"][:, 1:, None]
        logprobs = logits.log_softmax(-1)[:, :-1].gather(-1, targets).squeeze(-1)
        part, metrics = NLLLossFn()(batch, 1.0, tokens, next_token_logprobs=logprobs)
        part.backward()
        assert logits.grad is not None
        loss += metrics["loss"]
        squares += float(logits.grad.square().sum())
    return loss, math.sqrt(squares)


@pytest.mark.parametrize("template", ["c0_plain", "c0_marked"])
def test_b01_uniform_loss_either_way(template: str):
    (case,) = case_rows("b01_three_turns")
    batch = prepare_sft_batch(
        {"message_log": [case["messages"]], "loss_multiplier": [1.0]},
        tokenizer=case_tokenizer(template),
        only_unmask_final=False,
        make_sequence_length_divisible_by=8,
    )
    assert batch["token_mask"].sum() == 13
    loss, norm = loss_and_gradient([batch])
    assert loss == pytest.approx(UNIFORM, abs=1e-6)
    assert math.isfinite(norm)


def test_b06_uniform_loss_of_what_is_left():
    """Microbatches of one row; the dropped row leaves a filler, which adds nothing and divides by nothing."""
    tokenizer = case_tokenizer("c0_plain")
    batches = []
    for case in case_rows("b06_prompt_fills_window"):
        fitted = fit_row(tokenize_conversation(tokenizer, case["messages"]), 40)
        pieces = fitted if isinstance(fitted, list) else []
        rows = [Row(piece.input_ids, piece.token_mask, 1.0) for piece in pieces] or [Row([0, 0], [0, 0], 0.0)]
        batches.append(batch_rows(rows, pad_id=256))
    assert [float(batch["token_mask"].sum()) for batch in batches] == [3, 0, 4]
    loss, norm = loss_and_gradient(batches)
    assert loss == pytest.approx(UNIFORM, abs=1e-6)
    assert 0 < norm < math.inf
    assert loss_and_gradient(batches[1:2]) == (0.0, 0.0)


@pytest.mark.parametrize("pad_id", [2, 256])
def test_b03_loss_counts_the_genuine_end_token(pad_id: int):
    """Masking padding by value would lose the end token, position 3, when its id is the pad's."""
    batch = batch_rows([Row([5, 6, 7, 2], [0, 0, 1, 1], 1.0), Row([1] * 6, [0] * 6, 0.0)], pad_id=pad_id)
    assert (batch["token_mask"] * batch["sample_mask"][:, None]).sum() == 2
    loss, _ = loss_and_gradient([batch])
    assert loss == pytest.approx(UNIFORM, abs=1e-6)


class Row:
    """The least that `batch_rows` asks for."""

    def __init__(self, input_ids: list[int], token_mask: list[int], weight: float):
        self.input_ids, self.token_mask, self.weight, self.source_id = input_ids, token_mask, weight, ""

"""Losses against sums written out by hand."""

import math

import pytest
import torch

from nemo_rl.algorithms.loss.interfaces import masked_mean
from nemo_rl.algorithms.loss.loss_functions import NLLLossFn

LOGPROBS = torch.tensor([[-1.0, -2.0, -4.0], [-3.0, -5.0, -7.0]])
DATA = {
    "token_mask": torch.tensor([[1.0, 1.0, 0.0, 1.0], [0.0, 1.0, 1.0, 1.0]]),
    "sample_mask": torch.tensor([1.0, 0.0]),
}


def test_nll_is_the_sum_over_trained_tokens_divided_by_the_global_count() -> None:
    loss, metrics = NLLLossFn()(DATA, 1.0, 4.0, next_token_logprobs=LOGPROBS)
    # Column 0 of the mask is no prediction; the second row weighs nothing; -2 is not trained.
    assert loss.item() == pytest.approx((1.0 + 4.0) / 4.0)
    assert metrics == {"loss": pytest.approx(1.25), "num_unmasked_tokens": 2.0, "num_valid_samples": 1.0}


def test_uniform_model_costs_ln_v_per_token() -> None:
    logprobs = torch.full((2, 3), -math.log(266))
    loss, _ = NLLLossFn()(DATA, 1.0, 2.0, next_token_logprobs=logprobs)
    assert loss.item() == pytest.approx(5.583496, abs=1e-6)


def test_dpo_rows() -> None:
    data = DATA | {"sample_mask": torch.ones(2)}
    rows, _ = NLLLossFn()(data, 1.0, 1.0, next_token_logprobs=LOGPROBS, dpo_loss=True)
    assert rows.tolist() == [5.0, 15.0]
    means, _ = NLLLossFn()(data, 1.0, 1.0, next_token_logprobs=LOGPROBS, dpo_loss=True, dpo_average_log_probs=True)
    assert means.tolist() == [2.5, 5.0]


@pytest.mark.parametrize("hole", [math.nan, math.inf])
def test_masked_values_take_no_part_in_value_or_gradient(hole: float) -> None:
    values = torch.tensor([1.0, hole, 3.0], requires_grad=True)
    mean = masked_mean(values, torch.tensor([1.0, 0.0, 1.0]))
    mean.backward()
    assert mean.item() == pytest.approx(2.0)
    assert values.grad is not None and values.grad.tolist() == pytest.approx([0.5, 0.0, 0.5])


def test_an_empty_mask_gives_zero() -> None:
    assert masked_mean(torch.ones(3), torch.zeros(3)).item() == 0.0

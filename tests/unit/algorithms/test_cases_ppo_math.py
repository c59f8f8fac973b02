"""Cases B-21 to B-25 and B-27 with their values, and their relatives.

Not covered here: which token ids end a response, and prompts end to end (B-21), old and new values out of a real
critic (B-26).
"""

import math

import pytest
import torch
from torch import Tensor

from nemo_rl.algorithms.advantage_estimator import GeneralizedAdvantageEstimator, build_advantage_estimator
from nemo_rl.algorithms.advantages import gae, token_rewards, whiten
from nemo_rl.algorithms.loss.loss_functions import MseValueLossFn, calculate_kl

# -- B-21: the final reward, and empty responses -----------------------------------------------------------------------

B21_MASK = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [0, 0, 0, 0, 0], [1, 1, 0, 0, 0]]).float()
B21_SCORES = torch.tensor([2.0, 1.0, 10.0, -1.0])


def test_b21_the_reward_stands_on_the_last_trained_token() -> None:
    rewards = token_rewards(B21_SCORES, B21_MASK)
    expected = torch.zeros(4, 5, dtype=torch.float64)
    expected[0, 2], expected[1, 4], expected[3, 1] = 2.0, 1.0, -1.0
    assert torch.equal(rewards, expected)
    assert rewards.sum() == 2.0
    assert B21_MASK.sum() / 4 == 2.5


@pytest.mark.parametrize("score", [10.0, math.nan, math.inf])
def test_b21_an_empty_response_gets_nothing_and_gives_nothing(score: float) -> None:
    scores = B21_SCORES.clone()
    scores[2] = score
    assert token_rewards(scores, B21_MASK).sum() == 2.0
    prompt_ids = torch.zeros(4, 1, dtype=torch.long)
    for config in ({"name": "gae"}, {"name": "raw_reward"}, {"name": "grpo"}):
        estimator = build_advantage_estimator(config, {})
        advantages, _ = estimator.compute_advantage(prompt_ids, scores, B21_MASK, torch.zeros(4, 5))
        without, _ = estimator.compute_advantage(
            prompt_ids[[0, 1, 3]], scores[[0, 1, 3]], B21_MASK[[0, 1, 3]], torch.zeros(3, 5)
        )
        assert advantages.isfinite().all() and not advantages[2].any()
        torch.testing.assert_close(advantages[[0, 1, 3]], without)


def test_b21_behind_a_tool_message_the_reward_waits_for_the_last_trained_token() -> None:
    mask = torch.tensor([[0, 1, 0, 0, 1, 0]])
    assert token_rewards(torch.tensor([[3.0]]), mask).tolist() == [[0, 0, 0, 0, 3.0, 0]]


# -- B-22 and B-23: padding and gaps -----------------------------------------------------------------------------------


@pytest.mark.parametrize("leak", [50.0, math.nan, math.inf, -math.inf])
def test_b22_a_padded_value_is_never_the_next_value(leak: float) -> None:
    values, mask = torch.tensor([[0.2, 0.4, leak]]), torch.tensor([[1.0, 1.0, 0.0]])
    advantages = gae(torch.tensor([[0.0, 1.0, leak]]), values, mask, 1.0, 0.5)
    torch.testing.assert_close(advantages, torch.tensor([[0.5, 0.6, 0.0]], dtype=torch.float64), rtol=0, atol=1e-6)
    estimator = GeneralizedAdvantageEstimator({"gae_lambda": 0.5, "normalize_advantages": False}, {})
    advantages, returns = estimator.compute_advantage(None, torch.tensor([1.0]), mask, values)
    torch.testing.assert_close(advantages, torch.tensor([[0.5, 0.6, 0.0]]))
    torch.testing.assert_close(returns, torch.tensor([[0.7, 1.0, 0.0]]))


@pytest.mark.parametrize("tool", [9.0, math.nan, math.inf])
def test_b23_tool_text_is_no_step(tool: float) -> None:
    values = torch.tensor([[0.1, 0.2, tool, tool, 0.5]])
    mask = torch.tensor([[1.0, 1.0, 0.0, 0.0, 1.0]])
    estimator = GeneralizedAdvantageEstimator({"gae_gamma": 0.9, "gae_lambda": 0.8, "normalize_advantages": False}, {})
    advantages, returns = estimator.compute_advantage(None, torch.tensor([1.0]), mask, values)
    torch.testing.assert_close(advantages, torch.tensor([[0.5192, 0.61, 0.0, 0.0, 0.5]]))
    torch.testing.assert_close(returns, torch.tensor([[0.6192, 0.81, 0.0, 0.0, 1.0]]))


@pytest.mark.parametrize("stale", [0.0, 1e6, math.nan])
def test_b23_masked_returns_do_not_reach_the_critic(stale: float) -> None:
    """Column 0 is a prompt token in front of the case's five."""
    estimates = torch.tensor([[stale, 0.1, 0.2, stale, stale, 0.5]], requires_grad=True)
    returns = torch.tensor([[stale, 0.6192, 0.81, stale, stale, 1.0]])
    data = {
        "token_mask": torch.tensor([[0.0, 1.0, 1.0, 0.0, 0.0, 1.0]]),
        "sample_mask": torch.ones(1),
        "returns": returns,
    }
    loss, _ = MseValueLossFn({})(data, 1.0, 3.0, logits=estimates)
    (gradient,) = torch.autograd.grad(loss, estimates)
    assert loss.item() == pytest.approx(0.5 * (0.5192**2 + 0.61**2 + 0.5**2) / 3, rel=1e-5)
    assert gradient[0].tolist() == pytest.approx([0, -0.5192 / 3, -0.61 / 3, 0, 0, -0.5 / 3], rel=1e-5)


# -- B-24: whitening ---------------------------------------------------------------------------------------------------

B24 = torch.tensor([[1.0, 3.0, 99.0], [5.0, 99.0, 99.0]])
B24_MASK = torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]])


@pytest.mark.parametrize("outside", [99.0, math.nan, math.inf])
def test_b24_population_variance_over_trained_tokens_only(outside: float) -> None:
    white = whiten(B24.where(B24_MASK != 0, outside), B24_MASK)
    torch.testing.assert_close(white, torch.tensor([[-1.224745, 0.0, 0.0], [1.224745, 0.0, 0.0]]), rtol=0, atol=1e-6)


def test_b24_rows_of_two_ranks_are_whitened_together() -> None:
    """Ranks of any width: what whitens is the flat list of all trained tokens."""
    kept = [row[mask != 0] for row, mask in zip(B24, B24_MASK, strict=True)]
    flat = torch.cat(kept)
    assert whiten(flat, torch.ones_like(flat)).tolist() == pytest.approx([-1.224745, 0.0, 1.224745], abs=1e-6)


@pytest.mark.parametrize(
    ("numbers", "limit"),
    [([7.0], 0.0), ([2.0, 2.0, 2.0], 0.0), ([0.1] * 7, 1e-9), ([2.0, 2.0, 2.0000002], 0.01), ([], 0.0)],
)
def test_b24_one_token_equal_tokens_and_rounding_residue_stay_near_zero(numbers: list[float], limit: float) -> None:
    row = torch.tensor([[*numbers, math.nan]])
    mask = torch.tensor([[1.0] * len(numbers) + [0.0]])
    assert whiten(row, mask).abs().max() <= limit


# -- B-25: KL estimators -----------------------------------------------------------------------------------------------


def kl_and_slope(policy: float, reference: float, kl_type: str = "k3") -> tuple[float, float]:
    logprobs = torch.tensor(policy, requires_grad=True)
    kl = calculate_kl(logprobs, torch.tensor(reference), kl_type)
    (slope,) = torch.autograd.grad(kl, logprobs)
    return kl.item(), slope.item()


def test_b25_values_and_gradient() -> None:
    assert kl_and_slope(-1.0, -1.5, "k1")[0] == pytest.approx(0.5)
    assert kl_and_slope(-1.0, -1.5, "k2")[0] == pytest.approx(0.125)
    assert kl_and_slope(-1.0, -1.5) == pytest.approx((0.106531, 0.393469), abs=1e-6)
    assert kl_and_slope(-1.5, -1.0)[0] == pytest.approx(0.148721, abs=1e-6)


@pytest.mark.parametrize("kl_type", ["k1", "k2", "k3"])
@pytest.mark.parametrize(("policy", "reference"), [(-120.0, -1.0), (-1.0, -120.0), (-1e5, -1.0), (-1.0, -math.inf)])
def test_b25_far_apart_the_value_is_clamped_and_the_gradient_zero(
    kl_type: str, policy: float, reference: float
) -> None:
    value, slope = kl_and_slope(policy, reference, kl_type)
    assert value == (-10.0 if kl_type == "k1" and policy < reference else 10.0)
    assert slope == 0.0


def test_b25_as_a_penalty_in_the_reward() -> None:
    logprobs = torch.tensor([[-1.0, -1.0]])
    kl = calculate_kl(logprobs, logprobs - 0.5, "k1")
    assert token_rewards(torch.tensor([1.0]), torch.ones(1, 2), kl, 0.1)[0].tolist() == pytest.approx([-0.05, 0.95])


def test_b25_the_reward_uses_k1_whatever_the_loss_uses() -> None:
    logprobs = torch.tensor([[-1.0, -1.0]])
    estimator = GeneralizedAdvantageEstimator(
        {"gae_lambda": 0.0, "gae_gamma": 0.0, "normalize_advantages": False},
        {"use_kl_in_reward": True, "reference_policy_kl_penalty": 0.1, "reference_policy_kl_type": "k3"},
    )
    advantages, _ = estimator.compute_advantage(
        None,
        torch.tensor([1.0]),
        torch.ones(1, 2),
        torch.zeros(1, 2),
        logprobs_policy=logprobs,
        logprobs_reference=logprobs - 0.5,
    )
    torch.testing.assert_close(advantages, torch.tensor([[-0.05, 0.95]]))


# -- B-27: value clipping ----------------------------------------------------------------------------------------------


def value_rows(numbers: list[float]) -> Tensor:
    """Column 0 is never trained, so the numbers begin at column 1."""
    return torch.tensor([[0.0, *numbers]])


def clipped_loss(
    old: list[float], new: list[float], targets: list[float], scale: float = 1.0
) -> tuple[float, dict[str, float], list[float]]:
    data = {
        "token_mask": torch.ones(1, len(new) + 1),
        "sample_mask": torch.ones(1),
        "values": value_rows(old),
        "returns": value_rows(targets),
    }
    logits = value_rows(new).requires_grad_()
    loss, metrics = MseValueLossFn({"cliprange": 0.2, "scale": scale})(data, 1.0, float(len(new)), logits=logits)
    (gradient,) = torch.autograd.grad(loss, logits)
    return loss.item(), metrics, gradient[0, 1:].tolist()


def test_b27_the_larger_square_counts() -> None:
    loss, _, slope = clipped_loss(old=[5.0], new=[1.0], targets=[10.0])
    assert (loss, slope) == (pytest.approx(40.5), pytest.approx([-9.0]))
    loss, _, slope = clipped_loss(old=[1.0], new=[5.0], targets=[10.0])
    assert (loss, slope) == (pytest.approx(38.72), [0.0])


def test_b27_mean_scale_and_a_counter_that_looks_before_clipping() -> None:
    loss, metrics, _ = clipped_loss([5.0, 1.0], [1.0, 5.0], [10.0, 10.0])
    assert loss == pytest.approx(39.61)
    assert metrics["vf_clipfrac"] == 1.0
    assert clipped_loss([5.0, 1.0], [1.0, 5.0], [10.0, 10.0], scale=0.4)[0] == pytest.approx(15.844)
    assert clipped_loss([5.0, 1.0], [5.1, 5.0], [10.0, 10.0])[1]["vf_clipfrac"] == 0.5

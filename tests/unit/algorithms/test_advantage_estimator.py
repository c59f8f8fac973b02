"""GAE, group-relative and plain advantages against loops over scalars, and whitening.

Not covered here: the stage that reads the columns, and a truncated response's true value behind its last token, which
no critic has seen.
"""

import math
import statistics
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor

from nemo_rl.algorithms.advantage_estimator import (
    GAEConfig,
    GeneralizedAdvantageEstimator,
    GRPOAdvantageConfig,
    GRPOAdvantageEstimator,
    RawRewardAdvantageEstimator,
    build_advantage_estimator,
)
from nemo_rl.algorithms.advantages import adaptive_lambda, last_trained, trained_tokens, whiten
from nemo_rl.utils.errors import UserError

OPTIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "discounted": {"gae_gamma": 0.9, "gae_lambda": 0.8},
    "reward_to_go": {"gae_lambda": 1.0},
    "one_step": {"gae_lambda": 0.0, "gae_gamma": 0.95},
    "two_lambdas": {"gae_lambda_value": 1.0, "gae_lambda_policy": 0.7},
    "lambda_of_returns": {"gae_lambda_value": 0.5},
    "lambda_of_advantages": {"gae_lambda_policy": 0.5},
    "by_length": {"length_adaptive_alpha": 0.5, "gae_lambda_policy": 0.1},
    "bootstrap": {"bootstrap_truncated": True, "gae_gamma": 0.9, "gae_lambda": 0.8},
    "kl": {"gae_gamma": 0.9},
    "kl_k3": {"reward_kl_type": "k3", "gae_lambda": 0.8},
}
KL = {"use_kl_in_reward": True, "reference_policy_kl_penalty": 0.3}


def make_rows(seed: int = 0, rows: int = 6, width: int = 10) -> dict[str, Tensor]:
    """Rows with gaps; row 1 has no trained token, row 2 one."""
    generator = torch.Generator().manual_seed(seed)
    mask = (torch.rand(rows, width, generator=generator) < 0.6).float()
    mask[1], mask[2] = 0.0, 0.0
    mask[2, width // 2], mask[:, 0] = 1.0, 0.0
    mask[0, width - 1] = 1.0
    values = torch.randn(rows, width, generator=generator)
    policy = -torch.rand(rows, width, generator=generator)
    return {
        "rewards": torch.randn(rows, generator=generator),
        "mask": mask,
        "values": values,
        "logprobs_policy": policy,
        "logprobs_reference": policy + 0.3 * torch.randn(rows, width, generator=generator),
        "truncated": torch.rand(rows, generator=generator) < 0.5,
    }


def scalar_gae(
    rewards: list[float], values: list[float], gamma: float, lam: float, final_value: float = 0.0
) -> list[float]:
    """Advantages of one row without gaps: the sum of discounted errors, straight from the definition."""
    nexts = [*values[1:], final_value]
    deltas = [r + gamma * n - v for r, n, v in zip(rewards, nexts, values, strict=True)]
    return [sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, len(deltas))) for t in range(len(deltas))]


def scalar_estimate(config: GAEConfig, kl: bool, rows: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Unwhitened advantages and returns, each row alone with its gaps cut out."""
    advantages, returns = torch.zeros_like(rows["values"]), torch.zeros_like(rows["values"])
    for i in range(len(rows["rewards"])):
        slots = [t for t in range(rows["mask"].size(1)) if rows["mask"][i, t] != 0]
        if not slots:
            continue
        values = [rows["values"][i, t].item() for t in slots]
        rewards = [0.0] * (len(slots) - 1) + [rows["rewards"][i].item()]
        if kl:
            for k, t in enumerate(slots):
                r = (rows["logprobs_reference"] - rows["logprobs_policy"])[i, t].item()
                rewards[k] -= 0.3 * {"k1": -r, "k3": math.exp(r) - 1 - r}[config.reward_kl_type]
        final = values[-1] if config.bootstrap_truncated and rows["truncated"][i] else 0.0
        lambda_value = config.gae_lambda if config.gae_lambda_value is None else config.gae_lambda_value
        lambda_policy = config.gae_lambda if config.gae_lambda_policy is None else config.gae_lambda_policy
        if config.length_adaptive_alpha > 0:
            lambda_policy = max(0.0, 1 - 1 / max(config.length_adaptive_alpha * len(slots), 1.0))
        for_policy = scalar_gae(rewards, values, config.gae_gamma, lambda_policy, final)
        for_value = scalar_gae(rewards, values, config.gae_gamma, lambda_value, final)
        for k, t in enumerate(slots):
            advantages[i, t], returns[i, t] = for_policy[k], for_value[k] + values[k]
    return advantages, returns


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("normalize", [False, True])
def test_gae_is_that_of_the_scalar_loop(option: str, normalize: bool) -> None:
    rows, uses_kl = make_rows(seed=len(option)), option.startswith("kl")
    config = GAEConfig(**OPTIONS[option], normalize_advantages=normalize)
    estimator = GeneralizedAdvantageEstimator(config, KL if uses_kl else {})
    advantages, returns = estimator.compute_advantage(None, **rows)
    expected, expected_returns = scalar_estimate(config, uses_kl, rows)
    if normalize:
        kept = expected[rows["mask"] != 0].double()
        white = (expected - kept.mean()) / kept.std(correction=0)
        expected = white.where(rows["mask"] != 0, 0.0).float()
    assert returns is not None and advantages.dtype == returns.dtype == torch.float32
    torch.testing.assert_close(advantages, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(returns, expected_returns, rtol=1e-5, atol=1e-5)


def test_with_lambda_and_gamma_one_returns_are_the_reward() -> None:
    rows = make_rows()
    estimator = GeneralizedAdvantageEstimator({"gae_lambda": 1.0}, {})
    _, returns = estimator.compute_advantage(None, **rows)
    torch.testing.assert_close(returns, rows["rewards"][:, None] * rows["mask"])


@settings(max_examples=60, deadline=None)
@given(
    option=st.sampled_from(sorted(OPTIONS)),
    seed=st.integers(0, 10_000),
    hole=st.sampled_from([math.nan, math.inf, -math.inf, 1e30]),
)
def test_what_stands_in_masked_slots_never_leaks(option: str, seed: int, hole: float) -> None:
    rows = make_rows(seed)
    estimator = GeneralizedAdvantageEstimator(OPTIONS[option], KL if option.startswith("kl") else {})

    def run(filling: float) -> tuple[Tensor, Tensor | None]:
        columns = ("values", "logprobs_policy", "logprobs_reference")
        filled = rows | {name: rows[name].where(rows["mask"] != 0, filling) for name in columns}
        filled["rewards"] = rows["rewards"].where(rows["mask"].any(1), filling)
        return estimator.compute_advantage(None, **filled)

    for dirty, clean in zip(run(hole), run(0.0), strict=True):
        assert dirty is not None and clean is not None
        assert dirty.isfinite().all() and torch.equal(dirty, clean)
        assert (dirty[rows["mask"] == 0] == 0).all()


@settings(max_examples=40, deadline=None)
@given(option=st.sampled_from(sorted(OPTIONS)), seed=st.integers(0, 10_000), cut=st.integers(1, 5))
def test_a_step_in_chunks_whitened_once_is_the_whole_step(option: str, seed: int, cut: int) -> None:
    rows = make_rows(seed)
    estimator = GeneralizedAdvantageEstimator(OPTIONS[option], KL if option.startswith("kl") else {})
    whole, whole_returns = estimator.compute_advantage(None, **rows)
    chunks = [{name: column[part] for name, column in rows.items()} for part in (slice(cut), slice(cut, None))]
    raw, returns = zip(*(estimator.compute_raw(None, **chunk) for chunk in chunks), strict=True)
    torch.testing.assert_close(whiten(torch.cat(raw), rows["mask"]), whole, rtol=0, atol=1e-6)
    assert whole_returns is not None and torch.equal(torch.cat(returns), whole_returns)


def test_padding_and_row_order_change_nothing() -> None:
    rows = make_rows()
    estimator = GeneralizedAdvantageEstimator({}, {})
    whole, _ = estimator.compute_advantage(None, **rows)
    wider = {key: torch.nn.functional.pad(v, (0, 5)) if v.dim() == 2 else v for key, v in rows.items()}
    order = torch.tensor([3, 1, 5, 0, 4, 2])
    shuffled, _ = estimator.compute_advantage(None, **{key: v[order] for key, v in wider.items()})
    torch.testing.assert_close(shuffled[:, :10], whole[order])


def test_trained_tokens_and_the_last_of_them() -> None:
    mask = trained_tokens(torch.tensor([[1, 1, 0, 1], [1, 0, 0, 0], [0, 1, 1, 0]]), torch.tensor([1.0, 1.0, 0.0]))
    assert mask.tolist() == [[False, True, False, True], [False] * 4, [False] * 4]
    assert last_trained(mask).tolist() == [[False, False, False, True], [False] * 4, [False] * 4]
    lengths = torch.tensor([[0.0] * 4, [1.0, 0, 0, 0], [1.0] * 4])
    assert adaptive_lambda(lengths, 0.5).tolist() == [0.0, 0.0, 0.5]


@settings(max_examples=60, deadline=None)
@given(numbers=st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=30))
def test_whitened_numbers_have_mean_zero_and_a_variance_of_at_most_one(numbers: list[float]) -> None:
    white = whiten(torch.tensor(numbers), torch.ones(len(numbers))).double()
    assert white.isfinite().all()
    assert white.mean().item() == pytest.approx(0.0, abs=1e-5)
    variance = statistics.pvariance(numbers)
    assert white.var(correction=0).item() == pytest.approx(variance / (variance + 1e-8), rel=1e-4, abs=1e-4)


# -- group-relative advantages -----------------------------------------------------------------------------------------


def scalar_group_advantages(rewards: list[float], leave_one_out: bool, divide: bool) -> list[float]:
    if len(rewards) == 1:
        return [0.0]
    out = []
    for i, reward in enumerate(rewards):
        others = rewards[:i] + rewards[i + 1 :] if leave_one_out else rewards
        out.append(reward - statistics.mean(others))
    return [a / (statistics.stdev(rewards) + 1e-6) for a in out] if divide else out


@pytest.mark.parametrize("leave_one_out", [False, True])
@pytest.mark.parametrize("divide", [False, True])
def test_group_advantages_are_those_of_the_scalar_loop(leave_one_out: bool, divide: bool) -> None:
    prompts = {(5, 6, 0): [1.0, 0.0, 0.0, 1.0], (5, 6, 7): [0.5, 2.5], (9, 0, 0): [3.0], (8, 8, 8): [0.1] * 3}
    pairs = [
        (ids, r, a)
        for ids, rs in prompts.items()
        for r, a in zip(rs, scalar_group_advantages(rs, leave_one_out, divide), strict=True)
    ]
    order = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(0)).tolist()
    prompt_ids = torch.tensor([pairs[i][0] for i in order])
    rewards = torch.tensor([pairs[i][1] for i in order])
    mask = torch.tensor([[0.0, 1.0, 0.0, 1.0]]).repeat(len(pairs), 1)
    config = GRPOAdvantageConfig(use_leave_one_out_baseline=leave_one_out, normalize_rewards=divide)
    advantages, returns = GRPOAdvantageEstimator(config, {}).compute_advantage(prompt_ids, rewards, mask)
    expected = torch.tensor([pairs[i][2] for i in order])
    assert returns is None and advantages.dtype == torch.float32
    torch.testing.assert_close(advantages, expected[:, None] * mask, rtol=1e-5, atol=1e-6)


def test_rows_without_a_trained_token_are_no_part_of_their_group() -> None:
    prompt_ids = torch.zeros(3, 2, dtype=torch.long)
    mask = torch.tensor([[0.0, 1.0], [0.0, 1.0], [0.0, 0.0]])
    for left_out in (0.0, 1e9, math.nan):
        advantages, _ = build_advantage_estimator({"name": "grpo"}, {}).compute_advantage(
            prompt_ids, torch.tensor([1.0, 0.0, left_out]), mask
        )
        assert advantages.flatten().tolist() == pytest.approx([0, math.sqrt(2), 0, -math.sqrt(2), 0, 0], rel=1e-5)


# -- the plain reward, and what is refused -----------------------------------------------------------------------------


def test_the_raw_reward_stands_at_each_trained_token() -> None:
    rows = make_rows()
    estimator = build_advantage_estimator(GAEConfig(name="raw_reward", normalize_advantages=False), {})
    advantages, returns = estimator.compute_advantage(None, rows["rewards"], rows["mask"])
    assert isinstance(estimator, RawRewardAdvantageEstimator)
    assert returns is None and not estimator.gives_returns
    assert torch.equal(advantages, rows["rewards"][:, None] * rows["mask"])
    white, _ = build_advantage_estimator({"name": "raw_reward"}, {}).compute_advantage(
        None, rows["rewards"], rows["mask"]
    )
    torch.testing.assert_close(white, whiten(advantages, rows["mask"]))


def test_a_reward_that_is_not_finite_is_refused_by_its_row() -> None:
    rows = make_rows()
    rows["rewards"][3] = math.nan
    with pytest.raises(UserError, match="rewards: row 3 has nan"):
        GeneralizedAdvantageEstimator({}, {}).compute_raw(None, **rows)


@pytest.mark.parametrize("name", ["values", "logprobs_policy", "logprobs_reference", "truncated"])
def test_an_input_that_the_options_need_is_missed_by_name(name: str) -> None:
    estimator = GeneralizedAdvantageEstimator({"bootstrap_truncated": True}, KL)
    with pytest.raises(UserError, match=f"{name}: "):
        estimator.compute_raw(None, **{key: v for key, v in make_rows().items() if key != name})


@pytest.mark.parametrize("name", ["grpo", "raw_reward"])
def test_kl_in_the_reward_needs_token_rewards(name: str) -> None:
    with pytest.raises(UserError, match=r"loss_fn\.use_kl_in_reward: true, but adv_estimator\.name: " + name):
        build_advantage_estimator({"name": name}, KL)
    build_advantage_estimator({"name": name}, KL | {"reference_policy_kl_penalty": 0.0})


def test_another_estimator_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(ValueError, match=r"adv_estimator\.name: 'vtrace' is none of gae, raw_reward, grpo"):
        build_advantage_estimator({"name": "vtrace"}, {})


@pytest.mark.parametrize("wrong", [{"gae_lambda": 1.1}, {"gae_gamma": -0.1}, {"lambda": 0.9}, {"reward_kl_type": "k9"}])
def test_a_wrong_config_is_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=next(iter(wrong))):
        GAEConfig(**wrong)

"""What a step logs: the critic's metrics, those of a training result, and those of the samples, by hand.

Not covered: which metrics the losses report (`test_value_loss.py`, `test_policy_gradient_loss.py`).
"""

import math
import statistics
from typing import Any

import pytest
import torch

from nemo_rl.algorithms.loss.interfaces import MetricNormalizer
from nemo_rl.algorithms.loss.loss_functions import MseValueLossFn
from nemo_rl.algorithms.ppo import _compute_critic_metrics
from nemo_rl.algorithms.single_controller_utils.rollout_metrics import rollout_metrics
from nemo_rl.algorithms.train_metrics import train_metrics
from nemo_rl.data_plane.interfaces import KVBatchMeta


def critic(metrics: dict[str, Any], loss: float = 0.5, grad_norm: float = 2.0) -> dict[str, float]:
    return _compute_critic_metrics({"loss": loss, "grad_norm": torch.tensor(grad_norm), "all_mb_metrics": metrics})


def test_each_metric_is_reduced_by_its_rule() -> None:
    metrics = critic(
        {
            "lr": [0.1, 0.1],
            "wd": [0.01, 0.01],
            "global_valid_seqs": [8.0, 8.0],
            "global_valid_toks": [30.0, 30.0],
            "grad_norm": [1.0, 3.0],
            "values_min": [-1.0, -4.0, 2.0],
            "values_max": [-1.0, 5.0],
            "vf_clipfrac": [0.25, 0.5],
            "num_valid_samples": [3.0, 5.0],
        }
    )
    assert metrics == {
        "critic/lr": 0.1,
        "critic/wd": 0.01,
        "critic/global_valid_seqs": 8.0,
        "critic/global_valid_toks": 30.0,
        "critic/grad_norm": 2.0,  # that of the step
        "critic/values_min": -4.0,
        "critic/values_max": 5.0,
        "critic/vf_clipfrac": 0.75,
        "critic/num_valid_samples": 8.0,
        "critic/loss": 0.5,
    }


def test_a_metric_that_is_no_list_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'vf_clipfrac' is a float"):
        critic({"vf_clipfrac": 0.5})


def test_explained_variance_by_hand() -> None:
    """Returns 1, 2, 3, 6 (variance 3.5) and values 0, 2, 4, 4: residuals 1, 0, -1, 2 with variance 1.25."""
    metrics = critic(
        {
            "residual_sq_mean": [0.25, 1.25],  # two passes, each divided by the four tokens
            "returns_mean": [0.75, 2.25],
            "values_mean": [0.5, 2.0],
            "returns_sq_mean": [1.25, 11.25],
        }
    )
    assert metrics["critic/explained_var"] == pytest.approx(1 - 1.25 / 3.5)


def test_explained_variance_of_perfect_constant_and_absent_critics() -> None:
    perfect = {"residual_sq_mean": [0.0], "returns_mean": [2.0], "values_mean": [2.0], "returns_sq_mean": [5.0]}
    assert critic(perfect)["critic/explained_var"] == 1.0
    # Off by the same amount everywhere: the residual does not vary.
    shifted = {"residual_sq_mean": [9.0], "returns_mean": [2.0], "values_mean": [-1.0], "returns_sq_mean": [5.0]}
    assert critic(shifted)["critic/explained_var"] == 1.0
    # One number for all: as good as the mean.
    mean = {"residual_sq_mean": [1.0], "returns_mean": [2.0], "values_mean": [2.0], "returns_sq_mean": [5.0]}
    assert critic(mean)["critic/explained_var"] == 0.0
    # Equal returns have no variance to explain.
    equal = {"residual_sq_mean": [1.0], "returns_mean": [2.0], "values_mean": [2.0], "returns_sq_mean": [4.0]}
    assert math.isfinite(critic(equal)["critic/explained_var"])
    assert "critic/explained_var" not in critic({"returns_mean": [2.0]})


@pytest.mark.parametrize("seed", range(5))
def test_explained_variance_of_the_loss_over_several_passes(seed: int) -> None:
    """The loss run over four microbatches, its sums divided by all tokens, against the variances of the whole step."""
    generator = torch.Generator().manual_seed(seed)
    returns = torch.randn(8, 9, generator=generator)
    values = 0.7 * returns + 0.3 * torch.randn(8, 9, generator=generator) + 2
    token_mask = (torch.rand(8, 9, generator=generator) < 0.5).float()
    sample_mask = torch.tensor([1.0, 1, 0, 1, 1, 1, 1, 0])
    loss_fn = MseValueLossFn({})
    tokens = float((token_mask[:, 1:] * sample_mask[:, None]).sum())
    passes: dict[str, list[float]] = {}
    for start in range(0, 8, 2):
        part = slice(start, start + 2)
        data = {"token_mask": token_mask[part], "sample_mask": sample_mask[part], "returns": returns[part]}
        _, metrics = loss_fn(data, 1.0, tokens, logits=values[part])
        for name, value in metrics.items():
            passes.setdefault(name, []).append(value)
    kept = [
        (float(returns[row, column]), float(values[row, column]))
        for row in range(8)
        for column in range(1, 9)
        if token_mask[row, column] and sample_mask[row]
    ]
    residual = statistics.pvariance([r - v for r, v in kept])
    expected = 1 - residual / statistics.pvariance([r for r, _ in kept])
    metrics = critic(passes)
    assert metrics["critic/explained_var"] == pytest.approx(expected, abs=1e-6)
    assert metrics["critic/values_min"] == pytest.approx(min(v for _, v in kept))
    assert metrics["critic/values_max"] == pytest.approx(max(v for _, v in kept))
    assert metrics["critic/values_mean"] == pytest.approx(statistics.fmean(v for _, v in kept), abs=1e-6)


def test_a_step_without_trained_tokens_has_metrics_too() -> None:
    data = {"token_mask": torch.zeros(2, 5), "sample_mask": torch.ones(2), "returns": torch.zeros(2, 5)}
    _, metrics = MseValueLossFn({})(data, 1.0, 1.0, logits=torch.full((2, 5), math.nan))
    reduced = critic({name: [value] for name, value in metrics.items()})
    assert (reduced["critic/values_mean"], reduced["critic/values_min"]) == (0.0, math.inf)
    assert math.isfinite(reduced["critic/explained_var"])


def test_the_metrics_of_the_policy_follow_the_rules_of_its_loss() -> None:
    results = {
        "loss": torch.tensor(0.25),
        "grad_norm": 1.5,
        "total_flops": 10.0,
        "num_ranks": 2,
        "moe_metrics": {"load": 0.5},
        "all_mb_metrics": {
            "kl": [0.25, 0.5],
            "ratio_max": [1.5, 1.25],
            "lr": [0.1, 0.1],
            "wd": [0.0, 0.0],
            "global_valid_toks": [7.0, 7.0],
            "worst": [3.0, 1.0],
        },
    }
    rules = {"kl": MetricNormalizer.TOKENS, "worst": MetricNormalizer.MIN}
    assert train_metrics(results, rules) == {
        "loss": 0.25,
        "grad_norm": 1.5,
        "kl": 0.75,
        "ratio_max": 1.5,
        "lr": 0.1,
        "wd": 0.0,
        "global_valid_toks": 7.0,
        "worst": 1.0,
        "moe/load": 0.5,
        "total_flops": 10.0,
        "num_ranks": 2,
    }


def rows(tags: list[dict[str, Any]] | None) -> KVBatchMeta:
    return KVBatchMeta("rollouts", "train", [f"r{i}" for i in range(len(tags or "xx"))], tags=tags)


def test_samples_are_described_by_their_tags() -> None:
    tags = [
        {"response_tokens": 4, "turns": 1, "truncated": False, "weight_version": 5},
        {"response_tokens": 8, "turns": 2, "truncated": True, "weight_version": 3},
        {"response_tokens": 0, "turns": 3, "truncated": False, "weight_version": 5},
        {"response_tokens": 4, "turns": 2, "truncated": False, "weight_version": 4},
    ]
    metrics = rollout_metrics(rows(tags), 5)
    assert metrics.pop("turns_max", 3) == 3
    assert metrics == {
        "response_tokens_mean": 4.0,
        "response_tokens_max": 8.0,
        "turns_mean": 2.0,
        "truncated": 0.25,
        "staleness_mean": 0.75,
        "staleness_max": 2,
    }


@pytest.mark.parametrize("tags", [None, [{}, {}]])
def test_samples_without_tags_have_no_metrics(tags: list[dict[str, Any]] | None) -> None:
    assert rollout_metrics(rows(tags), 5) == {}

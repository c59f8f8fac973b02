"""The clipped policy gradient, option by option, against loops over scalars; its metrics; its independence of splits.

The loops know nothing of masks, broadcasting or autograd: gradients are compared with central differences, where a
stopped gradient is a second copy of the log-probs that does not move. Not covered here: the engine that calls the loss
(tests/parity), and log-probs that are not finite at trained tokens.
"""

import math
import pickle
import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor

from nemo_rl.algorithms.loss.interfaces import LossType, MetricNormalizer, metric_rule, reduce_metric
from nemo_rl.algorithms.loss.kl import calculate_kl
from nemo_rl.algorithms.loss.loss_functions import ClippedPGLossConfig, ClippedPGLossFn
from nemo_rl.utils.errors import UserError

TIS = {"use_importance_sampling_correction": True, "truncated_importance_sampling_ratio": 1.3}
BOUNDED = TIS | {"truncated_importance_sampling_ratio_min": 0.8}
# The mean over a row is nearer to 1 than its tokens are.
SEQ_MASK = {
    "use_importance_sampling_correction": True,
    "truncated_importance_sampling_type": "seq-mask-tis",
    "truncated_importance_sampling_ratio_min": 0.95,
    "truncated_importance_sampling_ratio": 1.05,
}
SEQUENCE = {"token_level_loss": False, "sequence_level_importance_ratios": True}
OPTIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "no_kl": {"reference_policy_kl_penalty": 0.0},
    "asymmetric_clip": {"ratio_clip_min": 0.1, "ratio_clip_max": 0.3},
    "dual_clip": {"ratio_clip_c": 1.2},
    "row_means": {"token_level_loss": False},
    "sequence_ratios": SEQUENCE,
    "no_ratio": {"disable_ppo_ratio": True},
    "on_policy": {"force_on_policy_ratio": True},
    "on_policy_sequence": SEQUENCE | {"force_on_policy_ratio": True},
    "cispo": {"use_cispo": True},
    "k1": {"reference_policy_kl_type": "k1", "reference_policy_kl_penalty": 0.3},
    "k2": {"reference_policy_kl_type": "k2", "reference_policy_kl_penalty": 0.3},
    "k3_clamped": {"kl_input_clamp_value": 0.4, "kl_output_clamp_value": 0.05, "reference_policy_kl_penalty": 0.3},
    "kl_of_the_sampler": {"use_on_policy_kl_approximation": True, "reference_policy_kl_penalty": 0.3},
    "kl_in_reward": {"use_kl_in_reward": True},
    "correction": {"use_importance_sampling_correction": True},
    "correction_on_policy": {"use_importance_sampling_correction": True, "force_on_policy_ratio": True},
    "correction_sequence": SEQUENCE | {"use_importance_sampling_correction": True},
    "tis": TIS | {"truncated_importance_sampling_type": "tis"},
    "tis_min": BOUNDED | {"truncated_importance_sampling_type": "tis"},
    "tis_sequence": SEQUENCE | BOUNDED | {"truncated_importance_sampling_type": "tis"},
    "icepop": BOUNDED | {"truncated_importance_sampling_type": "icepop"},
    "icepop_sequence": SEQUENCE | BOUNDED | {"truncated_importance_sampling_type": "icepop"},
    "seq_mask": SEQ_MASK,
    "seq_mask_rows": SEQ_MASK | {"token_level_loss": False},
    "positive_nll": {"positive_example_nll_weight": 0.5},
    "positive_nll_rows": {"positive_example_nll_weight": 0.5, "token_level_loss": False},
}
COLUMNS = ("advantages", "prev_logprobs", "generation_logprobs", "reference_policy_logprobs")


def make_rows(seed: int = 0, rows: int = 6, width: int = 9) -> dict[str, Tensor]:
    """Rows with gaps, one without a trained token, one without weight; the first column is marked as trained, too."""
    generator = torch.Generator().manual_seed(seed)

    def normal(scale: float) -> Tensor:
        return scale * torch.randn(rows, width, generator=generator, dtype=torch.float64)

    token_mask = (torch.rand(rows, width, generator=generator) < 0.6).double()
    token_mask[1], token_mask[:, 0] = 0.0, 1.0
    sample_mask = torch.ones(rows, dtype=torch.float64)
    sample_mask[2] = 0.0
    prev = -normal(1.0).abs() - 0.3
    return {
        "token_mask": token_mask,
        "sample_mask": sample_mask,
        "advantages": normal(1.0),
        "prev_logprobs": prev,
        "generation_logprobs": prev + normal(0.3),
        "reference_policy_logprobs": prev + normal(0.3),
        "total_reward": torch.tensor([1.0, 1.0, 1.0, -1.0, 0.0, 2.0], dtype=torch.float64)[:rows],
        "logprobs": prev + normal(0.3),
    }


def call(cfg: dict[str, Any], rows: dict[str, Tensor], seqs: float, toks: float) -> tuple[Tensor, dict[str, float]]:
    data = {key: value for key, value in rows.items() if key != "logprobs"}
    return ClippedPGLossFn(ClippedPGLossConfig(**cfg))(data, seqs, toks, next_token_logprobs=rows["logprobs"][:, 1:])


def trained(rows: dict[str, Tensor], row: int) -> list[int]:
    """The trained tokens of a row."""
    weight = rows["token_mask"][row] * rows["sample_mask"][row]
    return [t for t in range(1, len(weight)) if weight[t] != 0]


def counts(rows: dict[str, Tensor]) -> tuple[float, float]:
    """Rows with weight and trained tokens."""
    return float(rows["sample_mask"].sum()), float(sum(len(trained(rows, i)) for i in range(len(rows["sample_mask"]))))


def clip(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


def scalar_kl(cfg: ClippedPGLossConfig, policy: float, reference: float, weight: float, still_weight: float) -> float:
    ratio = reference - policy
    bites = abs(ratio) > (cfg.kl_input_clamp_value or math.inf)
    ratio = clip(ratio, -(cfg.kl_input_clamp_value or math.inf), cfg.kl_input_clamp_value or math.inf)
    kl = {"k1": -ratio, "k2": ratio * ratio / 2, "k3": math.exp(ratio) - 1 - ratio}[cfg.reference_policy_kl_type]
    kl *= still_weight if bites else weight
    return clip(kl, -(cfg.kl_output_clamp_value or math.inf), cfg.kl_output_clamp_value or math.inf)


def row_weights(cfg: ClippedPGLossConfig, log_ratios: list[float]) -> list[float]:
    """The correction's weight of each token of a row."""
    low = cfg.truncated_importance_sampling_ratio_min or 0.0
    high = cfg.truncated_importance_sampling_ratio or math.inf
    weights = [math.exp(r) for r in log_ratios]
    if cfg.sequence_level_importance_ratios:
        weights = [math.exp(sum(log_ratios))] * len(log_ratios)
    match cfg.truncated_importance_sampling_type:
        case "tis":
            return [clip(w, low, high) for w in weights]
        case "icepop":
            return [w if low <= w <= high else 0.0 for w in weights]
        case "seq-mask-tis":
            mean = math.exp(sum(log_ratios) / len(log_ratios))
            return weights if low <= mean <= high else [0.0] * len(weights)
    return weights


def scalar_loss(cfg: ClippedPGLossConfig, rows: dict[str, Tensor], logprobs: Tensor, still: Tensor) -> float:
    """The loss, a token at a time; `still` are the log-probs where a gradient is stopped."""
    token_sum = row_sum = 0.0
    for i in range(len(logprobs)):
        tokens = trained(rows, i)
        if not tokens:
            continue
        lp, frozen = [logprobs[i, t].item() for t in tokens], [still[i, t].item() for t in tokens]
        gains, prevs, gens, refs = ([rows[name][i, t].item() for t in tokens] for name in COLUMNS)
        if cfg.force_on_policy_ratio:
            prevs = frozen
        log_ratios = [a - b for a, b in zip(lp, prevs, strict=True)]
        still_ratios = [a - b for a, b in zip(frozen, prevs, strict=True)]
        if cfg.sequence_level_importance_ratios:
            log_ratios = [sum(log_ratios) / len(tokens)] * len(tokens)
        weights = [1.0] * len(tokens)
        if cfg.use_importance_sampling_correction:
            weights = row_weights(cfg, [a - b for a, b in zip(prevs, gens, strict=True)])
        losses = []
        for k, gain in enumerate(gains):
            low, high = 1 - cfg.ratio_clip_min, 1 + cfg.ratio_clip_max
            ratio = math.exp(log_ratios[k])
            if cfg.disable_ppo_ratio:
                loss = -gain * lp[k]
            elif cfg.use_cispo:
                loss = -gain * clip(math.exp(still_ratios[k]), low, high) * lp[k]
            else:
                loss = max(-gain * ratio, -gain * clip(ratio, low, high))
                if cfg.ratio_clip_c is not None and gain < 0:
                    loss = min(loss, -gain * cfg.ratio_clip_c)
            loss *= weights[k]
            if not cfg.use_kl_in_reward:
                sampler = gens[k] if cfg.use_on_policy_kl_approximation else frozen[k]
                weight, still_weight = math.exp(lp[k] - sampler), math.exp(frozen[k] - sampler)
                loss += cfg.reference_policy_kl_penalty * scalar_kl(cfg, lp[k], refs[k], weight, still_weight)
            if rows["total_reward"][i] > 0:
                loss -= cfg.positive_example_nll_weight * lp[k]
            losses.append(loss)
        token_sum += sum(losses)
        row_sum += sum(losses) / len(tokens)
    num_rows, num_tokens = counts(rows)
    return token_sum / num_tokens if cfg.token_level_loss else row_sum / num_rows


@pytest.mark.parametrize("option", OPTIONS)
def test_loss_and_gradient_are_those_of_the_scalar_loop(option: str) -> None:
    cfg, rows = OPTIONS[option], make_rows(seed=len(option))
    logprobs = rows["logprobs"].requires_grad_()
    loss, metrics = call(cfg, rows, *counts(rows))
    (gradient,) = torch.autograd.grad(loss, logprobs)
    still, model, step = logprobs.detach(), ClippedPGLossConfig(**cfg), 1e-6
    assert loss.item() == pytest.approx(scalar_loss(model, rows, still, still), rel=1e-6)
    assert metrics["loss"] == loss.item()
    expected = torch.zeros_like(still)
    for index in range(still.numel()):
        move = torch.zeros_like(still).flatten()
        move[index] = step
        move = move.view_as(still)
        up, down = (scalar_loss(model, rows, still + sign * move, still) for sign in (1, -1))
        expected.view(-1)[index] = (up - down) / (2 * step)
    torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-7)
    assert gradient.abs().max() > 1e-3


def test_metrics_are_those_of_the_scalar_loop() -> None:
    rows = make_rows(seed=5)
    cfg = BOUNDED | {"truncated_importance_sampling_type": "icepop", "reference_policy_kl_penalty": 0.3}
    _, metrics = call(cfg, rows, *counts(rows))
    sums: dict[str, float] = {}
    ratios, clamped = [], []
    for i in range(6):
        for t in trained(rows, i):
            lp, prev, gen, ref = (
                rows[name][i, t].item()
                for name in ("logprobs", "prev_logprobs", "generation_logprobs", "reference_policy_logprobs")
            )
            p, g = math.exp(prev), math.exp(gen)
            m, w = (p + g) / 2, p / g
            ratios.append(math.exp(lp - prev))
            clamped.append(clip(math.exp(lp - prev), 0.8, 1.2))
            terms = {
                "probs_ratio": ratios[-1],
                "probs_ratio_clamped": clamped[-1],
                "kl_penalty": math.exp(ref - lp) - 1 - (ref - lp),
                "token_mult_prob_error": max(p / g, g / p),
                "gen_kl_error": p / g - 1 - math.log(p / g),
                "policy_kl_error": g / p - 1 - math.log(g / p),
                "js_divergence_error": (m / p - 1 - math.log(m / p) + m / g - 1 - math.log(m / g)) / 2,
                "sampling_importance_ratio": w if 0.8 <= w <= 1.3 else 0.0,
                "is_oob_ratio": 0.0 if 0.8 <= w <= 1.3 else 1.0,
                "approx_entropy": -math.exp(lp - gen) * lp,
            }
            sums = {name: sums.get(name, 0.0) + value for name, value in terms.items()}
    num_rows, num_tokens = counts(rows)
    expected = {name: total / num_tokens for name, total in sums.items()} | {
        "probs_ratio_min": min(ratios),
        "probs_ratio_max": max(ratios),
        "probs_ratio_clamped_min": min(clamped),
        "probs_ratio_clamped_max": max(clamped),
        "num_valid_samples": num_rows,
        "positive_nll_loss": 0.0,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-6)
    assert set(metrics) == {*expected, "loss"}
    assert 0 < metrics["is_oob_ratio"] < 1


@pytest.mark.parametrize("option", ["tis_sequence", "icepop_sequence", "seq_mask"])
def test_what_is_judged_by_rows_is_averaged_over_rows(option: str) -> None:
    rows, cfg = make_rows(seed=3), ClippedPGLossConfig(**OPTIONS[option])
    _, metrics = call(OPTIONS[option], rows, 1.0, 1.0)
    low, high = cfg.truncated_importance_sampling_ratio_min, cfg.truncated_importance_sampling_ratio
    assert low is not None and high is not None
    weights, outside = [], 0.0
    for i in range(6):
        if tokens := trained(rows, i):
            log_ratios = [(rows["prev_logprobs"] - rows["generation_logprobs"])[i, t].item() for t in tokens]
            judged = sum(log_ratios) / (len(tokens) if option == "seq_mask" else 1)
            outside += not low <= math.exp(judged) <= high
            of_row = row_weights(cfg, log_ratios)
            weights += of_row if option == "seq_mask" else of_row[:1]
    assert outside > 0
    assert metrics["is_oob_ratio"] == pytest.approx(outside)
    assert metrics["sampling_importance_ratio"] == pytest.approx(sum(weights), rel=1e-6)
    rules = ClippedPGLossFn(cfg).metric_normalizations
    assert rules["is_oob_ratio"] is MetricNormalizer.SEQUENCES
    assert (rules["sampling_importance_ratio"] is MetricNormalizer.SEQUENCES) == (option != "seq_mask")


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("cuts", [[1, 1, 1, 1, 1, 1], [2, 4], [5, 1]])
def test_raw_sums_of_any_split_add_up_to_the_whole(option: str, cuts: list[int]) -> None:
    """As the engine does it: both counts 1 for each pass, one division at the end."""
    rows, loss_fn = make_rows(seed=11), ClippedPGLossFn(OPTIONS[option])
    num_rows, num_tokens = counts(rows)
    whole, whole_metrics = call(OPTIONS[option], rows, num_rows, num_tokens)
    pieces = zip(*(column.split(cuts) for column in rows.values()), strict=True)
    passes = [call(OPTIONS[option], dict(zip(rows, piece, strict=True)), 1.0, 1.0) for piece in pieces]
    divisor = num_tokens if loss_fn.loss_type is LossType.TOKEN_LEVEL else num_rows
    assert sum(loss.item() for loss, _ in passes) / divisor == pytest.approx(whole.item(), rel=1e-6)
    divisors = {MetricNormalizer.TOKENS: num_tokens, MetricNormalizer.SEQUENCES: num_rows}
    for name, value in whole_metrics.items():
        assert name in loss_fn.metric_normalizations
        rule = metric_rule(name, loss_fn.metric_normalizations, loss_fn.loss_type)
        of_passes = [metrics[name] / divisors.get(rule, 1.0) for _, metrics in passes]
        assert reduce_metric(rule, of_passes) == pytest.approx(value, rel=1e-6), name


@settings(max_examples=80, deadline=None)
@given(
    option=st.sampled_from(sorted(OPTIONS)),
    seed=st.integers(0, 10_000),
    hole=st.sampled_from([math.nan, math.inf, -math.inf, 1e300]),
)
def test_what_stands_in_masked_slots_never_leaks(option: str, seed: int, hole: float) -> None:
    rows = make_rows(seed)
    kept = (rows["token_mask"] * rows["sample_mask"][:, None]) != 0
    kept[:, 0] = False

    def run(filling: float) -> tuple[Tensor, Tensor, dict[str, float]]:
        filled = rows | {name: rows[name].where(kept, filling) for name in (*COLUMNS, "logprobs")}
        logprobs = filled["logprobs"].requires_grad_()
        loss, metrics = call(OPTIONS[option], filled, 1.0, 1.0)
        (gradient,) = torch.autograd.grad(loss, logprobs)
        return loss, gradient, metrics

    loss, gradient, metrics = run(hole)
    clean_loss, clean_gradient, clean_metrics = run(-1.0)
    assert loss.isfinite() and loss == clean_loss and metrics == clean_metrics
    assert torch.equal(gradient, clean_gradient)
    assert (gradient[~kept] == 0).all()


def test_a_batch_without_trained_tokens_is_zero_with_empty_extremes() -> None:
    rows = make_rows()
    rows["sample_mask"] = torch.zeros(6, dtype=torch.float64)
    logprobs = rows["logprobs"].requires_grad_()
    loss, metrics = call({}, rows, 1.0, 1.0)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    assert loss.item() == 0.0 and not gradient.any()
    assert metrics["probs_ratio_min"] == metrics["probs_ratio_clamped_min"] == math.inf
    assert metrics["probs_ratio_max"] == metrics["probs_ratio_clamped_max"] == -math.inf


@pytest.mark.parametrize("gain", [1.0, -1.0])
def test_a_ratio_that_would_overflow_keeps_value_and_gradient_finite(gain: float) -> None:
    """`exp(199)` is inf in float32; clipped away, it would still give a NaN gradient."""
    data = {
        "token_mask": torch.ones(1, 2),
        "sample_mask": torch.ones(1),
        "advantages": torch.full((1, 2), gain),
        "prev_logprobs": torch.full((1, 2), -200.0),
    }
    logprobs = torch.full((1, 1), -1.0, requires_grad=True)
    loss_fn = ClippedPGLossFn({"reference_policy_kl_penalty": 0.0, "ratio_clip_c": 3.0})
    loss, _ = loss_fn(data, 1.0, 1.0, next_token_logprobs=logprobs)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    assert loss.item() == pytest.approx(-1.2 if gain > 0 else 3.0)
    assert gradient.item() == 0.0


def test_a_weight_that_is_not_finite_counts_nothing() -> None:
    data = {
        "token_mask": torch.ones(1, 4),
        "sample_mask": torch.ones(1),
        "advantages": torch.ones(1, 4),
        "prev_logprobs": torch.tensor([[0.0, -1.0, -1.0, -1.0]]),
        "generation_logprobs": torch.tensor([[0.0, -1.0, -math.inf, math.nan]]),
    }
    for kind in (None, "tis", "icepop"):
        cfg = {"use_importance_sampling_correction": True, "reference_policy_kl_penalty": 0.0}
        if kind:
            cfg = BOUNDED | cfg | {"truncated_importance_sampling_type": kind}
        loss, metrics = ClippedPGLossFn(cfg)(data, 1.0, 1.0, next_token_logprobs=torch.full((1, 3), -1.0))
        assert loss.item() == pytest.approx(-1.0)
        assert metrics["sampling_importance_ratio"] == pytest.approx(1.0)


def test_columns_that_a_run_does_not_need_may_be_absent() -> None:
    rows = make_rows()
    basic = {key: rows[key] for key in ("token_mask", "sample_mask", "advantages")}
    logprobs = rows["logprobs"][:, 1:]
    no_kl = {"reference_policy_kl_penalty": 0.0}
    for extra in ({"force_on_policy_ratio": True}, {"disable_ppo_ratio": True}):
        _, metrics = ClippedPGLossFn(no_kl | extra)(basic, 1.0, counts(rows)[1], next_token_logprobs=logprobs)
        assert metrics["probs_ratio"] == pytest.approx(1.0)
        assert "gen_kl_error" not in metrics
    for column, cfg in {
        "prev_logprobs": no_kl,
        "generation_logprobs": no_kl | {"force_on_policy_ratio": True, "use_importance_sampling_correction": True},
        "reference_policy_logprobs": {"force_on_policy_ratio": True},
        "total_reward": no_kl | {"force_on_policy_ratio": True, "positive_example_nll_weight": 1.0},
    }.items():
        assert column in ClippedPGLossFn(cfg).required_columns
        with pytest.raises(UserError, match=f"{column}: .*(loss_fn|get_)"):
            ClippedPGLossFn(cfg)(basic, 1.0, 1.0, next_token_logprobs=logprobs)


@pytest.mark.parametrize(
    ("cfg", "line"),
    [
        ({"sequence_level_importance_ratios": True}, "sequence_level_importance_ratios: true needs token_level_loss"),
        ({"use_cispo": True, "disable_ppo_ratio": True}, "use_cispo: true excludes disable_ppo_ratio"),
        ({"use_cispo": True, "force_on_policy_ratio": True}, "use_cispo: true excludes force_on_policy_ratio"),
        ({"use_cispo": True} | SEQUENCE, "use_cispo: true excludes sequence_level_importance_ratios"),
        ({"use_cispo": True, "ratio_clip_c": 3.0}, "use_cispo: true excludes ratio_clip_c: 3.0"),
        ({"use_cispo": True, "token_level_loss": False}, "use_cispo: true needs token_level_loss"),
        ({"truncated_importance_sampling_type": "tis"}, "needs use_importance_sampling_correction: true"),
        (
            {"use_importance_sampling_correction": True, "truncated_importance_sampling_type": "tis"},
            "needs truncated_importance_sampling_ratio",
        ),
        (TIS | {"truncated_importance_sampling_type": "icepop"}, "needs truncated_importance_sampling_ratio_min"),
        (TIS | {"truncated_importance_sampling_type": "seq-mask-tis"}, "needs truncated_importance_sampling_ratio_min"),
        (
            SEQUENCE | BOUNDED | {"truncated_importance_sampling_type": "seq-mask-tis"},
            "excludes sequence_level_importance_ratios",
        ),
        (
            TIS | {"truncated_importance_sampling_type": "tis", "truncated_importance_sampling_ratio_min": 2.0},
            "truncated_importance_sampling_ratio_min: 2.0 is above",
        ),
        (TIS, "truncated_importance_sampling_ratio: 1.3 has no effect"),
        ({"truncated_importance_sampling_type": "top"}, "truncated_importance_sampling_type"),
        (TIS | {"truncated_importance_sampling_ratio": 0.0}, "truncated_importance_sampling_ratio"),
        ({"ratio_clip_c": 1.0}, "ratio_clip_c"),
        ({"reference_policy_kl_type": "k4"}, "reference_policy_kl_type"),
        ({"reference_policy_kl_penalty": -0.1}, "reference_policy_kl_penalty"),
        ({"ratio_clip": 0.2}, "ratio_clip"),
    ],
)
def test_options_that_exclude_one_another_are_refused_by_name(cfg: dict[str, Any], line: str) -> None:
    with pytest.raises(ValidationError, match=line):
        ClippedPGLossFn(cfg)


def test_the_loss_travels_to_a_worker() -> None:
    loss_fn = pickle.loads(pickle.dumps(ClippedPGLossFn(OPTIONS["sequence_ratios"])))
    assert loss_fn.cfg == ClippedPGLossConfig(**OPTIONS["sequence_ratios"])
    assert loss_fn.loss_type is LossType.SEQUENCE_LEVEL


def test_a_config_of_losses_and_estimators_needs_no_torch() -> None:
    modules = "nemo_rl.algorithms.loss.loss_functions, nemo_rl.algorithms.advantage_config"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("kl_type", ["k1", "k2", "k3"])
def test_kl_estimates_agree_with_the_divergence_on_average(kl_type: str) -> None:
    """Over the exact distribution of a small vocabulary; k2 is biased, by the third order."""
    generator = torch.Generator().manual_seed(0)
    policy = torch.randn(50, generator=generator, dtype=torch.float64).log_softmax(0)
    reference = (policy + 0.05 * torch.randn(50, generator=generator, dtype=torch.float64)).log_softmax(0)
    exact = (policy.exp() * (policy - reference)).sum()
    estimate = (policy.exp() * calculate_kl(policy, reference, kl_type)).sum()
    assert estimate.item() == pytest.approx(exact.item(), rel=0.05 if kl_type == "k2" else 1e-9)


def test_weights_of_the_kl_lose_their_gradient_where_the_input_clamp_bites() -> None:
    logprobs = torch.tensor([-1.0, -30.0], requires_grad=True)
    weights = (logprobs - logprobs.detach()).exp()
    kl = calculate_kl(logprobs, torch.tensor([-1.5, -1.0]), "k2", 20.0, None, weights)
    (gradient,) = torch.autograd.grad(kl.sum(), logprobs)
    assert kl.tolist() == [0.125, 200.0]
    assert gradient.tolist() == [0.125 + 0.5, 0.0]


def test_another_kl_type_is_refused() -> None:
    with pytest.raises(ValueError, match="kl_type: expected k1, k2 or k3, got 'k4'"):
        calculate_kl(torch.zeros(1), torch.zeros(1), "k4")

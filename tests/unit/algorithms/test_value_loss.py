"""The critic's loss against loops over scalars. Not covered here: the head and the shift that make its estimates."""

import math
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor

from nemo_rl.algorithms.loss.interfaces import LossInputType, LossType, MetricNormalizer, metric_rule, reduce_metric
from nemo_rl.algorithms.loss.loss_functions import MseValueLossConfig, MseValueLossFn
from nemo_rl.utils.errors import UserError

CONFIGS = [{}, {"scale": 0.4}, {"cliprange": 0.2}, {"scale": 0.4, "cliprange": 0.5}, {"cliprange": 0.0}]


def make_rows(seed: int = 0, rows: int = 5, width: int = 8) -> dict[str, Tensor]:
    """Rows with gaps, one without a trained token, one without weight; the first column is marked as trained, too."""
    generator = torch.Generator().manual_seed(seed)
    token_mask = (torch.rand(rows, width, generator=generator) < 0.6).float()
    token_mask[1], token_mask[:, 0] = 0.0, 1.0
    sample_mask = torch.ones(rows)
    sample_mask[2] = 0.0
    values = torch.randn(rows, width, generator=generator)
    return {
        "token_mask": token_mask,
        "sample_mask": sample_mask,
        "values": values,
        "returns": torch.randn(rows, width, generator=generator) + 3.0,
        "logits": values + 0.4 * torch.randn(rows, width, generator=generator),
    }


def call(cfg: dict[str, float], rows: dict[str, Tensor], toks: float) -> tuple[Tensor, dict[str, float]]:
    data = {key: value for key, value in rows.items() if key != "logits"}
    return MseValueLossFn(MseValueLossConfig(**cfg))(data, 1.0, toks, logits=rows["logits"])


def trained(rows: dict[str, Tensor]) -> list[tuple[int, int]]:
    weight = rows["token_mask"] * rows["sample_mask"][:, None]
    return [(i, t) for i in range(weight.size(0)) for t in range(1, weight.size(1)) if weight[i, t] != 0]


@pytest.mark.parametrize("cfg", CONFIGS)
def test_loss_gradient_and_metrics_are_those_of_the_scalar_loop(cfg: dict[str, float]) -> None:
    rows = make_rows(3)
    logits = rows["logits"].requires_grad_()
    slots = trained(rows)
    loss, metrics = call(cfg, rows, len(slots))
    (gradient,) = torch.autograd.grad(loss, logits)
    scale, cliprange = cfg.get("scale", 1.0), cfg.get("cliprange", 0.0)
    total = clipped = 0.0
    slopes = torch.zeros_like(gradient)
    for i, t in slots:
        v, old, target = (rows[name][i, t].item() for name in ("logits", "values", "returns"))
        plain = (v - target) ** 2
        near = min(max(v, old - cliprange), old + cliprange) if cliprange else v
        square = max(plain, (near - target) ** 2)
        total += 0.5 * scale * square
        clipped += bool(cliprange) and abs(v - old) > cliprange
        # A clipped estimate that decides the maximum does not move.
        slopes[i, t] = scale * (v - target) if square == plain or near == v else 0.0
    numbers = {name: [rows[name][i, t].item() for i, t in slots] for name in ("logits", "returns")}
    assert loss.item() == pytest.approx(total / len(slots), rel=1e-5)
    torch.testing.assert_close(gradient, slopes / len(slots))
    assert metrics == pytest.approx(
        {
            "loss": loss.item(),
            "vf_clipfrac": clipped / len(slots),
            "values_mean": sum(numbers["logits"]) / len(slots),
            "returns_mean": sum(numbers["returns"]) / len(slots),
            "returns_sq_mean": sum(r * r for r in numbers["returns"]) / len(slots),
            "residual_sq_mean": sum((v - r) ** 2 for v, r in zip(*numbers.values(), strict=True)) / len(slots),
            "values_min": min(numbers["logits"]),
            "values_max": max(numbers["logits"]),
            "num_valid_samples": 4.0,
        },
        rel=1e-5,
    )


def test_a_trailing_axis_of_one_is_squeezed() -> None:
    rows = make_rows()
    flat, _ = call({}, rows, 4.0)
    loss, _ = call({}, rows | {"logits": rows["logits"][..., None]}, 4.0)
    assert loss == flat


@pytest.mark.parametrize("cfg", CONFIGS)
@pytest.mark.parametrize("cuts", [[1] * 5, [2, 3], [4, 1]])
def test_raw_sums_of_any_split_add_up_to_the_whole(cfg: dict[str, float], cuts: list[int]) -> None:
    rows = make_rows(1)
    count = len(trained(rows))
    whole, whole_metrics = call(cfg, rows, count)
    pieces = zip(*(column.split(cuts) for column in rows.values()), strict=True)
    passes = [call(cfg, dict(zip(rows, piece, strict=True)), 1.0) for piece in pieces]
    assert sum(loss.item() for loss, _ in passes) / count == pytest.approx(whole.item(), rel=1e-5)
    stated = MseValueLossFn.metric_normalizations
    assert set(whole_metrics) == set(stated)
    for name, value in whole_metrics.items():
        rule = metric_rule(name, stated)
        divisor = count if rule is MetricNormalizer.TOKENS else 1.0
        assert reduce_metric(rule, [m[name] / divisor for _, m in passes]) == pytest.approx(value, rel=1e-5), name


@settings(max_examples=60, deadline=None)
@given(
    cfg=st.sampled_from(CONFIGS),
    seed=st.integers(0, 10_000),
    hole=st.sampled_from([math.nan, math.inf, -math.inf, 1e38]),
)
def test_what_stands_in_masked_slots_never_leaks(cfg: dict[str, float], seed: int, hole: float) -> None:
    rows = make_rows(seed)
    kept = torch.zeros(rows["logits"].shape, dtype=torch.bool)
    for slot in trained(rows):
        kept[slot] = True

    def run(filling: float) -> tuple[Tensor, Tensor, dict[str, float]]:
        filled = rows | {name: rows[name].where(kept, filling) for name in ("values", "returns", "logits")}
        logits = filled["logits"].requires_grad_()
        loss, metrics = call(cfg, filled, 1.0)
        (gradient,) = torch.autograd.grad(loss, logits)
        return loss, gradient, metrics

    loss, gradient, metrics = run(hole)
    clean_loss, clean_gradient, clean_metrics = run(0.0)
    assert loss.isfinite() and loss == clean_loss and metrics == clean_metrics
    assert torch.equal(gradient, clean_gradient) and (gradient[~kept] == 0).all()


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000), cliprange=st.floats(0.01, 2.0))
def test_clipping_never_lowers_the_loss(seed: int, cliprange: float) -> None:
    rows = make_rows(seed)
    plain, _ = call({}, rows, 1.0)
    clipped, _ = call({"cliprange": cliprange}, rows, 1.0)
    assert clipped >= plain
    unmoved = rows | {"logits": rows["values"]}
    assert call({"cliprange": cliprange}, unmoved, 1.0)[0] == call({}, unmoved, 1.0)[0]


def test_extremes_of_an_empty_set_reduce_away() -> None:
    rows = make_rows()
    empty = rows | {"sample_mask": torch.zeros(5)}
    loss, metrics = call({"cliprange": 0.2}, empty, 1.0)
    assert loss == 0.0 and metrics["vf_clipfrac"] == 0.0
    assert (metrics["values_min"], metrics["values_max"]) == (math.inf, -math.inf)
    _, other = call({"cliprange": 0.2}, rows, 1.0)
    assert reduce_metric(MetricNormalizer.MIN, [metrics["values_min"], other["values_min"]]) == other["values_min"]
    assert reduce_metric(MetricNormalizer.MAX, [other["values_max"], metrics["values_max"]]) == other["values_max"]


def test_old_values_are_needed_only_for_clipping() -> None:
    rows = make_rows()
    del rows["values"]
    call({}, rows, 1.0)
    with pytest.raises(UserError, match="values: "):
        call({"cliprange": 0.2}, rows, 1.0)
    assert "values" not in MseValueLossFn({"cliprange": 0.0}).required_columns


@pytest.mark.parametrize("cfg", [{"scale": 0.0}, {"cliprange": -0.1}, {"clip_range": 0.2}])
def test_a_wrong_config_is_refused_by_name(cfg: dict[str, float]) -> None:
    with pytest.raises(ValidationError, match=next(iter(cfg))):
        MseValueLossFn(cfg)


def test_what_the_engine_asks_of_it() -> None:
    loss_fn = pickle.loads(pickle.dumps(MseValueLossFn({"scale": 0.4})))
    assert loss_fn.cfg.scale == 0.4
    assert (loss_fn.loss_type, loss_fn.input_type) == (LossType.TOKEN_LEVEL, LossInputType.LOGIT)

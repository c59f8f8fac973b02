"""Model config to engine config: budgets, optimizers, and learning rates against Megatron's rule written out."""

import math
from typing import Any

import pytest
import torch

from nemo_rl.models.config import PolicyConfig
from nemo_rl.models.engine.optimizer import build_optimizer, build_schedule
from nemo_rl.utils.errors import UserError

BASE = {"model_name": "m", "train_global_batch_size": 8, "max_total_sequence_length": 100}


def policy(**settings: Any) -> PolicyConfig:
    return PolicyConfig.model_validate(BASE | settings)


def rates(config: PolicyConfig, steps: int) -> list[float]:
    """The rate that each of the first `steps` steps uses."""
    model = torch.nn.Linear(1, 1)
    optimizer = build_optimizer(config.optimizer_spec(), list(model.parameters()), fused=False)
    schedule = build_schedule(config.schedule_spec(), optimizer)
    out = []
    for _ in range(steps):
        out.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return out


def megatron(**scheduler: Any) -> PolicyConfig:
    optimizer = {"optimizer": "adam", "lr": 1e-3, "min_lr": 1e-4}
    return policy(megatron_cfg={"enabled": True, "optimizer": optimizer, "scheduler": scheduler})


@pytest.mark.parametrize("style", ["constant", "linear", "cosine"])
def test_megatron_schedule(style: str) -> None:
    config = megatron(lr_decay_style=style, lr_decay_iters=20, lr_warmup_iters=4, lr_warmup_init=2e-4)
    expected = []
    for step in range(30):
        if step < 4:
            expected.append(2e-4 + (1e-3 - 2e-4) * step / 4)
            continue
        done = min(1.0, (step - 4) / 16)
        share = {"constant": 1.0, "linear": 1 - done, "cosine": 0.5 * (1 + math.cos(math.pi * done))}[style]
        expected.append(1e-4 + (1e-3 - 1e-4) * share)
    assert rates(config, 30) == pytest.approx(expected, rel=1e-6)


def test_a_decay_without_an_end_takes_the_length_of_the_run() -> None:
    config = megatron(lr_decay_style="linear")
    with pytest.raises(UserError, match="lr_decay_iters"):
        config.schedule_spec()
    assert config.megatron_cfg is not None
    config.megatron_cfg.train_iters = 10
    assert rates(config, 11)[-1] == pytest.approx(1e-4)


def test_b19_rate_of_each_step() -> None:
    scheduler = [
        {"name": "torch.optim.lr_scheduler.LinearLR", "kwargs": {"start_factor": 0.1, "total_iters": 9}},
        {"name": "LinearLR", "kwargs": {"start_factor": 1.0, "end_factor": 0.0, "total_iters": 20}},
        {"milestones": [9]},
    ]
    config = policy(optimizer={"name": "torch.optim.SGD", "kwargs": {"lr": "1e-3"}}, scheduler=scheduler)
    by_step = dict(enumerate(rates(config, 30), start=1))
    assert by_step[1] == pytest.approx(1e-4)
    assert by_step[10] == pytest.approx(1e-3)
    assert by_step[12] == pytest.approx(9.0e-4)
    assert by_step[13] == pytest.approx(8.5e-4)


@pytest.mark.parametrize(
    ("settings", "tokens"),
    [
        ({}, 100),
        ({"train_micro_batch_size": 4}, 400),
        ({"train_mb_tokens": 77, "sequence_packing": {"enabled": True, "train_mb_tokens": 300}}, 77),
        ({"sequence_packing": {"enabled": True, "train_mb_tokens": 300}}, 300),
        ({"sequence_packing": {"enabled": False, "train_mb_tokens": 300}}, 100),
        ({"dynamic_batching": {"enabled": True, "train_mb_tokens": 200}}, 200),
    ],
)
def test_token_budget(settings: dict[str, Any], tokens: int) -> None:
    assert policy(**settings).microbatch_tokens() == tokens


@pytest.mark.parametrize(
    ("settings", "tokens"),
    [
        ({}, 100),
        ({"train_mb_tokens": 77}, 77),
        ({"train_mb_tokens": 77, "logprob_batch_size": 3}, 300),
        ({"sequence_packing": {"enabled": True, "train_mb_tokens": 300}}, 300),
        ({"sequence_packing": {"enabled": True, "logprob_mb_tokens": 900}, "logprob_batch_size": 3}, 900),
        ({"sequence_packing": {"enabled": False, "logprob_mb_tokens": 900}, "train_micro_batch_size": 2}, 200),
    ],
)
def test_token_budget_without_gradients(settings: dict[str, Any], tokens: int) -> None:
    assert policy(**settings).microbatch_tokens(training=False) == tokens


def test_no_optimizer_is_named() -> None:
    with pytest.raises(UserError, match=r"policy\.optimizer is missing"):
        policy().optimizer_spec()


def test_sgd_of_megatron() -> None:
    optimizer = {"optimizer": "sgd", "lr": 0.1, "sgd_momentum": 0.5, "weight_decay": 0.0, "clip_grad": 0.25}
    config = policy(megatron_cfg={"enabled": True, "optimizer": optimizer})
    assert config.optimizer_spec().name == "torch.optim.SGD"
    assert config.optimizer_spec().kwargs == {"lr": 0.1, "momentum": 0.5, "weight_decay": 0.0}
    assert config.engine_config(seed=1).max_grad_norm == 0.25

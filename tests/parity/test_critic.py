"""The critic's engine against a plain PyTorch critic with a random head: one rank, two gloo ranks, replicated and
sharded, any token budget, the step whole and in chunks with inference between them.

Not covered here: the calls from the controller (tests/functional/test_tq_models.py), GPUs, replicas of many ranks.
"""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from plain_critic import CLIP, SCALE, PlainCritic, make_critic_dir, make_value_rows
from tiny import select_rows
from torch import Tensor
from torch.distributed.tensor import DTensor

from nemo_rl.algorithms.loss.loss_functions import MseValueLossFn, NLLLossFn
from nemo_rl.models.engine.checkpoint import EngineCheckpointer
from nemo_rl.models.engine.config import EngineConfig, OptimizerSpec, ParallelSizes
from nemo_rl.models.engine.engine import Engine
from nemo_rl.models.engine.mesh import build_mesh

STEPS, ROWS = 3, 13
ADAMW = {"lr": 1e-3, "weight_decay": 0.1}
LOSS = {"scale": SCALE, "cliprange": CLIP}
LAYOUTS = [(1, "budget 16"), (1, "budget 100000"), (1, "rounded shapes"), (2, "replicate"), (2, "shard")]


def step_rows(step: int) -> dict[str, Tensor]:
    return make_value_rows(ROWS, seed=step)


def make_engine(model: Path, mesh: Any, **changes: Any) -> Engine:
    settings = {
        "model_name": str(model),
        "head": "value",
        "optimizer": OptimizerSpec(name="torch.optim.AdamW", kwargs=ADAMW),
        "precision": "float32",
        "microbatch_tokens": 100,
    }
    return Engine(EngineConfig(**(settings | changes)), mesh)


def full_weights(engine: Engine) -> dict[str, Tensor]:
    """Every weight whole."""
    masters = engine.model.masters.items()
    whole = {name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in masters}
    return {name: value.detach().clone() for name, value in whole.items()}


def train(engine: Engine, rank: int, world: int, steps: range, chunks: int = 1) -> list[dict[str, Any]]:
    """Steps over the rows dealt to the ranks. With chunks, values are asked for before each; rank 1 lacks the last."""
    out = []
    for step in steps:
        rows, mine = step_rows(step), list(range(rank, ROWS, world))
        values = engine.values(rows)
        engine.begin_step(MseValueLossFn(LOSS))
        for chunk in range(chunks):
            part = mine[chunk::chunks]
            if chunks > 1:
                engine.values(select_rows(rows, part))
                if rank == 1:
                    part = [] if chunk == chunks - 1 else part + (mine[chunks - 1 :: chunks] if chunk == 0 else [])
            engine.microbatch(select_rows(rows, part))
        result = engine.finish_step()
        out.append({"values": values, "loss": result.loss, "grad_norm": result.grad_norm})
    return out


def one_sided(model: Path, mesh: Any, mode: str, rank: int) -> dict[str, Tensor]:
    """What one rank computes while the other has no row; the policy has moved away from its reference."""
    rows = step_rows(0)
    share = rows if rank == 0 else select_rows(rows, [])
    sgd = OptimizerSpec(name="SGD", kwargs={"lr": 0.5})
    policy = make_engine(model, mesh, data_parallel=mode, head="lm", reference=True, optimizer=sgd)
    start = policy.log_probs(share)
    policy.begin_step(NLLLossFn())
    policy.microbatch(share)
    policy.finish_step()
    return {
        "values": make_engine(model, mesh, data_parallel=mode).values(share, 64),
        "start": start,
        "reference": policy.log_probs(share, 64, reference=True),
        "now": policy.log_probs(share, 64),
    }


def run_rank(rank: int, world: int, model: Path, work: Path) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(work / f"store{world}"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    mesh = build_mesh(ParallelSizes(), torch.device("cpu"))
    results: dict[str, Any] = {}

    def record(name: str, engine: Engine, **options: Any) -> Engine:
        steps = train(engine, rank, world, range(STEPS), **options)
        results[name] = {"steps": steps, "weights": full_weights(engine)}
        return engine

    if world == 2:
        for mode in ("replicate", "shard"):
            engine = record(mode, make_engine(model, mesh, data_parallel=mode))
            record(f"{mode} in chunks", make_engine(model, mesh, data_parallel=mode), chunks=4)
            checkpointer = EngineCheckpointer(engine)
            checkpointer.save(work / mode / "weights", work / mode / "optimizer")
            checkpointer.wait()
            results[f"{mode} continued"] = train(engine, rank, world, range(STEPS, STEPS + 2))
            results[f"{mode} one-sided"] = one_sided(model, mesh, mode, rank)
    else:
        for budget in (16, 100_000):
            record(f"budget {budget}", make_engine(model, mesh, microbatch_tokens=budget))
        record("in chunks", make_engine(model, mesh), chunks=4)
        with (
            mock.patch("nemo_rl.models.engine.engine.compiles_per_shape", return_value=True),
            mock.patch("nemo_rl.models.engine.attention.compiles_per_shape", return_value=True),
        ):
            record("rounded shapes", make_engine(model, mesh))
        for mode in ("replicate", "shard"):
            # Another head would start elsewhere: all of it has to come from the checkpoint.
            engine = make_engine(model, mesh)
            torch.nn.init.zeros_(engine.model.module.value_head.weight)
            EngineCheckpointer(engine).load(work / mode / "weights", work / mode / "optimizer")
            results[f"{mode} reloaded"] = train(engine, rank, world, range(STEPS, STEPS + 2))
    if rank == 0:
        torch.save(results, work / f"results{world}")
    dist.destroy_process_group()


def plain_run(model: Path) -> dict[str, Any]:
    critic = PlainCritic(model)
    optimizer = torch.optim.AdamW(critic.parameters(), **ADAMW)
    steps = []
    for step in range(STEPS):
        rows = step_rows(step)
        values = critic.values(rows)
        loss, norm = critic.step(rows, optimizer, 1.0)
        steps.append({"values": values, "loss": loss, "grad_norm": norm})
    return {"steps": steps, "weights": {name: p.detach() for name, p in critic.named_parameters()}}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Everything the tests compare, from one run on two ranks and one on one rank, which loads what the two saved."""
    work = tmp_path_factory.mktemp("critic")
    model = make_critic_dir(work / "model")
    collected: dict[str, Any] = {"plain": plain_run(model)}
    for world in (2, 1):
        mp.spawn(run_rank, args=(world, model, work), nprocs=world)
        collected |= torch.load(work / f"results{world}", weights_only=True)
    return collected


def assert_same_weights(ours: dict[str, Tensor], others: dict[str, Tensor], limit: float) -> None:
    assert ours.keys() == others.keys()
    worst = {name: (values - others[name]).abs().max().item() for name, values in ours.items()}
    assert max(worst.values()) < limit, worst


@pytest.mark.parametrize(("world", "layout"), LAYOUTS)
def test_every_layout_is_the_plain_critic(results: dict[str, Any], world: int, layout: str) -> None:
    ours, plain = results[layout], results["plain"]
    for step, expected in zip(ours["steps"], plain["steps"], strict=True):
        torch.testing.assert_close(step["values"], expected["values"], rtol=0, atol=1e-5)
        assert (step["values"][:, 0] == 0).all()
        assert step["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert step["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)
    assert_same_weights(ours["weights"], plain["weights"], 1e-5)
    assert "value_head.weight" in ours["weights"]
    assert not any("lm_head" in name for name in ours["weights"])


@pytest.mark.parametrize("layout", ["budget 16", "replicate", "shard"])
def test_four_chunks_with_inference_between_are_one(results: dict[str, Any], layout: str) -> None:
    chunked = "in chunks" if layout == "budget 16" else f"{layout} in chunks"
    assert_same_weights(results[chunked]["weights"], results[layout]["weights"], 1e-6)
    for step, whole in zip(results[chunked]["steps"], results[layout]["steps"], strict=True):
        assert step["loss"] == pytest.approx(whole["loss"], rel=1e-6)


@pytest.mark.parametrize("mode", ["replicate", "shard"])
def test_one_rank_continues_what_two_ranks_saved(results: dict[str, Any], mode: str) -> None:
    for reloaded, straight in zip(results[f"{mode} reloaded"], results[f"{mode} continued"], strict=True):
        assert reloaded["loss"] == pytest.approx(straight["loss"], rel=1e-6)
        torch.testing.assert_close(reloaded["values"], straight["values"], rtol=0, atol=1e-5)


@pytest.mark.parametrize("mode", ["replicate", "shard"])
def test_a_rank_without_rows_holds_nobody_up(results: dict[str, Any], mode: str) -> None:
    seen = results[f"{mode} one-sided"]
    torch.testing.assert_close(seen["values"], results["plain"]["steps"][0]["values"], rtol=0, atol=1e-5)
    torch.testing.assert_close(seen["reference"], seen["start"], rtol=0, atol=1e-5)
    assert (seen["now"] - seen["start"]).abs().max() > 1e-2

"""The engine's step against a plain PyTorch loop: one rank, two gloo ranks, replicated and sharded, any token budget.

Not covered here: GPUs, bf16, and replicas of more than one rank.
"""

import math
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from tiny import make_model_dir, make_rows, select_rows
from transformers import AutoModelForCausalLM

from nemo_rl.algorithms.loss.loss_functions import NLLLossFn
from nemo_rl.models.engine.checkpoint import EngineCheckpointer
from nemo_rl.models.engine.config import EngineConfig, OptimizerSpec, ParallelSizes, ScheduleSpec
from nemo_rl.models.engine.engine import Engine
from nemo_rl.models.engine.mesh import build_mesh

STEPS, ROWS = 4, 12
ENGINE = "nemo_rl.models.engine"
SCHEDULE = ScheduleSpec(
    phases=(
        OptimizerSpec(name="LinearLR", kwargs={"start_factor": 0.5, "total_iters": 2}),
        OptimizerSpec(
            name="torch.optim.lr_scheduler.LinearLR", kwargs={"start_factor": 1.0, "end_factor": 0.1, "total_iters": 8}
        ),
    ),
    milestones=(2,),
)


def step_rows(step: int) -> dict[str, torch.Tensor]:
    rows = make_rows(ROWS, seed=step)
    rows["sample_mask"][0] = 0.0  # a filler weighs nothing
    return rows


def engine_config(model: Path, **changes: Any) -> EngineConfig:
    settings = {
        "model_name": str(model),
        "optimizer": OptimizerSpec(name="torch.optim.AdamW", kwargs={"lr": 1e-2, "weight_decay": 0.1}),
        "schedule": SCHEDULE,
        "precision": "float32",
        "microbatch_tokens": 100,
    }
    return EngineConfig(**(settings | changes))


def plain_loop(model_dir: Path) -> list[dict[str, float]]:
    """One row at a time, no packing, full logits: the reference."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    rates = [0.5, 0.75, 1.0, 1.0 - 0.9 / 8]
    out = []
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * rates[step]
        rows = step_rows(step)
        mask = rows["token_mask"] * rows["sample_mask"][:, None]
        count = float(mask[:, 1:].sum())
        optimizer.zero_grad()
        total = 0.0
        for ids, length, row_mask in zip(rows["input_ids"], rows["input_lengths"], mask, strict=True):
            logits = model(input_ids=ids[None, :length]).logits[0, :-1]
            targets = torch.where(row_mask[1:length] > 0, ids[1:length], -100)
            if (targets >= 0).any():
                loss = F.cross_entropy(logits, targets, reduction="sum") / count
                loss.backward()
                total += loss.item()
        squares = [p.grad.double().square().sum() for p in model.parameters() if p.grad is not None]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        out.append({"loss": total, "grad_norm": math.sqrt(sum(squares)), "lr": 1e-2 * rates[step]})
    return out


def train(engine: Engine, rank: int, world: int, steps: range, pieces: int = 1) -> list[dict[str, float]]:
    """The rows dealt to `world` ranks and given to the engine in `pieces` microbatch calls."""
    out = []
    for step in steps:
        mine = list(range(rank, ROWS, world))
        engine.begin_step(NLLLossFn())
        for piece in range(pieces):
            engine.microbatch(select_rows(step_rows(step), mine[piece::pieces]))
        result = engine.finish_step()
        out.append({"loss": result.loss, "grad_norm": result.grad_norm, "lr": result.lr})
    return out


def run_rank(rank: int, world: int, model: Path, work: Path, out: Any) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(work / f"store{world}"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    mesh = build_mesh(ParallelSizes(), torch.device("cpu"))
    results: dict[str, Any] = {}
    for mode in ("replicate", "shard") if world > 1 else ("auto",):
        engine = Engine(engine_config(model, data_parallel=mode), mesh)
        results[mode] = train(engine, rank, world, range(STEPS), pieces=2)
        rows = make_rows(6, seed=9)
        results[f"{mode}/log_probs"] = engine.log_probs(rows).tolist()
        checkpointer = EngineCheckpointer(engine)
        checkpointer.save(work / mode / "weights", work / mode / "optimizer")
        checkpointer.wait()
        results[f"{mode}/continued"] = train(engine, rank, world, range(STEPS, STEPS + 2))
    if world == 1:
        for budget in (16, 100_000):
            engine = Engine(engine_config(model, microbatch_tokens=budget), mesh)
            results[f"budget {budget}"] = train(engine, rank, world, range(STEPS))
        recomputing = Engine(engine_config(model, activation_checkpointing=True), mesh)
        results["recomputed"] = train(recomputing, rank, world, range(STEPS))
        with (
            mock.patch(f"{ENGINE}.engine.compiles_per_shape", return_value=True),
            mock.patch(f"{ENGINE}.attention.compiles_per_shape", return_value=True),
        ):
            rounded = Engine(engine_config(model), mesh)
            results["rounded shapes"] = train(rounded, rank, world, range(STEPS))
        for mode in ("replicate", "shard"):
            engine = Engine(engine_config(model), mesh)
            EngineCheckpointer(engine).load(work / mode / "weights", work / mode / "optimizer")
            results[f"{mode}/reloaded"] = train(engine, rank, world, range(STEPS, STEPS + 2))
    if rank == 0:
        out.put(results)
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Everything the tests compare, from one run on two ranks and one on one rank, which loads what the two saved."""
    work = tmp_path_factory.mktemp("engine")
    model = make_model_dir(work / "model")
    collected: dict[str, Any] = {"plain": plain_loop(model)}
    for world in (2, 1):
        out = mp.get_context("spawn").SimpleQueue()
        mp.spawn(run_rank, args=(world, model, work, out), nprocs=world)
        collected |= out.get()
    return collected


@pytest.mark.parametrize(
    "layout", ["auto", "replicate", "shard", "budget 16", "budget 100000", "recomputed", "rounded shapes"]
)
def test_every_layout_trains_like_a_plain_loop(results: dict[str, Any], layout: str) -> None:
    for ours, plain in zip(results[layout], results["plain"], strict=True):
        assert ours["loss"] == pytest.approx(plain["loss"], rel=1e-5)
        assert ours["grad_norm"] == pytest.approx(plain["grad_norm"], rel=1e-4)
        assert ours["lr"] == pytest.approx(plain["lr"], rel=1e-9)


@pytest.mark.parametrize("mode", ["replicate", "shard"])
def test_one_rank_continues_what_two_ranks_saved(results: dict[str, Any], mode: str) -> None:
    for reloaded, straight in zip(results[f"{mode}/reloaded"], results[f"{mode}/continued"], strict=True):
        assert reloaded["loss"] == pytest.approx(straight["loss"], rel=1e-6)
        assert reloaded["lr"] == straight["lr"]


@pytest.mark.parametrize("mode", ["replicate", "shard"])
def test_log_probs_do_not_depend_on_the_layout(results: dict[str, Any], mode: str) -> None:
    ours, one_rank = torch.tensor(results[f"{mode}/log_probs"]), torch.tensor(results["auto/log_probs"])
    torch.testing.assert_close(ours, one_rank, rtol=0, atol=1e-5)
    assert (ours[:, 0] == 0).all()

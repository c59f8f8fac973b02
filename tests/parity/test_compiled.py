"""Compiled blocks train like blocks that are not: one rank and two, sharded, recomputed, in bfloat16.

Not covered here: GPUs, critics, and models with other blocks than Qwen3's.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.utils
import torch.distributed as dist
import torch.multiprocessing as mp
from tiny import make_model_dir, make_rows, select_rows

from nemo_rl.algorithms.loss.loss_functions import NLLLossFn
from nemo_rl.models.engine.config import EngineConfig, OptimizerSpec, ParallelSizes
from nemo_rl.models.engine.engine import Engine
from nemo_rl.models.engine.mesh import Mesh, build_mesh

STEPS, ROWS = 3, 12
ONE_RANK: dict[str, dict[str, Any]] = {
    "packs": {},
    "recomputed": {"activation_checkpointing": True},
    "bfloat16": {"precision": "bfloat16"},
}
TWO_RANKS: dict[str, dict[str, Any]] = {
    "replicated": {"data_parallel": "replicate"},
    "sharded": {"data_parallel": "shard"},
    "sharded and recomputed": {"data_parallel": "shard", "activation_checkpointing": True},
}


def train(model: Path, mesh: Mesh, rank: int, world: int, changes: dict[str, Any]) -> dict[str, list[float]]:
    """Losses and gradient norms of some steps of ever new packs, and log-probabilities taken between them."""
    settings: dict[str, Any] = {"precision": "float32", "microbatch_tokens": 60} | changes
    optimizer = OptimizerSpec(name="AdamW", kwargs={"lr": 1e-2})
    engine = Engine(EngineConfig(model_name=str(model), optimizer=optimizer, **settings), mesh)
    out: dict[str, list[float]] = {"loss": [], "grad_norm": [], "log_probs": []}
    for step in range(STEPS):
        rows = make_rows(ROWS, seed=step)
        engine.begin_step(NLLLossFn())
        engine.microbatch(select_rows(rows, list(range(rank, ROWS, world))))
        out["log_probs"] += engine.log_probs(make_rows(4, seed=step + 50)).flatten().tolist()
        result = engine.finish_step()
        out["loss"].append(result.loss)
        out["grad_norm"].append(result.grad_norm)
    return out


def run_rank(rank: int, world: int, model: Path, work: Path, out: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(str(work / f"{world}"), world), rank=rank, world_size=world)
    mesh = build_mesh(ParallelSizes(), torch.device("cpu"))
    results: dict[str, Any] = {}
    for layout, changes in (ONE_RANK if world == 1 else TWO_RANKS).items():
        plain = train(model, mesh, rank, world, changes)
        torch._dynamo.utils.counters.clear()
        compiled = train(model, mesh, rank, world, changes | {"torch_compile": True})
        compilations = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        results[layout] = {"plain": plain, "compiled": compiled, "compilations": compilations}
        torch._dynamo.reset()
    if rank == 0:
        out.put(results)
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    work = tmp_path_factory.mktemp("compiled")
    model = make_model_dir(work / "model")
    collected: dict[str, Any] = {}
    for world in (1, 2):
        out = mp.get_context("spawn").SimpleQueue()
        mp.spawn(run_rank, args=(world, model, work, out), nprocs=world)
        collected |= out.get()
    return collected


@pytest.mark.slow
@pytest.mark.parametrize("layout", [*ONE_RANK, *TWO_RANKS])
def test_compiled_blocks_change_no_number(results: dict[str, Any], layout: str) -> None:
    plain, compiled = results[layout]["plain"], results[layout]["compiled"]
    # bfloat16 rounds each product anew, and a compiled block rounds less often.
    rel, atol = (2e-2, 5e-2) if layout == "bfloat16" else (1e-5, 1e-4)
    assert compiled["loss"] == pytest.approx(plain["loss"], rel=rel)
    assert compiled["grad_norm"] == pytest.approx(plain["grad_norm"], rel=max(rel, 1e-4))
    assert compiled["log_probs"] == pytest.approx(plain["log_probs"], abs=atol)


@pytest.mark.slow
def test_new_packs_compile_nothing_new(results: dict[str, Any]) -> None:
    # A layer is compiled in pieces, with and without gradients, not once for each of its packs (9 here) or layers.
    assert 0 < results["packs"]["compilations"] <= 12

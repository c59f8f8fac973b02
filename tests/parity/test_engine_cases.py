"""Cases B-09 and B-32 and skipped steps on one and on two ranks, with weights replicated and sharded.

Not covered: dp 4, and collectives that really hang, which mp.spawn would wait for until the test's own limit.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from tiny import make_model_dir, select_rows
from torch import Tensor, nn
from unit.models.engine.cost_loss import CostLoss, cost_weight, rows_with_costs

from nemo_rl.models.engine.config import EngineConfig, OptimizerSpec, ParallelSizes
from nemo_rl.models.engine.engine import Engine, StepResult
from nemo_rl.models.engine.heads import LMHead
from nemo_rl.models.engine.mesh import Mesh, build_mesh
from nemo_rl.models.engine.microbatch import Pack
from nemo_rl.utils.errors import PeerError

MODES = ("replicate", "shard")
# Rows of rank 0, then of rank 1: trained tokens, cost of each.
MEANS = (([5, 1], [1.0, 4.0]), ([3, 1], [2.0, 1.0]))
UNEQUAL = (([10, 10, 10], [1.0, 1.0, 1.0]), ([2, 3, 4], [2.0, 2.0, 2.0]))
# A row has one token more than are trained, so that a budget of 10 for lengths 10 | 2, 3, 4 is one of 12 here.
BUDGET = 12


class CountingHead(LMHead):
    """Counts forward passes."""

    def __init__(self) -> None:
        self.passes = 0

    def __call__(self, model: nn.Module, pack: Pack) -> Tensor:
        self.passes += 1
        return super().__call__(model, pack)


def make_engine(model: Path, mesh: Mesh, mode: str, **changes: Any) -> Engine:
    settings: dict[str, Any] = {
        "model_name": str(model),
        "optimizer": OptimizerSpec(name="torch.optim.SGD", kwargs={"lr": 0.1}),
        "precision": "float32",
        "max_grad_norm": None,
        "data_parallel": mode,
    }
    return Engine(EngineConfig(**(settings | changes)), mesh)


def mine(case: Any, rank: int, world: int) -> dict[str, Tensor]:
    """The rows of a rank; one rank alone has all."""
    if world > 1:
        return rows_with_costs(*case[rank])
    return rows_with_costs([n for tokens, _ in case for n in tokens], [cost for _, costs in case for cost in costs])


def step(engine: Engine, rows: dict[str, Tensor], one_by_one: bool = False) -> StepResult:
    engine.begin_step(CostLoss(engine.model.module))
    count = len(rows["cost"])
    for index in [[i] for i in range(count)] if one_by_one else [list(range(count))]:
        engine.microbatch(select_rows(rows, index))
    return engine.finish_step()


def unequal_passes(engine: Engine, rows: dict[str, Tensor]) -> dict[str, Any]:
    head = CountingHead()
    engine.head = head
    engine.begin_step(CostLoss(engine.model.module))
    engine.microbatch(rows)
    passes = head.passes
    result = engine.finish_step()
    return {"loss": result.loss, "passes": passes, "weight": cost_weight(engine)}


def skipped_steps(engine: Engine, rows: dict[str, Tensor], rank: int) -> list[tuple[str | None, float]]:
    """Why each step was skipped, and the weight after it: non-finite on the last rank, no token anywhere, good."""
    last = rank == dist.get_world_size() - 1
    broken = rows | {"cost": rows["cost"] * (float("inf") if last else 1.0)}
    empty = rows | {"sample_mask": torch.zeros_like(rows["sample_mask"])}
    return [(step(engine, some).skipped, cost_weight(engine)) for some in (broken, empty, rows)]


def failed_steps(engine: Engine, rows: dict[str, Tensor], rank: int) -> list[Any]:
    """What each rank hears when the last one fails inside a step, and when it fails outside; then a good step."""
    fails, heard = rank == dist.get_world_size() - 1, []
    engine.begin_step(CostLoss(engine.model.module))
    engine.microbatch(rows)
    if fails:
        engine.fail_step()
    with pytest.raises(PeerError) as caught:
        engine.finish_step()
    engine.abort_step()
    heard.append(str(caught.value))
    if fails and not engine.model.sharded:
        engine.withdraw_step()
    elif not engine.model.sharded:
        with pytest.raises(PeerError) as caught:
            step(engine, rows)
        engine.abort_step()
        heard.append(str(caught.value))
    return [heard, step(engine, rows).loss, cost_weight(engine)]


def run_rank(rank: int, world: int, model: Path, work: Path, out: Any) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(work / f"store{world}"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    mesh = build_mesh(ParallelSizes(), torch.device("cpu"))
    for mode in MODES if world > 1 else ("replicate",):
        results: dict[str, Any] = {}
        for one_by_one in (True, False):
            engine = make_engine(model, mesh, mode)
            done = step(engine, mine(MEANS, rank, world), one_by_one)
            name = "means one by one" if one_by_one else "means"
            results[name] = (done.loss, done.grad_norm, cost_weight(engine))
        budgeted = make_engine(model, mesh, mode, microbatch_tokens=BUDGET)
        results["unequal"] = unequal_passes(budgeted, mine(UNEQUAL, rank, world))
        results["skipped"] = skipped_steps(make_engine(model, mesh, mode), mine(MEANS, rank, world), rank)
        if world > 1:
            results["failed"] = failed_steps(make_engine(model, mesh, mode), mine(MEANS, rank, world), rank)
        idle = mine(MEANS, rank, world)
        if rank > 0:
            idle["sample_mask"] = torch.zeros_like(idle["sample_mask"])
        results["one rank idle"] = step(make_engine(model, mesh, mode), idle).loss
        out.put((world, mode, rank, results))
    dist.destroy_process_group()


Layout = tuple[int, str]
LAYOUTS: list[Layout] = [(1, "replicate"), *((2, mode) for mode in MODES)]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[Layout, list[dict[str, Any]]]:
    """Layout to what each rank saw, in rank order."""
    work = tmp_path_factory.mktemp("cases")
    model = make_model_dir(work / "model")
    found: dict[tuple[int, str, int], dict[str, Any]] = {}
    for world in (2, 1):
        out = mp.get_context("spawn").SimpleQueue()
        mp.spawn(run_rank, args=(world, model, work, out), nprocs=world)
        while not out.empty():
            *place, seen = out.get()
            found[tuple(place)] = seen
    return {(world, mode): [found[world, mode, rank] for rank in range(world)] for world, mode in LAYOUTS}


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", ["means", "means one by one"])
def test_b09_one_division_by_all_trained_tokens(results: Any, layout: Layout, name: str) -> None:
    """1.6, not 2.0 (mean of microbatch means) or 1.625 (of rank means); w = 0.84, not 0.92 (divided by dp again)."""
    for loss, grad_norm, weight in (seen[name] for seen in results[layout]):
        assert loss == pytest.approx(1.6, abs=1e-6)
        assert grad_norm == pytest.approx(1.6, abs=1e-6)
        assert weight == pytest.approx(0.84, abs=1e-6)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_b32_unequal_numbers_of_passes(results: Any, layout: Layout) -> None:
    """Ranks that meet inside a pass make 3 each, fillers among them; where they don't, each makes those it needs."""
    seen = [ranks["unequal"] for ranks in results[layout]]
    for ours in seen:
        assert ours["loss"] == pytest.approx(48 / 39, abs=1e-6)
        assert ours["weight"] == pytest.approx(1 - 0.1 * 48 / 39, abs=1e-6)
    assert [ours["passes"] for ours in seen] == {
        (1, "replicate"): [4],
        (2, "replicate"): [3, 1],
        (2, "shard"): [3, 3],
    }[layout]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_all_ranks_skip_a_step_together(results: Any, layout: Layout) -> None:
    for seen in results[layout]:
        reasons, weights = zip(*seen["skipped"], strict=True)
        assert reasons == ("non_finite_gradient", "no_trained_token", None)
        assert weights == (1.0, 1.0, pytest.approx(0.84, abs=1e-6))


@pytest.mark.parametrize("mode", MODES)
def test_a_rank_without_a_trained_token_does_not_stop_the_other(results: Any, mode: str) -> None:
    assert [seen["one rank idle"] for seen in results[2, mode]] == [pytest.approx(9 / 6)] * 2


@pytest.mark.timeout(60)
@pytest.mark.parametrize("mode", MODES)
def test_a_rank_that_fails_ends_the_step_of_all_and_the_next_one_is_right(results: Any, mode: str) -> None:
    message = "1 of 2 ranks failed before the end of the step"
    for rank, seen in enumerate(results[2, mode]):
        heard, loss, weight = seen["failed"]
        assert heard == [message] * (2 if rank == 0 and mode == "replicate" else 1)
        assert (loss, weight) == (pytest.approx(1.6, abs=1e-6), pytest.approx(0.84, abs=1e-6))

"""The step's state machine and what must not change anything, on one rank.

Not covered here: more ranks, see tests/parity/test_engine.py.
"""

from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tiny import make_model_dir, make_rows, select_rows

from nemo_rl.algorithms.loss.interfaces import LossInputType, LossType
from nemo_rl.algorithms.loss.loss_functions import NLLLossFn
from nemo_rl.models.engine.checkpoint import EngineCheckpointer
from nemo_rl.models.engine.config import EngineConfig, OptimizerSpec, ParallelSizes, ScheduleSpec
from nemo_rl.models.engine.engine import Engine
from nemo_rl.models.engine.mesh import Mesh, build_mesh
from nemo_rl.utils.errors import UserError


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield build_mesh(ParallelSizes(), torch.device("cpu"))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_dir(tmp_path_factory.mktemp("model"))


def make_engine(model_dir: Path, mesh: Mesh, **changes: Any) -> Engine:
    settings: dict[str, Any] = {
        "optimizer": OptimizerSpec(name="AdamW", kwargs={"lr": 1e-2, "weight_decay": 0.5}),
        "schedule": ScheduleSpec(phases=(OptimizerSpec(name="ExponentialLR", kwargs={"gamma": 0.5}),)),
        "precision": "float32",
    }
    return Engine(EngineConfig(model_name=str(model_dir), **(settings | changes)), mesh)


def weights(engine: Engine) -> list[torch.Tensor]:
    return [p.detach().clone() for p in engine.model.module.parameters()]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def step(engine: Engine, rows: dict[str, torch.Tensor], loss_fn: Any = None) -> Any:
    engine.begin_step(loss_fn or NLLLossFn())
    engine.microbatch(rows)
    return engine.finish_step()


def test_calls_out_of_order_fail_and_abort_always_recovers(model_dir: Path, mesh: Mesh) -> None:
    engine = make_engine(model_dir, mesh)
    rows = make_rows(4)
    engine.abort_step()
    for call in (lambda: engine.microbatch(rows), engine.finish_step):
        with pytest.raises(RuntimeError, match="no training step is open"):
            call()
    engine.begin_step(NLLLossFn())
    with pytest.raises(RuntimeError, match="already open"):
        engine.begin_step(NLLLossFn())
    engine.microbatch(make_rows(4, seed=8))
    engine.abort_step()
    # What was aborted leaves no trace in the next step.
    assert step(engine, rows).loss == step(make_engine(model_dir, mesh), rows).loss
    fresh = make_engine(model_dir, mesh)
    step(fresh, rows)
    assert same(weights(engine), weights(fresh))


def test_a_step_without_a_trained_token_changes_nothing(model_dir: Path, mesh: Mesh) -> None:
    engine = make_engine(model_dir, mesh)
    before = weights(engine)
    rows = make_rows(3)
    rows["sample_mask"] = torch.zeros(3)
    result = step(engine, rows)
    assert result.skipped == "no_trained_token"
    assert (result.loss, result.valid_tokens) == (0.0, 0.0)
    assert same(weights(engine), before)
    assert step(engine, make_rows(3)).lr == 1e-2  # the schedule did not tick


class ExplodingLoss:
    """A loss whose gradient is not finite."""

    loss_type = LossType.TOKEN_LEVEL
    input_type = LossInputType.LOGPROB
    metric_normalizations = MappingProxyType({})

    def __call__(self, data, global_valid_seqs, global_valid_toks, *, next_token_logprobs):
        return next_token_logprobs.sum() * float("inf"), {}


def test_a_non_finite_gradient_never_updates(model_dir: Path, mesh: Mesh) -> None:
    engine = make_engine(model_dir, mesh)
    before = weights(engine)
    result = step(engine, make_rows(3), ExplodingLoss())
    assert result.skipped == "non_finite_gradient"
    assert same(weights(engine), before)
    after = step(engine, make_rows(3))
    assert after.lr == 1e-2
    assert after.skipped is None


def test_logged_loss_is_the_token_mean_however_rows_are_cut(model_dir: Path, mesh: Mesh) -> None:
    """B-10: the sum of the scaled records equals the loss, for any number of forward passes."""
    rows = make_rows(8)
    losses = []
    for budget in (8, 64, 10_000):
        result = step(make_engine(model_dir, mesh, microbatch_tokens=budget), rows)
        assert sum(record["loss"] for record in result.records) == pytest.approx(result.loss, rel=1e-6)
        assert sum(record["num_unmasked_tokens"] for record in result.records) == result.valid_tokens
        losses.append(result.loss)
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-6)


def test_evaluation_adds_up_and_changes_nothing(model_dir: Path, mesh: Mesh) -> None:
    engine = make_engine(model_dir, mesh)
    before = weights(engine)
    rows = make_rows(8)
    parts = [engine.evaluate(NLLLossFn(), select_rows(rows, part)) for part in ([0, 1, 2], [3, 4, 5, 6, 7])]
    loss = sum(p["loss_sum"] for p in parts) / sum(p["valid_tokens"] for p in parts)
    assert same(weights(engine), before)
    assert loss == pytest.approx(step(engine, rows).loss, rel=1e-6)


def test_b07_a_document_does_not_see_its_neighbour(model_dir: Path, mesh: Mesh) -> None:
    engine = make_engine(model_dir, mesh)

    def log_prob_of_22(neighbour: list[int] | None) -> float:
        rows = [[21, 22, 0]] if neighbour is None else [neighbour, [21, 22, 0]]
        ids = torch.tensor(rows)
        lengths = torch.tensor([2] if neighbour is None else [3, 2])
        ones = torch.ones(ids.shape)
        batch = {
            "input_ids": ids,
            "input_lengths": lengths,
            "token_mask": ones,
            "sample_mask": torch.ones(len(rows)),
        }
        return float(engine.log_probs(batch)[-1, 1])

    alone = log_prob_of_22(None)
    for neighbour in ([11, 12, 13], [14, 15, 16]):
        assert log_prob_of_22(neighbour) == pytest.approx(alone, abs=1e-5)


@pytest.mark.parametrize("tied", [True, False])
def test_b20_tied_embeddings_share_storage(tmp_path: Path, mesh: Mesh, tied: bool) -> None:
    engine = make_engine(make_model_dir(tmp_path / "model", tied=tied), mesh)
    step(engine, make_rows(4))
    module: Any = engine.model.module
    shared = module.lm_head.weight.data_ptr() == module.model.embed_tokens.weight.data_ptr()
    assert shared is tied


def test_llama_trains_too(tmp_path: Path, mesh: Mesh) -> None:
    engine = make_engine(make_model_dir(tmp_path / "model", family="llama"), mesh)
    rows = make_rows(6)
    losses = [step(engine, rows).loss for _ in range(8)]
    assert losses[-1] < losses[0] - 0.5


def test_unknown_optimizer_and_argument_are_named(model_dir: Path, mesh: Mesh) -> None:
    with pytest.raises(UserError, match=r"torch\.optim"):
        make_engine(model_dir, mesh, optimizer=OptimizerSpec(name="os.system"))
    with pytest.raises(UserError, match="learning_rate"):
        make_engine(model_dir, mesh, optimizer=OptimizerSpec(name="AdamW", kwargs={"learning_rate": 1e-3}))


def test_bf16_computes_on_copies_of_float32_masters(model_dir: Path, mesh: Mesh) -> None:
    """Updates too small for bfloat16 still add up, and what computes is always the rounded master."""
    spec = OptimizerSpec(name="SGD", kwargs={"lr": 1e-6})
    engine = make_engine(model_dir, mesh, precision="bfloat16", optimizer=spec)
    start = {name: p.detach().clone() for name, p in engine.model.masters.items()}
    for seed in range(5):
        step(engine, make_rows(6, seed=seed))
    moved = 0
    for name, copy in engine.model.module.named_parameters():
        master = engine.model.masters[name]
        assert (copy.dtype, master.dtype) == (torch.bfloat16, torch.float32)
        assert torch.equal(copy, master.to(torch.bfloat16))
        assert copy.grad is None
        moved += int((master != start[name]).sum())
    assert moved > sum(p.numel() for p in start.values()) // 2


def test_bf16_is_close_to_float32_for_any_cut(model_dir: Path, mesh: Mesh) -> None:
    rows = make_rows(12)
    exact = step(make_engine(model_dir, mesh), rows)
    for budget in (16, 100, 10_000):
        rounded = step(make_engine(model_dir, mesh, precision="bfloat16", microbatch_tokens=budget), rows)
        assert rounded.loss == pytest.approx(exact.loss, rel=5e-3)
        assert rounded.grad_norm == pytest.approx(exact.grad_norm, rel=2e-2)


def test_bf16_checkpoint_keeps_the_masters(model_dir: Path, mesh: Mesh, tmp_path: Path) -> None:
    engine = make_engine(model_dir, mesh, precision="bfloat16")
    step(engine, make_rows(4, seed=1))
    checkpointer = EngineCheckpointer(engine)
    checkpointer.save(tmp_path / "weights", tmp_path / "optimizer")
    checkpointer.wait()
    resumed = make_engine(model_dir, mesh, precision="bfloat16")
    EngineCheckpointer(resumed).load(tmp_path / "weights", tmp_path / "optimizer")
    for name, master in engine.model.masters.items():
        assert torch.equal(resumed.model.masters[name], master)
    assert step(resumed, make_rows(4, seed=2)).loss == step(engine, make_rows(4, seed=2)).loss
    assert same(weights(resumed), weights(engine))

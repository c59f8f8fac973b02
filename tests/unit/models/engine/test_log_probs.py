"""Log-probabilities against a plain model: which positions, at which temperature, by which weights; on one rank.

Not covered here: several ranks, see tests/parity.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tiny import make_model_dir, make_rows
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from nemo_rl.algorithms.loss.loss_functions import NLLLossFn
from nemo_rl.models.engine.config import EngineConfig, OptimizerSpec, ParallelSizes
from nemo_rl.models.engine.engine import Engine
from nemo_rl.models.engine.heads import LMHead
from nemo_rl.models.engine.mesh import Mesh, build_mesh
from nemo_rl.models.engine.microbatch import Pack


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield build_mesh(ParallelSizes(), torch.device("cpu"))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_dir(tmp_path_factory.mktemp("model"))


def make_engine(model: Path, mesh: Mesh, **changes: Any) -> Engine:
    optimizer = OptimizerSpec(name="SGD", kwargs={"lr": 0.5})
    settings: dict[str, Any] = {"optimizer": optimizer, "precision": "float32", "microbatch_tokens": 60}
    return Engine(EngineConfig(model_name=str(model), **(settings | changes)), mesh)


@torch.no_grad()
def plain_log_probs(model: Path, rows: dict[str, Tensor], temperature: float = 1.0) -> Tensor:
    """One row at a time, whole logits."""
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    out = torch.zeros(rows["input_ids"].shape)
    for i, length in enumerate(rows["input_lengths"].tolist()):
        ids = rows["input_ids"][i, :length]
        table = torch.log_softmax(plain(input_ids=ids[None]).logits[0, :-1] / temperature, -1)
        out[i, 1:length] = table.gather(1, ids[1:, None]).squeeze(1)
    return out


class CountingHead(LMHead):
    """Counts the positions that go through the vocabulary projection."""

    positions = 0

    def __call__(self, model: nn.Module, pack: Pack) -> Tensor:
        self.positions += len(pack.head_positions)
        return super().__call__(model, pack)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.6])
def test_they_are_those_of_a_plain_model_at_the_sampling_temperature(
    model_dir: Path, mesh: Mesh, temperature: float
) -> None:
    rows = make_rows(9, seed=5)
    ours = make_engine(model_dir, mesh, temperature=temperature).log_probs(rows)
    torch.testing.assert_close(ours, plain_log_probs(model_dir, rows, temperature), rtol=0, atol=1e-5)


def test_with_targets_only_those_are_projected(model_dir: Path, mesh: Mesh) -> None:
    rows = make_rows(9, seed=5)
    rows["token_mask"][:, 0] = 1.0  # has no prefix, so it stays 0
    engine = make_engine(model_dir, mesh)
    engine.head = head = CountingHead()
    some = engine.log_probs(rows, targets=rows["token_mask"])
    wanted = rows["token_mask"] != 0
    wanted[:, 0] = False
    assert head.positions == int(wanted.sum())
    torch.testing.assert_close(some, plain_log_probs(model_dir, rows) * wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_the_reference_keeps_the_weights_of_the_start(model_dir: Path, mesh: Mesh, precision: str) -> None:
    rows = make_rows(6, seed=6)
    engine = make_engine(model_dir, mesh, reference=True, precision=precision)
    start = engine.log_probs(rows)
    assert torch.equal(engine.log_probs(rows, reference=True), start)
    engine.begin_step(NLLLossFn())
    engine.microbatch(rows)
    engine.finish_step()
    assert torch.equal(engine.log_probs(rows, reference=True), start)
    assert not torch.allclose(engine.log_probs(rows), start, atol=1e-2)
    assert engine.reference is not None
    assert not any(p.requires_grad for p in engine.reference.module.parameters())
    with pytest.raises(RuntimeError, match="init_reference_model"):
        make_engine(model_dir, mesh).log_probs(rows, reference=True)


def test_temperature_acts_on_the_loss_as_well(model_dir: Path, mesh: Mesh) -> None:
    rows = make_rows(6, seed=7)
    engine = make_engine(model_dir, mesh, temperature=1.7)
    sums = engine.evaluate(NLLLossFn(), rows)
    kept = rows["token_mask"].bool()
    expected = -plain_log_probs(model_dir, rows, 1.7)[kept].sum().item()
    assert sums["loss_sum"] == pytest.approx(expected, rel=1e-5)

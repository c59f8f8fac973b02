"""The value head's place and start, what it is saved as, and which loss fits which head; on one rank.

Not covered here: training, see tests/parity/test_critic.py.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from plain_critic import PlainCritic, make_critic_dir, make_value_rows
from tiny import make_model_dir
from torch import Tensor, nn

from nemo_rl.algorithms.loss.loss_functions import MseValueLossFn, NLLLossFn
from nemo_rl.models.engine.checkpoint import EngineCheckpointer
from nemo_rl.models.engine.config import EngineConfig, OptimizerSpec, ParallelSizes
from nemo_rl.models.engine.engine import Engine
from nemo_rl.models.engine.export import export_hf
from nemo_rl.models.engine.heads import ValueHead
from nemo_rl.models.engine.mesh import Mesh, build_mesh
from nemo_rl.models.engine.microbatch import build_pack
from nemo_rl.utils.errors import UserError


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield build_mesh(ParallelSizes(), torch.device("cpu"))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def critic_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_critic_dir(tmp_path_factory.mktemp("critic") / "model")


def make_engine(model: Path, mesh: Mesh, **changes: Any) -> Engine:
    settings: dict[str, Any] = {
        "head": "value",
        "optimizer": OptimizerSpec(name="AdamW", kwargs={"lr": 1e-2}),
        "precision": "float32",
        "section": "value",
    }
    return Engine(EngineConfig(model_name=str(model), **(settings | changes)), mesh)


class TenthsOfPosition(nn.Module):
    """A model whose head says a tenth of the position in the document: 0.0, 0.1, 0.2, ..."""

    def forward(self, input_ids: Tensor, position_ids: Tensor, head_positions: Tensor, documents: Any) -> Tensor:
        return position_ids[0, head_positions] / 10


@pytest.mark.parametrize("multiple", [1, 16])
@pytest.mark.parametrize("order", [[0], [0, 1], [1, 0]])
def test_b26_the_value_of_a_token_is_the_head_before_it(order: list[int], multiple: int) -> None:
    """Prompt of 2, response of 3, alone, packed first and packed second: advantages 0.9, 0.8, 0.7."""
    batch = {"input_ids": torch.arange(10).view(2, 5), "input_lengths": torch.tensor([5, 4])}
    targets = (torch.arange(5) > 0) & (torch.arange(5) < batch["input_lengths"][:, None])
    pack = build_pack(batch, order, targets, multiple)
    by_row = pack.to_rows(ValueHead()(TenthsOfPosition(), pack), 5)
    values = by_row[order.index(0)]
    assert values.tolist() == pytest.approx([0.0, 0.0, 0.1, 0.2, 0.3])
    rewards = torch.tensor([0.0, 0.0, 1.0])
    advantages = rewards.flip(0).cumsum(0).flip(0) - values[2:]  # gamma = lambda = 1
    assert advantages.tolist() == pytest.approx([0.9, 0.8, 0.7])


def test_b26_with_a_random_head_wherever_the_row_stands(critic_dir: Path, mesh: Mesh) -> None:
    plain, rows = PlainCritic(critic_dir), make_value_rows(6, seed=4)
    with torch.no_grad():
        states = plain.model(input_ids=rows["input_ids"][2, : rows["input_lengths"][2]][None]).last_hidden_state[0]
        before = plain.value_head(states).squeeze(-1)[:-1]
    for budget in (1, 64, 100_000):  # alone, among some rows, among all
        values = make_engine(critic_dir, mesh, microbatch_tokens=budget).values(rows)[2]
        torch.testing.assert_close(values[1 : len(before) + 1], before, rtol=0, atol=1e-5)
        assert values[0] == 0
        assert (values[len(before) + 1 :] == 0).all()


def test_a_new_head_is_zero_or_drawn_from_the_seed(tmp_path: Path, mesh: Mesh) -> None:
    model = make_model_dir(tmp_path / "model", tied=False)

    def head(**changes: Any) -> Tensor:
        return make_engine(model, mesh, **changes).model.module.value_head.weight.detach().clone()

    assert (head() == 0).all()
    drawn = head(value_head_init="normal", seed=3)
    assert torch.equal(drawn, head(value_head_init="normal", seed=3))
    assert not torch.equal(drawn, head(value_head_init="normal", seed=4))
    assert 0.012 < drawn.std().item() < 0.028


def test_a_zero_head_learns_and_carries_the_decoder_along(tmp_path: Path, mesh: Mesh) -> None:
    engine = make_engine(make_model_dir(tmp_path / "model"), mesh)
    before = engine.model.module.model.embed_tokens.weight.detach().clone()
    rows = make_value_rows(8, seed=0)
    losses = []
    for _ in range(6):
        engine.begin_step(MseValueLossFn({}))
        engine.microbatch(rows)
        losses.append(engine.finish_step().loss)
    assert losses[-1] < 0.7 * losses[0]
    assert not torch.equal(engine.model.module.model.embed_tokens.weight, before)


def test_an_exported_critic_is_a_model_directory(critic_dir: Path, mesh: Mesh, tmp_path: Path) -> None:
    engine, rows = make_engine(critic_dir, mesh), make_value_rows(5, seed=1)
    engine.begin_step(MseValueLossFn({}))
    engine.microbatch(rows)
    engine.finish_step()
    checkpointer = EngineCheckpointer(engine)
    checkpointer.save(tmp_path / "step_1" / "value" / "weights", None)
    checkpointer.wait()
    exported = export_hf(tmp_path / "step_1", tmp_path / "exported", "float32", role="value")
    again = make_engine(exported, mesh, value_head_init="normal")
    torch.testing.assert_close(again.values(rows), engine.values(rows), rtol=0, atol=1e-6)
    (exported / "value_head.safetensors").write_bytes(b"nothing")
    with pytest.raises(UserError, match=r"^value\.model_name: .*value_head\.safetensors holds no value head"):
        make_engine(exported, mesh)


def test_bf16_values_are_close_and_not_rounded_to_bf16(critic_dir: Path, mesh: Mesh) -> None:
    rows = make_value_rows(6, seed=2)
    exact = make_engine(critic_dir, mesh).values(rows)
    rounded = make_engine(critic_dir, mesh, precision="bfloat16").values(rows)
    torch.testing.assert_close(rounded, exact, rtol=0.05, atol=0.05)
    assert (rounded != rounded.bfloat16().float()).any()


def test_a_loss_needs_its_head(critic_dir: Path, mesh: Mesh) -> None:
    critic = make_engine(critic_dir, mesh)
    policy = make_engine(critic_dir, mesh, head="lm")
    for engine, loss_fn in ((critic, NLLLossFn()), (policy, MseValueLossFn({}))):
        for call in (engine.begin_step, lambda loss, engine=engine: engine.evaluate(loss, make_value_rows(2, seed=0))):
            with pytest.raises(ValueError, match="but the loss wants"):
                call(loss_fn)
    with pytest.raises(RuntimeError, match="no value head"):
        policy.values(make_value_rows(2, seed=0))
    with pytest.raises(RuntimeError, match="no log-probabilities"):
        critic.log_probs(make_value_rows(2, seed=0))


def test_messages_name_the_section(tmp_path: Path, mesh: Mesh) -> None:
    with pytest.raises(UserError, match=r"^value\.model_name: there is no directory"):
        make_engine(tmp_path / "nowhere", mesh)
    model = make_model_dir(tmp_path / "model")
    with pytest.raises(UserError, match=r"value\.optimizer\.name"):
        make_engine(model, mesh, optimizer=OptimizerSpec(name="Nope"))
    with pytest.raises(UserError, match=r"value\.optimizer\.kwargs\.rate"):
        make_engine(model, mesh, optimizer=OptimizerSpec(name="AdamW", kwargs={"rate": 1}))


def test_rows_without_any_take_part(critic_dir: Path, mesh: Mesh) -> None:
    """A replica without a share of the step."""
    engine, rows = make_engine(critic_dir, mesh), make_value_rows(3, seed=0)
    none = {name: value[:0] for name, value in rows.items()}
    assert engine.values(none).shape == (0, rows["input_ids"].size(1))
    engine.begin_step(MseValueLossFn({}))
    engine.microbatch(none)
    assert engine.finish_step().skipped == "no_trained_token"
    assert engine.evaluate(MseValueLossFn({}), none)["valid_tokens"] == 0.0

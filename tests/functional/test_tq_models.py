"""Policy and critic on one cluster, over the real TransferQueue, against plain models that see one row at a time.

Seven rows on two workers each, so that they do not divide; the controller's side holds a client that refuses columns.
Not covered here: sharded weights and token budgets (tests/parity), several nodes, GPUs.
"""

import copy
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from plain_critic import CLIP, SCALE, PlainCritic, make_critic_dir, make_value_rows
from tiny import make_tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM

from nemo_rl.algorithms.loss.loss_functions import ClippedPGLossFn, MseValueLossFn
from nemo_rl.data_plane.column_io import kv_first_write, read_columns, write_columns
from nemo_rl.data_plane.control import ControlOnlyClient
from nemo_rl.data_plane.factory import build_data_plane_client, maybe_configure_data_plane_env
from nemo_rl.data_plane.interfaces import DataPlaneClient, DataPlaneConfig, KVBatchMeta
from nemo_rl.data_plane.schema import ADVANTAGES, GENERATION_LOGPROBS, SC_ROLLOUT_SCHEMA_FIELDS
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.virtual_cluster import ClusterConfig, RayVirtualCluster, init_ray
from nemo_rl.models.config import PolicyConfig
from nemo_rl.models.policy.tq_policy import TQPolicy
from nemo_rl.models.value.config import ValueConfig
from nemo_rl.models.value.tq_value import TQValue
from nemo_rl.utils.errors import RunError
from nemo_rl.utils.timer import Timer

# Starts two models of two workers; the engine's parity tests and the run as a whole are in the fast suite.
pytestmark = pytest.mark.slow

ROWS, LR, TEMPERATURE = 7, 1e-3, 0.8
PLANE = DataPlaneConfig(attach_timeout_s=200, ack_timeout_ms=120_000)
CLUSTER = ClusterConfig(gpus_per_node=2, oversubscribe=True, start_timeout_s=300, step_timeout_s=300)
LOSS = MseValueLossFn({"scale": SCALE, "cliprange": CLIP})
INPUTS = ("input_ids", "input_lengths", "token_mask", "sample_mask")


@dataclass
class World:
    """What the tests share."""

    cluster: RayVirtualCluster
    policy: TQPolicy
    value: TQValue
    reader: DataPlaneClient
    model: Path
    rows: dict[str, Tensor]

    def write(self, partition: str, **columns: Tensor) -> KVBatchMeta:
        """The rows in a new partition."""
        self.reader.register_partition(partition, list(SC_ROLLOUT_SCHEMA_FIELDS), ROWS, ["prev_lp", "train"])
        batch = {name: self.rows[name] for name in INPUTS} | columns
        ids = [f"{partition}{i}" for i in range(ROWS)]
        return kv_first_write(batch, sample_ids=ids, dp_client=self.reader, partition_id=partition)

    def read(self, meta: KVBatchMeta, column: str) -> Tensor:
        return read_columns(self.reader, meta, select_fields=[column])[column]


def settings(model: Path) -> dict[str, Any]:
    return {
        "model_name": str(model),
        "train_global_batch_size": ROWS,
        "max_total_sequence_length": 64,
        "train_mb_tokens": 70,
        "precision": "float32",
        "optimizer": {"name": "torch.optim.AdamW", "kwargs": {"lr": LR, "weight_decay": 0.1}},
    }


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    model = make_critic_dir(tmp_path_factory.mktemp("models") / "model")
    maybe_configure_data_plane_env(PLANE)
    with init_ray(CLUSTER):
        cluster = RayVirtualCluster.from_config(CLUSTER, name="ppo", max_colocated_worker_groups=2)
        policy = TQPolicy(
            cluster,
            PolicyConfig.model_validate(settings(model)),
            make_tokenizer(),
            init_reference_model=True,
            temperature=TEMPERATURE,
            dp_cfg=PLANE,
        )
        value = TQValue(cluster, ValueConfig.model_validate(settings(model)), make_tokenizer(), dp_cfg=PLANE)
        for driver in (policy, value):
            driver.dp_client = ControlOnlyClient(driver.dp_client)
        reader = build_data_plane_client(PLANE, bootstrap=False)
        yield World(cluster, policy, value, reader, model, make_value_rows(ROWS, seed=3))
        reader.close()
        assert value.shutdown()
        assert policy.shutdown()
        cluster.shutdown()


@torch.no_grad()
def plain_log_probs(model: Path, rows: dict[str, Tensor]) -> Tensor:
    """At the sampling temperature, of the trained tokens."""
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    out = torch.zeros(rows["input_ids"].shape)
    for i, length in enumerate(rows["input_lengths"].tolist()):
        ids = rows["input_ids"][i, :length]
        table = torch.log_softmax(plain(input_ids=ids[None]).logits[0, :-1] / TEMPERATURE, -1)
        out[i, 1:length] = table.gather(1, ids[1:, None]).squeeze(1)
    return out * rows["token_mask"]


def test_the_critic_is_the_plain_one_for_three_steps(world: World, tmp_path: Path) -> None:
    """Values, loss, gradient norm and, through the values after them, weights; then the same steps on one worker in
    four chunks, continued from a checkpoint of the two."""
    value, rows = world.value, world.rows
    meta = world.write("critic")
    before = copy.deepcopy(meta)
    plain = PlainCritic(world.model)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=LR, weight_decay=0.1)
    timer = Timer()
    assert value.get_values_from_meta(meta, timer=timer) is None
    values = world.read(meta, "values")
    torch.testing.assert_close(values, plain.values(rows), rtol=0, atol=1e-5)
    stored = world.reader.get_samples(meta.sample_ids, "critic", ["values"])["values"].unbind()
    assert [row.shape[0] for row in stored] == rows["input_lengths"].tolist()
    # The old estimates that the loss clips around are given, as is what the advantage stage writes.
    write_columns(world.reader, meta, fields={"values": rows["values"], "returns": rows["returns"]})
    value.save_checkpoint(tmp_path / "weights", tmp_path / "optimizer")
    value.finalize_async_save()
    one = TQValue(
        world.cluster,
        ValueConfig.model_validate(settings(world.model)),
        make_tokenizer(),
        name_prefix="one",
        workers_per_node=1,
        weights_path=tmp_path / "weights",
        optimizer_path=tmp_path / "optimizer",
        dp_cfg=PLANE,
    )
    for _ in range(3):
        result = value.train_from_meta(meta, LOSS, timer=timer)
        loss, norm = plain.step(rows, optimizer, 1.0)
        assert result.keys() == {"loss", "grad_norm", "all_mb_metrics"}
        assert result["loss"] == pytest.approx(loss, rel=1e-5)
        assert result["grad_norm"] == pytest.approx(norm, rel=1e-5)
        assert sum(result["all_mb_metrics"]["loss"]) == pytest.approx(loss, rel=1e-5)
        one.begin_train_step(LOSS)
        for chunk in range(4):
            one.train_microbatches_from_meta(meta.subset(range(chunk, ROWS, 4)))
        assert one.finish_train_step()["loss"] == pytest.approx(loss, rel=1e-5)
    data = BatchedDataDict({name: rows[name] for name in INPUTS})
    ours, of_one = value.get_values(data)["values"], one.get_values(data)["values"]
    torch.testing.assert_close(ours, plain.values(rows), rtol=0, atol=1e-5)
    torch.testing.assert_close(of_one, ours, rtol=0, atol=1e-6)
    assert one.shutdown()
    assert meta == before
    assert world.reader.list_sample_ids("critic") == sorted(meta.sample_ids)  # the critic clears nothing
    assert set(timer.get_timing_metrics()) == {
        "get_values/shard_meta",
        "get_values/submit_value_futures",
        "value_training/shard_meta",
        "value_training/submit_training_futures",
    }


def test_the_policys_columns_and_its_step(world: World) -> None:
    """Trained positions at the sampling temperature; at ratio 1 the loss is minus the mean advantage."""
    policy, rows = world.policy, world.rows
    meta = world.write("policy", **{GENERATION_LOGPROBS: plain_log_probs(world.model, world.rows)})
    before = copy.deepcopy(meta)
    policy.get_logprobs_from_meta(meta)
    policy.get_reference_policy_logprobs_from_meta(meta, micro_batch_size=1)
    expected = plain_log_probs(world.model, rows)
    for column in ("prev_logprobs", "reference_policy_logprobs"):
        torch.testing.assert_close(world.read(meta, column), expected, rtol=0, atol=1e-5)
    write_columns(world.reader, meta, fields={ADVANTAGES: rows["returns"]})
    result = policy.train_from_meta(meta, ClippedPGLossFn({"reference_policy_kl_penalty": 0.1}))
    trained = (rows["token_mask"] * rows["sample_mask"][:, None])[:, 1:] > 0
    assert result["loss"] == pytest.approx(-rows["returns"][:, 1:][trained].mean().item(), abs=1e-5)
    policy.get_logprobs_from_meta(meta)
    policy.get_reference_policy_logprobs_from_meta(meta)
    assert (world.read(meta, "prev_logprobs") - expected).abs().max() > 1e-3
    torch.testing.assert_close(world.read(meta, "reference_policy_logprobs"), expected, rtol=0, atol=1e-5)
    unmasked = BatchedDataDict({name: rows[name] for name in ("input_ids", "input_lengths")})
    everything = policy.get_reference_policy_logprobs(unmasked)["reference_logprobs"]
    assert ((everything != 0).sum(1) == rows["input_lengths"] - 1).all()
    assert meta == before
    policy.finish_step(meta)
    assert world.reader.list_sample_ids("policy") == []


def test_one_row_for_two_workers_and_rows_that_make_no_step(world: World) -> None:
    meta = world.write("few")
    world.value.get_values_from_meta(meta.subset([4]))
    assert world.read(meta.subset([4]), "values").abs().sum() > 0
    with pytest.raises(ValueError, match="7 rows do not divide into steps of 5 rows"):
        world.value.train_from_meta(meta, LOSS, gbs=5)
    with pytest.raises(RunError, match="no training step is open"):
        world.value.train_microbatches_from_meta(meta, train_fields=INPUTS)
    world.policy.discard_samples(meta.sample_ids, "few")
    world.policy.discard_samples(meta.sample_ids, "few")


def test_a_copy_in_another_process_stays_without_columns(world: World) -> None:
    twin = pickle.loads(pickle.dumps(world.value))
    assert isinstance(twin.dp_client, ControlOnlyClient)
    twin.dp_client.close()

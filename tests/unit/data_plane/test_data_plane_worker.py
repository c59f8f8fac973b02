"""The worker's side in one process, over the real stores. The broadcast in a replica of two: `tests/parity`."""

import dataclasses
from typing import Any

import pytest
import torch

from nemo_rl.data_plane.adapters.noop import NoOpDataPlaneClient
from nemo_rl.data_plane.column_io import kv_first_write
from nemo_rl.data_plane.interfaces import KVBatchMeta, LocalDataPlaneConfig
from nemo_rl.data_plane.worker_mixin import TQWorkerMixin
from nemo_rl.distributed.batched_data_dict import BatchedDataDict

LENGTHS = [3, 5, 2]
FIELDS = ["input_ids", "input_lengths", "token_mask", "sample_mask"]


class Tokenizer:
    pad_token_id = 7


class Worker(TQWorkerMixin):
    """Records its calls; log-probs are -ids, reference log-probs -2 ids, values 3 ids, two columns too wide."""

    tokenizer = Tokenizer()

    def __init__(self, coords: dict[str, int] | None = None) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.coords = coords or {}

    def _local_coords(self) -> dict[str, int]:
        return self.coords

    def train(self, data: BatchedDataDict, loss_fn: Any, **options: Any) -> dict[str, Any]:
        self.calls.append(("train", (data, loss_fn, options)))
        return {"loss": float(data["input_ids"].sum())}

    def get_logprobs(self, data: BatchedDataDict, micro_batch_size: int | None = None) -> dict[str, torch.Tensor]:
        return {"logprobs": self._scaled(data, -1)}

    def get_reference_policy_logprobs(
        self, data: BatchedDataDict, micro_batch_size: int | None = None
    ) -> dict[str, torch.Tensor]:
        return {"reference_logprobs": self._scaled(data, -2)}

    def get_values(self, data: BatchedDataDict, micro_batch_size: int | None = None) -> dict[str, torch.Tensor]:
        return {"values": self._scaled(data, 3)}

    def begin_train_step(self, loss_fn: Any, gbs: int | None = None, mbs: int | None = None) -> None:
        self.calls.append(("begin", (loss_fn, gbs, mbs)))

    def train_microbatch(self, data: BatchedDataDict) -> None:
        self.calls.append(("microbatch", data))

    def finish_train_step(self) -> dict[str, Any]:
        return {"loss": 0.5}

    def abort_train_step(self) -> None:
        self.calls.append(("abort", None))

    def fail_train_step(self) -> None:
        self.calls.append(("fail", None))

    def withdraw_from_train_step(self) -> None:
        self.calls.append(("withdraw", None))

    def eval_microbatch(self, data: BatchedDataDict, loss_fn: Any) -> dict[str, Any]:
        return {"loss": float(data["token_mask"].sum())}

    @staticmethod
    def _scaled(data: BatchedDataDict, factor: int) -> torch.Tensor:
        return torch.nn.functional.pad(factor * data["input_ids"].float(), (0, 2), value=99.0).requires_grad_()


def make_batch() -> dict[str, torch.Tensor]:
    inside = torch.arange(5) < torch.tensor(LENGTHS)[:, None]
    return {
        "input_ids": torch.where(inside, torch.arange(15).reshape(3, 5) + 10, 7),
        "input_lengths": torch.tensor(LENGTHS),
        "token_mask": inside.float(),
        "sample_mask": torch.ones(3),
    }


def make_queue_worker(coords: dict[str, int] | None = None) -> tuple[Worker, KVBatchMeta]:
    worker = Worker(coords)
    worker._dp_client = NoOpDataPlaneClient()
    worker._dp_client.register_partition("p", FIELDS, 3, ["train"])
    meta = kv_first_write(make_batch(), sample_ids=["a", "b", "c"], dp_client=worker._dp_client, partition_id="p")
    return worker, meta


def test_fetch_pads_ids_with_the_tokenizers_pad_and_attaches_the_packing_plan() -> None:
    worker, meta = make_queue_worker()
    meta.extra_info.update(global_forward_pad_seqlen=8, micro_batch_indices=[[[0, 2], [2, 3]]])
    data = worker._fetch(meta)
    assert torch.equal(data["input_ids"][:, :5], make_batch()["input_ids"])
    assert data["input_ids"][:, 5:].eq(7).all()
    assert data["token_mask"][:, 5:].eq(0).all()
    assert data["token_mask"].shape == (3, 8)
    assert data.micro_batch_indices == [[[0, 2], [2, 3]]]
    assert data.micro_batch_lengths is None


def test_fetch_from_the_local_plane_copies_nothing() -> None:
    worker, batch = Worker(), make_batch()
    worker.setup_data_plane(LocalDataPlaneConfig())
    client = worker._require_dp_client()
    worker.setup_data_plane(LocalDataPlaneConfig())
    assert worker._require_dp_client() is client
    client.register_partition("p", FIELDS, 3, ["train"])
    meta = kv_first_write(batch, sample_ids=["a", "b", "c"], dp_client=client, partition_id="p")
    data = worker._fetch(meta)
    assert all(data[name].data_ptr() == batch[name].data_ptr() for name in FIELDS)


@pytest.mark.parametrize(
    ("method", "column", "factor"),
    [
        ("get_logprobs_presharded", "prev_logprobs", -1),
        ("get_reference_policy_logprobs_presharded", "reference_policy_logprobs", -2),
        ("get_values_presharded", "values", 3),
    ],
)
def test_computed_columns_have_one_entry_per_token(method: str, column: str, factor: int) -> None:
    worker, meta = make_queue_worker()
    getattr(worker, method)(meta, micro_batch_size=1)
    stored = worker._require_dp_client().get_samples(["a", "b", "c"], "p", [column])[column].unbind()
    for row, length in enumerate(LENGTHS):
        assert torch.equal(stored[row], factor * make_batch()["input_ids"][row, :length].float())


def test_train_and_the_split_step_reach_the_host() -> None:
    worker, meta = make_queue_worker({"tensor_parallel": 0, "data_parallel": 1})
    assert worker.train_presharded(meta, "loss", gbs=6, mbs=3)["loss"] == float(make_batch()["input_ids"].sum())
    assert worker.calls[0][1][1:] == ("loss", {"eval_mode": False, "gbs": 6, "mbs": 3})
    worker.begin_train_step_presharded("loss", gbs=4)
    worker.train_microbatch_presharded(meta.subset([1]))
    assert worker.finish_train_step_presharded() == {"loss": 0.5, "is_replica_leader": True}
    worker.abort_train_step_presharded()
    assert [name for name, _ in worker.calls] == ["train", "begin", "microbatch", "abort"]
    assert worker.calls[1][1] == ("loss", 4, None)
    assert torch.equal(worker.calls[2][1]["input_ids"], make_batch()["input_ids"][1:2])
    assert worker.eval_microbatch_presharded(meta, "loss") == {"loss": float(sum(LENGTHS))}
    worker.coords = {"context_parallel": 1}
    assert worker.finish_train_step_presharded()["is_replica_leader"] is False


def test_a_part_that_fails_spoils_the_step_and_keeps_its_error() -> None:
    worker, meta = make_queue_worker()
    gone = dataclasses.replace(meta, sample_ids=["a", "gone", "c"])
    with pytest.raises(KeyError, match="gone"):
        worker.train_microbatch_presharded(gone)
    with pytest.raises(KeyError, match="gone"):
        worker.train_presharded(gone, "loss")
    assert [name for name, _ in worker.calls] == ["fail", "withdraw"]


def test_only_the_leader_writes() -> None:
    worker, meta = make_queue_worker({"pipeline_parallel": 1})
    worker._write_back(meta, {"values": torch.zeros(3, 5)})
    with pytest.raises(KeyError, match="values"):
        worker._require_dp_client().get_samples(["a"], "p", ["values"])


def test_refusals() -> None:
    worker, meta = make_queue_worker()
    with pytest.raises(ValueError, match="'all'"):
        worker._fetch(meta, fetch_policy="all")
    with pytest.raises(RuntimeError, match="needs a replica group"):
        worker._fetch(meta, fetch_policy="leader_broadcast")
    for result in (None, {"other": 1}):
        with pytest.raises(RuntimeError, match="'values' has no 'v'"):
            worker._write_back_result_field(meta, result, result_key="v", tq_field="values")
    with pytest.raises(TypeError, match="'v' is a list"):
        worker._write_back_result_field(meta, {"v": [1]}, result_key="v", tq_field="values")
    with pytest.raises(ValueError, match=r"shape \(2, 5\) for 3 rows"):
        worker._write_back_result_field(meta, {"v": torch.ones(2, 5)}, result_key="v", tq_field="values")
    with pytest.raises(RuntimeError, match="setup_data_plane"):
        Worker()._fetch(meta)
    with pytest.raises(NotImplementedError, match="where its rank is"):
        TQWorkerMixin()._is_replica_leader()


def test_a_share_without_rows_runs_and_writes_nothing() -> None:
    worker, meta = make_queue_worker()
    none = meta.subset([]).with_fields(["values"])
    none.extra_info.update(global_forward_pad_seqlen=6)
    data = worker._fetch(none)
    shapes = {name: (tuple(value.shape), value.dtype) for name, value in data.items()}
    assert shapes == {
        "input_ids": ((0, 6), torch.int64),
        "input_lengths": ((0,), torch.int64),
        "token_mask": ((0, 6), torch.float32),
        "sample_mask": ((0,), torch.float32),
        "values": ((0, 6), torch.float32),
    }
    worker.get_values_presharded(none)
    with pytest.raises(KeyError, match="values"):
        worker._require_dp_client().get_samples(["a"], "p", ["values"])

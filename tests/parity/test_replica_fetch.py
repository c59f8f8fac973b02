"""A replica of two gloo ranks: the sibling computes with the leader's rows, and only the leader touches the plane. Two
replicas of one rank whose rows change places.

Tensor parallel size 2 stands for any replica; groups that span machines and GPUs are not covered.
"""

from __future__ import annotations

import datetime
import multiprocessing
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from nemo_rl.data_plane.adapters.noop import NoOpDataPlaneClient
from nemo_rl.data_plane.column_io import kv_first_write
from nemo_rl.data_plane.interfaces import KVBatchMeta, LocalDataPlaneConfig
from nemo_rl.data_plane.leveling import RowMove
from nemo_rl.data_plane.worker_mixin import TQWorkerMixin
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.utils.errors import RunError

LENGTHS = [3, 5, 2]
IDS = ["a", "b", "c"]


class Worker(TQWorkerMixin):
    """Each rank computes every other column of the values; the replica's result is their sum."""

    def _local_coords(self) -> dict[str, int]:
        return {"data_parallel": 0, "tensor_parallel": dist.get_rank()}

    def _get_replica_group(self) -> dist.ProcessGroup | None:
        return dist.group.WORLD

    def get_values(self, data: BatchedDataDict, micro_batch_size: int | None = None) -> dict[str, torch.Tensor]:
        mine = torch.arange(data["input_ids"].shape[1]) % 2 == dist.get_rank()
        values = torch.where(mine, data["input_ids"].float() * 0.5, 0.0)
        dist.all_reduce(values)
        return {"values": values}

    def finish_train_step(self) -> dict[str, Any]:
        return {"loss": 1.0}


class Replica(TQWorkerMixin):
    """A replica of one rank beside another one."""

    def _local_coords(self) -> dict[str, int]:
        return {"data_parallel": dist.get_rank(), "tensor_parallel": 0}

    def _get_data_group(self) -> dist.ProcessGroup:
        assert dist.group.WORLD is not None
        return dist.group.WORLD


def make_batch() -> dict[str, Any]:
    inside = torch.arange(5) < torch.tensor(LENGTHS)[:, None]
    return {
        "input_ids": (torch.arange(15).reshape(3, 5) + 10) * inside,
        "input_lengths": torch.tensor(LENGTHS),
        "token_mask": inside.to(torch.bfloat16),
        "sample_mask": torch.tensor([1.0, 0.0, 1.0]),
    }


def make_meta(**extra_info: Any) -> KVBatchMeta:
    return KVBatchMeta("p", "train", IDS, fields=list(make_batch()), sequence_lengths=LENGTHS, extra_info=extra_info)


def fetch_is_the_same_on_both_ranks(worker: Worker) -> None:
    if dist.get_rank() == 0:
        worker._dp_client = NoOpDataPlaneClient()
        worker._dp_client.register_partition("p", list(make_batch()), 3, ["train"])
        kv_first_write(make_batch(), sample_ids=IDS, dp_client=worker._dp_client, partition_id="p")
    data = worker._fetch(make_meta(global_forward_pad_seqlen=8, micro_batch_indices=[[[0, 3]]]))
    expected = {
        name: torch.nn.functional.pad(column, (0, 3)) if column.dim() == 2 else column
        for name, column in make_batch().items()
    }
    assert sorted(data) == sorted(expected)
    for name, column in expected.items():
        assert data[name].dtype == column.dtype, name
        assert torch.equal(data[name], column), name
    assert data.micro_batch_indices == [[[0, 3]]]
    assert worker.finish_train_step_presharded()["is_replica_leader"] == (dist.get_rank() == 0)

    worker.get_values_presharded(make_meta())
    if dist.get_rank() == 0:
        stored = worker._require_dp_client().get_samples(IDS, "p", ["values"])["values"].unbind()
        for row, length in enumerate(LENGTHS):
            assert torch.equal(stored[row], make_batch()["input_ids"][row, :length] * 0.5)
    else:
        assert worker._dp_client is None


def local_rows_reach_the_sibling(worker: Worker) -> None:
    batch = {**make_batch(), "text": ["eins", "zwei", "drei"]}
    worker.setup_data_plane(LocalDataPlaneConfig())
    meta = [None]
    if dist.get_rank() == 0:
        client = worker._require_dp_client()
        client.register_partition("p", list(batch), 3, ["train"])
        meta = [kv_first_write(batch, sample_ids=IDS, dp_client=client, partition_id="p")]
    dist.broadcast_object_list(meta, src=0)
    assert meta[0] is not None
    data = worker._fetch(meta[0])
    assert list(data["text"]) == batch["text"]
    for name, column in make_batch().items():
        assert torch.equal(data[name], column), name
    if dist.get_rank() == 0:
        assert data["input_ids"].data_ptr() == batch["input_ids"].data_ptr()
    else:
        with pytest.raises(KeyError, match="no partition 'p'"):
            worker._fetch(meta[0], fetch_policy="independent")


def a_failed_read_ends_both_ranks_and_the_next_works(worker: Worker) -> None:
    if dist.get_rank() == 0:
        worker._dp_client = NoOpDataPlaneClient()
        worker._dp_client.register_partition("p", list(make_batch()), 3, ["train"])
        with pytest.raises(KeyError, match="input_ids"):
            worker._fetch(make_meta())
        kv_first_write(make_batch(), sample_ids=IDS, dp_client=worker._dp_client, partition_id="p")
    else:
        with pytest.raises(RunError, match=r"rank 0 could not read partition 'p': KeyError: .*input_ids"):
            worker._fetch(make_meta())
    assert torch.equal(worker._fetch(make_meta())["input_ids"], make_batch()["input_ids"])


def a_replica_without_its_rows_ends_its_counterpart_at_once(_: Worker) -> None:
    replica, rank = Replica(), dist.get_rank()
    replica._dp_client = NoOpDataPlaneClient()
    replica._dp_client.register_partition("p", list(make_batch()), 3, ["train"])
    moves = [RowMove(source=0, row=1, target=1), RowMove(source=1, row=2, target=0)]
    if rank == 0:
        kv_first_write(make_batch(), sample_ids=IDS, dp_client=replica._dp_client, partition_id="p")
        with pytest.raises(RunError, match="rank 1 could not read the rows that it has to hand on"):
            replica._fetch(make_meta(row_moves=moves))
    else:
        with pytest.raises(KeyError, match="input_ids"):
            replica._fetch(make_meta(row_moves=moves))
        kv_first_write(make_batch(), sample_ids=IDS, dp_client=replica._dp_client, partition_id="p")
    rows = make_batch()["input_ids"]
    expected = rows[[0, 2, 2]] if rank == 0 else rows[[0, 1, 1]]
    assert torch.equal(replica._fetch(make_meta(row_moves=moves))["input_ids"], expected)


STORIES = [
    fetch_is_the_same_on_both_ranks,
    local_rows_reach_the_sibling,
    a_failed_read_ends_both_ranks_and_the_next_works,
    a_replica_without_its_rows_ends_its_counterpart_at_once,
]


def _run_rank(rank: int, store: str, stories: list[Callable[[Worker], None]]) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=datetime.timedelta(seconds=30)
    )
    for story in stories:
        story(Worker())
        dist.barrier()
    dist.destroy_process_group()


def test_a_replica_of_two_ranks() -> None:
    """All stories run in one pair of processes, because starting one costs seconds."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=_run_rank, args=(rank, str(Path(folder) / "store"), STORIES)) for rank in range(2)
        ]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join(120)
            if rank.is_alive():
                rank.kill()
        assert [rank.exitcode for rank in ranks] == [0, 0]

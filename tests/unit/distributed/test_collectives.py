"""broadcast_batch and the rendezvous of DistributedWorker, over two gloo ranks. CUDA tensors are not covered."""

import os
import queue
from datetime import timedelta
from multiprocessing.queues import Queue

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.collectives import broadcast_batch
from nemo_rl.distributed.rendezvous import DistributedWorker
from nemo_rl.utils.errors import UserError


def sample() -> BatchedDataDict:
    batch = BatchedDataDict(
        {
            "ids": torch.tensor([[1, 2**53 + 1], [3, 4]]),
            "values": torch.tensor([3.140625, 0.001, 70000.0, float("nan"), -0.0]).to(torch.bfloat16),
            "mask": torch.tensor([True, False]),
            "strided": torch.arange(6.0).reshape(2, 3).t(),
            "grad": torch.ones(2, requires_grad=True) * 2,
            "empty": torch.zeros(0, 7),
            "scalar": torch.tensor(5, dtype=torch.int16),
            "names": ["a", "b\u2028c"],
            "count": 2,
        }
    )
    batch.micro_batch_indices = [[[0, 1], [1, 2]]]
    return batch


def check(batch: BatchedDataDict) -> None:
    wanted = sample()
    assert list(batch) == list(wanted)
    assert batch.micro_batch_indices == [[[0, 1], [1, 2]]] and batch.elem_counts_per_gb is None
    for name, value in wanted.items():
        if not isinstance(value, torch.Tensor):
            assert batch[name] == value
            continue
        got = batch[name]
        assert (got.dtype, got.shape) == (value.dtype, value.shape), name
        as_bytes = [t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (got, value)]
        assert torch.equal(*as_bytes), name


def run_rank(rank: int, ports: Queue, results: Queue) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank), GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    worker = DistributedWorker()
    if rank == 0:
        ports.put(worker.bind_rendezvous("127.0.0.1", None))
        worker.join_rendezvous(*worker_address(ports), timeout_s=60)
    else:
        worker.join_rendezvous(*worker_address(ports), timeout_s=60)
    group = dist.new_group([0, 1], timeout=timedelta(seconds=30))
    for src in (0, 1):
        mine = sample()
        got = broadcast_batch(mine if rank == src else None, group, src)
        check(got)
        assert (got is mine) == (rank == src)
        got["ids"].add_(1)  # the receiver may write
    try:
        broadcast_batch(BatchedDataDict({"bad": object()}) if rank == 0 else None, group, 0)
    except TypeError as error:
        results.put((rank, worker.ping(), str(error)))
    # The group still works after the refusal.
    check(broadcast_batch(sample() if rank == 0 else None, group, 0))
    worker.shutdown()
    worker.shutdown()
    assert not dist.is_initialized()


def worker_address(ports: Queue) -> tuple[str, int]:
    address = ports.get(timeout=60)
    ports.put(address)
    return address


def test_two_ranks() -> None:
    context = mp.get_context("spawn")
    ports, results = context.Queue(), context.Queue()
    mp.spawn(run_rank, args=(ports, results), nprocs=2, join=True)
    found = sorted(results.get(timeout=5) for _ in range(2))
    assert [(rank, ping) for rank, ping, _ in found] == [(0, 0), (1, 1)]
    assert all("'bad'" in text and "object" in text for _, _, text in found), "both ranks are told"
    with pytest.raises(queue.Empty):
        results.get_nowait()


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> DistributedWorker:
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    return DistributedWorker()


def test_a_taken_port_is_passed_over_or_named(worker: DistributedWorker) -> None:
    host, taken = worker.bind_rendezvous("127.0.0.1", None)
    holder, worker._listener = worker._listener, None
    assert host == "127.0.0.1" and taken > 0 and holder is not None
    with pytest.raises(UserError, match=f"master_port_range.*{taken}"):
        worker.bind_rendezvous("127.0.0.1", (taken, taken))
    _, other = worker.bind_rendezvous("127.0.0.1", (taken, min(taken + 50, 65535)))
    assert other > taken
    holder.close()
    assert worker._listener is not None
    worker._listener.close()

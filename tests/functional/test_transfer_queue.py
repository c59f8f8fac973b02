"""The shared plane over the real TransferQueue in a real Ray, started once for the module.

Several nodes and the Mooncake backend are not covered: neither fits on one machine without its package.
"""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
import torch
from tensordict import TensorDict

from nemo_rl.data_plane.adapters.transfer_queue import PlaneUnansweredError, TQDataPlaneClient
from nemo_rl.data_plane.codec import nest, to_tensordict
from nemo_rl.data_plane.column_io import kv_first_write, read_columns, write_columns
from nemo_rl.data_plane.control import ControlOnlyClient
from nemo_rl.data_plane.factory import build_data_plane_client, maybe_configure_data_plane_env
from nemo_rl.data_plane.interfaces import DataPlaneConfig, SimpleStorageConfig
from nemo_rl.data_plane.row_files import export_rows, import_rows
from nemo_rl.data_plane.schema import SC_ROLLOUT_SCHEMA_FIELDS
from nemo_rl.data_plane.traffic import PROCESS_TRAFFIC
from nemo_rl.distributed.virtual_cluster import ClusterConfig, RaySession, init_ray
from nemo_rl.utils.errors import UserError

CONFIG = DataPlaneConfig(simple=SimpleStorageConfig(num_storage_units=2), claim_meta_poll_interval_s=0.02)
BF16_BITS = [0x4049, 0x3A83, 0x4789, 0x7F62, 0x8000, 0x7FC1]  # pi, 0.001, 70144, 3e38, -0.0, a NaN


@pytest.fixture(scope="module")
def session() -> Iterator[RaySession]:
    maybe_configure_data_plane_env(CONFIG)
    with init_ray(ClusterConfig(gpus_per_node=2, oversubscribe=True)) as started:
        yield started


@pytest.fixture(scope="module")
def plane(session: RaySession) -> Iterator[TQDataPlaneClient]:
    early = CONFIG.model_copy(update={"attach_timeout_s": 0.3})
    with pytest.raises(UserError, match=r"no data plane was started .* within 0\.3 s"):
        TQDataPlaneClient(early, bootstrap=False)
    client = TQDataPlaneClient(CONFIG, bootstrap=True)
    yield client
    client.close()


@pytest.fixture
def train(plane: TQDataPlaneClient) -> Iterator[TQDataPlaneClient]:
    plane.register_partition("train", ["input_ids", "values"], 8, ["prev_lp", "train"])
    yield plane
    plane.clear_samples(None, "train")
    assert plane.list_sample_ids("train") == []


def rows_of(*values: int) -> TensorDict:
    return TensorDict({"input_ids": torch.tensor(values)}, [len(values)])


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.contiguous().view(-1).view(torch.uint8).tolist()


@ray.remote(num_cpus=0)
class Process:
    """A process of its own with a client that attaches."""

    def __init__(self, control_only: bool = False) -> None:
        client = build_data_plane_client(CONFIG, bootstrap=False)
        self.client = ControlOnlyClient(client) if control_only else client

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.client, method)(*args, **kwargs)

    def write(self, sample_ids: list[str], column: str, value: float) -> None:
        rows = nest([torch.full((n + 1,), value) for n in range(len(sample_ids))])
        self.client.put_samples(sample_ids, "train", TensorDict({column: rows}, [len(sample_ids)]))

    def sums(self, sample_ids: list[str], column: str) -> list[float]:
        rows = self.client.get_samples(sample_ids, "train", [column])[column]
        return [float(row.sum()) for row in rows.unbind()]

    def traffic(self) -> dict[str, int]:
        # The class travels by value, and with it whatever it names of this module; the counter wanted is that there.
        from nemo_rl.data_plane.traffic import PROCESS_TRAFFIC as REMOTE_TRAFFIC

        return REMOTE_TRAFFIC.snapshot()


@pytest.fixture(scope="module")
def processes(plane: TQDataPlaneClient) -> Iterator[list[Any]]:
    """Two processes that attach to the plane as workers do."""
    started = [Process.remote(), Process.remote()]
    yield started
    ray.get([process.call.remote("close") for process in started], timeout=60)
    for process in started:
        ray.kill(process)


def test_b28_clear_read_and_put_again(train: TQDataPlaneClient) -> None:
    train.put_samples(list("abcd"), "train", rows_of(1, 2, 3, 4))
    train.clear_samples(["b"], "train")
    train.clear_samples(["b"], "train")
    start = time.monotonic()
    with pytest.raises(KeyError, match=r"'train' has no rows \['b'\]"):
        train.get_samples(["a", "b", "c"], "train", ["input_ids"])
    with pytest.raises(KeyError, match=r"'train' has no column 'values', .* not been written for rows \['a', 'c'\]"):
        train.get_samples(["a", "c"], "train", ["input_ids", "values"])
    train.put_samples(["c"], "train", TensorDict({"values": torch.ones(1)}, [1]))
    with pytest.raises(KeyError, match=r"'values', .* not been written for rows \['a'\]"):
        train.get_samples(["a", "c"], "train", ["values"])
    with pytest.raises(KeyError, match=r"'nope' has no rows \['a'\]"):
        train.get_samples(["a"], "nope", ["input_ids"])
    train.clear_samples(None, "nope")
    train.clear_samples(["a"], "nope")
    assert time.monotonic() - start < 5
    assert train.list_sample_ids("nope") == []
    train.put_samples(["b"], "train", rows_of(20))
    assert train.get_samples(["b"], "train", ["input_ids"])["input_ids"].tolist() == [20]
    assert train.get_samples(["d", "a"], "train", ["input_ids"])["input_ids"].tolist() == [4, 1]
    assert train.get_samples(["d", "a", "d"], "train", ["input_ids"])["input_ids"].tolist() == [4, 1, 4]
    assert train.list_sample_ids("train") == ["a", "b", "c", "d"]
    train.clear_samples(list("abcd"), "train")
    assert train.list_sample_ids("train") == []


@pytest.mark.parametrize("lengths", [[3, 3], [3, 5], [3, 0]])
def test_b29_what_goes_in_comes_out(train: TQDataPlaneClient, lengths: list[int]) -> None:
    halves = torch.tensor(BF16_BITS, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    columns = {
        "input_ids": nest([torch.arange(n) + 2**53 + 1 for n in lengths]),
        "values": nest([halves[:n] for n in lengths]),
        "features": nest([torch.randn(n, 2) for n in lengths]),
        "wide": halves.view(2, 3),
        "count": torch.tensor([2**53 + 1, -1]),
        "flag": torch.tensor([True, False]),
        "text": ["a\u2028b", ""],
    }
    train.put_samples(["a", "b"], "train", to_tensordict(columns, batch_size=2))
    back = train.get_samples(["b", "a"], "train", list(columns))
    assert back.get("text").tolist() == ["", "a\u2028b"]
    del columns["text"]
    for name, column in columns.items():
        got = back.get(name)
        assert got.is_nested == column.is_nested, name
        for row, expected in zip(got.unbind(), reversed(column.unbind()), strict=True):
            assert (row.dtype, row.shape, bits(row)) == (expected.dtype, expected.shape, bits(expected)), name
    got.zero_()
    assert train.get_samples(["a"], "train", ["flag"])["flag"].tolist() == [True]


def test_b30_a_wait_ends_and_says_what_is_missing(train: TQDataPlaneClient, processes: list[Any]) -> None:
    train.put_samples(list("abcdef"), "train", rows_of(1, 2, 3, 4, 5, 6))
    start = time.monotonic()
    with pytest.raises(TimeoutError, match=r"'train', task 'train': 6 of 8 rows have \['input_ids'\] after 2 s"):
        train.claim_meta("train", "train", ["input_ids"], 8, timeout_s=2)
    assert time.monotonic() - start < 5
    with pytest.raises(TimeoutError, match=r"0 of 6 rows .* 6 rows are there, .* nobody wrote: \['values'\]"):
        train.claim_meta("train", "train", ["values"], 6, timeout_s=0.2)
    assert train.claim_meta("train", "train", ["input_ids"], 8, blocking=False).size == 0
    with pytest.raises(KeyError, match="no task 'other'"):
        train.claim_meta("train", "other", ["input_ids"], 1)
    with pytest.raises(KeyError, match="no partition 'nope'"):
        train.claim_meta("nope", "train", ["input_ids"], 1)

    claim = processes[0].call.remote("claim_meta", "train", "train", ["input_ids"], 8, timeout_s=60)
    train.put_samples(["g"], "train", rows_of(7), tags=[{"input_lengths": 1}])
    train.finish_partition("train")
    assert sorted(ray.get(claim, timeout=60).sample_ids) == list("abcdefg")
    assert train.claim_meta("train", "train", ["input_ids"], 8).size == 0
    assert train.check_consumption_status("train", ["train"])
    assert not train.check_consumption_status("train", ["train", "prev_lp"])


def test_several_processes_share_rows_and_cursors(train: TQDataPlaneClient, processes: list[Any]) -> None:
    writer, reader = processes
    ids = [f"g{i}" for i in range(8)]
    ray.get([writer.write.remote(ids, "input_ids", 1.0), reader.write.remote(ids, "values", 2.0)], timeout=60)
    assert ray.get(reader.sums.remote(ids[::-1], "input_ids"), timeout=60) == [float(n) for n in range(8, 0, -1)]
    assert ray.get(writer.sums.remote(["g3"], "values"), timeout=60) == [8.0]
    claims = [
        process.call.remote("claim_meta", "train", "prev_lp", ["input_ids", "values"], 2)
        for process in (writer, reader, writer, reader)
    ]
    assert sorted(name for meta in ray.get(claims, timeout=60) for name in meta.sample_ids) == ids
    assert train.check_consumption_status("train", ["prev_lp"])
    with pytest.raises(UserError, match="a data plane runs in this Ray job already"):
        TQDataPlaneClient(CONFIG, bootstrap=True)


def test_the_stages_of_a_step(train: TQDataPlaneClient) -> None:
    batch = {
        "input_ids": torch.tensor([[1, 2, 3], [4, 5, 9]]),
        "input_lengths": torch.tensor([3, 2]),
        "token_mask": torch.ones(2, 3),
        "total_reward": torch.tensor([1.0, 0.0]),
    }
    tags = [{"weight_version": 1, "input_lengths": 3}, {"weight_version": 1, "input_lengths": 2}]
    meta = kv_first_write(batch, sample_ids=["a", "b"], dp_client=train, partition_id="train", tags=tags)
    assert (meta.sequence_lengths, meta.tags) == ([3, 2], tags)
    write_columns(train, meta, fields={"values": torch.tensor([[0.0, 1.0, 2.0], [0.0, 3.0, 7.0]])})
    train.put_samples(["b"], "train", tags=[{"reward": 0.5}])
    found = train.get_meta(["b", "a"], "train")
    assert found.tags == [{**tags[1], "reward": 0.5}, tags[0]]
    assert (found.sequence_lengths, set(found.fields or [])) == ([2, 3], {*batch, "values"})
    back = read_columns(train, found, select_fields=["input_ids", "values", "total_reward"])
    assert back["input_ids"].tolist() == [[4, 5, 0], [1, 2, 3]]
    assert back["values"].tolist() == [[0.0, 3.0, 0.0], [0.0, 1.0, 2.0]]
    assert back["total_reward"].tolist() == [0.0, 1.0]


def test_rows_go_to_files_and_back(train: TQDataPlaneClient, tmp_path: Path) -> None:
    fields = {"input_ids": nest([torch.arange(3), torch.arange(0)]), "text": ["x", "\u2028"], "n": torch.ones(2)}
    tags = [{"input_lengths": 3}, {"input_lengths": 0}]
    train.put_samples(["a", "b"], "train", to_tensordict(fields, batch_size=2), tags)
    export_rows(train, ["b", "a"], "train", tmp_path)
    train.clear_samples(["a", "b"], "train")
    meta = import_rows(train, tmp_path)
    assert (meta.sample_ids, meta.tags) == (["b", "a"], tags[::-1])
    back = train.get_samples(["a", "b"], "train", list(fields))
    assert [row.tolist() for row in back["input_ids"].unbind()] == [[0, 1, 2], []]
    assert (back.get("text").tolist(), back["n"].tolist()) == (["x", "\u2028"], [1.0, 1.0])


def test_no_columns_pass_through_a_controller(train: TQDataPlaneClient) -> None:
    controller = Process.remote(control_only=True)
    written = PROCESS_TRAFFIC.snapshot()["bytes_written"]
    declared = controller.call.remote("register_partition", "train", SC_ROLLOUT_SCHEMA_FIELDS, 2, ["train"])
    ray.get(declared, timeout=60)
    train.put_samples(["a", "b"], "train", rows_of(1, 2))
    assert PROCESS_TRAFFIC.snapshot()["bytes_written"] == written + 16
    assert ray.get(controller.call.remote("list_sample_ids", "train"), timeout=60) == ["a", "b"]
    meta = ray.get(controller.call.remote("claim_meta", "train", "train", ["input_ids"], 2), timeout=60)
    assert ray.get(controller.call.remote("check_consumption_status", "train", ["train"]), timeout=60)
    with pytest.raises(RuntimeError, match="the controller moves metadata only"):
        ray.get(controller.call.remote("get_data", meta), timeout=60)
    ray.get(controller.call.remote("clear_samples", ["a", "b"], "train"), timeout=60)
    assert train.list_sample_ids("train") == []
    assert ray.get(controller.traffic.remote(), timeout=60) == {"bytes_written": 0, "bytes_read": 0}
    ray.kill(controller)


def test_refused_calls(train: TQDataPlaneClient) -> None:
    with pytest.raises(ValueError, match="neither columns nor tags"):
        train.put_samples(["a"], "train")
    with pytest.raises(ValueError, match="2 rows for 1 sample ids"):
        train.put_samples(["a"], "train", rows_of(1, 2))
    with pytest.raises(ValueError, match="more than once"):
        train.put_samples(["a", "a"], "train", rows_of(1, 2))
    with pytest.raises(ValueError, match="0 rows and columns"):
        train.get_samples([], "train", ["input_ids"])
    with pytest.raises(ValueError, match="a claim of 1 rows with"):
        train.claim_meta("train", "train", [], 1)
    train.put_samples(["a"], "train", rows_of(1))
    train.put_samples(["b"], "train", TensorDict({"input_ids": torch.ones(1)}, [1]))
    with pytest.raises(ValueError, match="written as dense:float32: and as dense:int64:"):
        train.get_samples(["a", "b"], "train", ["input_ids"])
    assert train.put_samples([], "train", tags=[]).size == 0


def test_memory_stays_flat(train: TQDataPlaneClient) -> None:
    assert train._actors is not None
    actors = [*train._actors.storage, train._actors.controller]
    ids = [f"r{i}" for i in range(64)]
    fields = TensorDict({f"c{i}": nest([torch.zeros(1024)] * 64) for i in range(4)}, [64])  # 1 MB a round

    def megabytes() -> list[float]:
        return [rss / 2**20 for rss in ray.get([actor.__ray_call__.remote(_rss) for actor in actors], timeout=60)]

    def run(rounds: int) -> None:
        for _ in range(rounds):
            train.put_samples(ids, "train", fields, tags=[{"input_lengths": 1024}] * 64)
            train.get_samples(ids, "train", list(fields.keys()))
            train.clear_samples(ids, "train")

    run(10)
    before = megabytes()
    run(40)
    grown = [after - start for after, start in zip(megabytes(), before, strict=True)]
    assert max(grown) < 8, f"{grown} MB after 40 MB went through"


def test_what_listens_listens_on_loopback(train: TQDataPlaneClient) -> None:
    assert train._actors is not None
    actors = {train._actors.controller: 2, **dict.fromkeys(train._actors.storage, 1)}
    own = {"request_handle_socket", "handshake_socket", "put_get_socket"}
    for actor, count in actors.items():
        ports = ray.get(actor.__ray_call__.remote(lambda self: self.zmq_server_info.ports), timeout=60)
        assert ports.keys() <= own and len(ports) == count
        pid = ray.get(actor.__ray_call__.remote(lambda self: os.getpid()), timeout=60)
        bound = [c.laddr for c in psutil.Process(pid).net_connections("tcp") if c.status == psutil.CONN_LISTEN]
        assert all(address.ip.startswith("127.") for address in bound if address.port in ports.values())
        assert set(ports.values()) <= {address.port for address in bound}


OTHER_JOB = """
import os, sys
import ray
from nemo_rl.data_plane.adapters.transfer_queue import TQDataPlaneClient
from nemo_rl.data_plane.interfaces import DataPlaneConfig
ray.init(address=sys.argv[1], log_to_driver=False)
client = TQDataPlaneClient(DataPlaneConfig(), bootstrap=True)
print("sees", client.list_sample_ids("train"))
client.put_samples(["b"], "train", tags=[{"k": 1}])
client.close()
"""


@pytest.mark.slow
def test_another_run_in_the_same_cluster_has_a_plane_of_its_own(train: TQDataPlaneClient, session: RaySession) -> None:
    train.put_samples(["a"], "train", rows_of(1))
    command = [sys.executable, "-c", OTHER_JOB, session.address]
    other = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert other.stdout.splitlines()[-1:] == ["sees []"], other.stderr
    assert train.list_sample_ids("train") == ["a"]


PLAIN_RAY = """
import ray
from nemo_rl.data_plane.adapters.transfer_queue import TQDataPlaneClient
from nemo_rl.data_plane.interfaces import DataPlaneConfig
ray.init(address="local", include_dashboard=False, log_to_driver=False)
for loopback_only in (None, False):
    client = TQDataPlaneClient(DataPlaneConfig(loopback_only=loopback_only), bootstrap=True)
    attached = TQDataPlaneClient(DataPlaneConfig(), bootstrap=False)
    attached.put_samples(["a"], "train", tags=[{}])
    units = client._queue.storage_manager.storage_unit_infos.values()
    print("listens", client._where.partition(":")[0], *[unit.ip for unit in units], client.list_sample_ids("train"))
    client.close()
print("node", ray.nodes()[0]["NodeManagerAddress"])
"""


@pytest.mark.slow
def test_loopback_where_the_node_has_a_public_address() -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    command = [sys.executable, "-c", PLAIN_RAY]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, env=environment)
    closed, open_, node = done.stdout.splitlines()[-3:]
    address = node.removeprefix("node ")
    assert closed == "listens 127.0.0.1 127.0.0.1 ['a']", done.stderr
    assert open_ == f"listens {address} {address} ['a']", "each plane starts empty, and without close the process ends"


def test_a_dead_actor_ends_every_wait_and_a_new_plane_can_follow(plane: TQDataPlaneClient) -> None:
    """The last of the module: it ends the plane. What attached to it closes without it."""
    plane.put_samples(["a"], "train", rows_of(1))
    impatient = TQDataPlaneClient(CONFIG.model_copy(update={"ack_timeout_ms": 1000}), bootstrap=False)
    assert plane._actors is not None
    for unit in plane._actors.storage:
        _kill(unit)
    start = time.monotonic()
    with pytest.raises(PlaneUnansweredError, match=r"read of partition 'train' got no answer within 1 s .* is alive"):
        impatient.get_samples(["a"], "train", ["input_ids"])
    _kill(plane._actors.controller)
    with pytest.raises(PlaneUnansweredError, match=r"list of partition 'train' got no answer .* has ended"):
        impatient.list_sample_ids("train")
    assert time.monotonic() - start < 10
    impatient.close()
    plane.close()
    plane.close()
    with pytest.raises(RuntimeError, match="the data plane is closed"):
        plane.list_sample_ids("train")
    following = TQDataPlaneClient(DataPlaneConfig(), bootstrap=True)
    assert following.list_sample_ids("train") == []
    following.close()


def _kill(actor: Any) -> None:
    """Ray's own call returns before the process is gone, which may answer once more."""
    pid = ray.get(actor.__ray_call__.remote(lambda self: os.getpid()), timeout=60)
    ray.kill(actor)
    psutil.wait_procs([psutil.Process(pid)] if psutil.pid_exists(pid) else [], timeout=30)
    assert not psutil.pid_exists(pid)


def _rss(actor: Any) -> int:
    return psutil.Process().memory_info().rss

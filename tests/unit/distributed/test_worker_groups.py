"""Worker groups on real Ray actors, and the dispatch rules on a 16-worker layout with recorded calls.

More than one node is not covered, nor are GPUs.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from ray import cloudpickle

from nemo_rl.distributed.config import available_cores
from nemo_rl.distributed.named_sharding import REPLICATED_AXES, NamedSharding
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl.distributed.worker_groups import RayWorkerBuilder, RayWorkerGroup
from nemo_rl.distributed.worker_start import place_workers
from nemo_rl.utils.errors import UserError

AXES = ["pipeline_parallel", "data_parallel", "context_parallel", "tensor_parallel"]


class RecordingGroup(RayWorkerGroup):
    """A group whose calls are recorded in place of the actors: a ref is (rank, keyword arguments)."""

    def __init__(self, sharding: NamedSharding | None, size: int):
        cluster = RayVirtualCluster([size], use_gpus=False)
        self.cluster, self.name_prefix, self.sharding_annotations = cluster, "w", sharding
        self._metadata = place_workers(cluster.bundle_ct_per_node_list, "w")
        self._workers = []

    def run_single_worker_single_data(self, method_name: str, worker_idx: int, **kwargs: Any) -> Any:
        return worker_idx, kwargs

    def _share(self, kwargs: Any) -> dict[str, Any]:
        return dict(kwargs)


@pytest.fixture
def grid() -> RecordingGroup:
    """PP 2 x DP 2 x CP 2 x TP 2: rank = 8 pp + 4 dp + 2 cp + tp."""
    return RecordingGroup(NamedSharding(np.arange(16).reshape(2, 2, 2, 2), AXES), 16)


def test_single_data_reaches_everyone_or_the_leaders(grid: RecordingGroup) -> None:
    assert grid.run_all_workers_single_data("m", x=1) == [(rank, {"x": 1}) for rank in range(16)]
    leaders = grid.run_all_workers_single_data("m", run_rank_0_only_axes=list(REPLICATED_AXES), x=1)
    assert leaders == [(0, {"x": 1}), (4, {"x": 1})]
    assert grid.dp_size == 2 and [grid.get_dp_leader_worker_idx(i) for i in range(2)] == [0, 4]
    with pytest.raises(IndexError):
        grid.get_dp_leader_worker_idx(2)
    with pytest.raises(TypeError):
        grid.run_all_workers_single_data("m", 1)


def test_multiple_data_goes_to_the_started_workers_in_turn(grid: RecordingGroup) -> None:
    calls = grid.run_all_workers_multiple_data(
        "m", run_rank_0_only_axes=list(REPLICATED_AXES), common_kwargs={"c": 9}, x=["a", "b"], y=[1, 2]
    )
    assert calls == [(0, {"x": "a", "y": 1, "c": 9}), (4, {"x": "b", "y": 2, "c": 9})]
    with pytest.raises(AssertionError, match="16 workers"):
        grid.run_all_workers_multiple_data("m", x=["a", "b"])
    with pytest.raises(AssertionError, match="no list"):
        grid.run_all_workers_multiple_data("m", common_kwargs={"c": 9})


def test_sharded_data_follows_the_coordinates(grid: RecordingGroup) -> None:
    future = grid.run_all_workers_sharded_data(
        "m",
        in_sharded_axes=["data_parallel"],
        replicate_on_axes=["tensor_parallel", "context_parallel", "pipeline_parallel"],
        output_is_replicated=["tensor_parallel", "context_parallel", "pipeline_parallel"],
        common_kwargs={"c": 9},
        x=["a", "b"],
    )
    assert future.futures == [(rank, {"x": "ab"[rank // 4 % 2], "c": 9}) for rank in range(16)]
    assert future.called_workers == list(range(16)) and future.return_from_workers == [0, 4]


def test_sharded_data_on_two_axes_is_indexed_in_the_given_order(grid: RecordingGroup) -> None:
    # Free axes: pipeline and tensor; only their coordinate 0 is called.
    x = [["c0d0", "c0d1"], ["c1d0", "c1d1"]]
    future = grid.run_all_workers_sharded_data("m", in_sharded_axes=["context_parallel", "data_parallel"], x=x)
    assert future.futures == [
        (0, {"x": "c0d0"}),
        (2, {"x": "c1d0"}),
        (4, {"x": "c0d1"}),
        (6, {"x": "c1d1"}),
    ]
    assert future.return_from_workers == future.called_workers == [0, 2, 4, 6]


def test_dummy_calls_reach_the_free_axes(grid: RecordingGroup) -> None:
    future = grid.run_all_workers_sharded_data(
        "m",
        in_sharded_axes=["data_parallel"],
        replicate_on_axes=["pipeline_parallel", "context_parallel"],
        output_is_replicated=["pipeline_parallel", "context_parallel"],
        make_dummy_calls_to_free_axes=True,
        common_kwargs={"c": 9},
        x=["a", "b"],
    )
    for rank, kwargs in future.futures:
        assert kwargs == {"x": "ab"[rank // 4 % 2] if rank % 2 == 0 else None, "c": 9}
    assert future.called_workers == list(range(16)) and future.return_from_workers == [0, 4]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"in_sharded_axes": ["data"]}, "unknown axes"),
        ({"output_is_replicated": ["data"]}, "unknown axes"),
        ({"in_sharded_axes": ["data_parallel"], "replicate_on_axes": ["data_parallel"]}, "both sharded and replicated"),
    ],
)
def test_refused_axes(grid: RecordingGroup, options: dict, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        grid.run_all_workers_sharded_data("m", x=[1, 2], **options)


def test_without_annotations_every_worker_leads() -> None:
    group = RecordingGroup(None, 3)
    assert group.dp_size == 3 and group.get_dp_leader_worker_idx(2) == 2
    assert len(group.run_all_workers_single_data("m", run_rank_0_only_axes=list(REPLICATED_AXES))) == 3
    with pytest.raises(ValueError, match="sharding_annotations"):
        group.run_all_workers_sharded_data("m", x=[1])


def test_places_must_exist() -> None:
    cluster = RayVirtualCluster([2, 2], use_gpus=False)
    with pytest.raises(UserError, match="no place 2 on node 1"):
        RayWorkerGroup(cluster, RayWorkerBuilder("x.Y"), workers_per_node=[2, 3])
    with pytest.raises(UserError, match="no place 0 on node 2"):
        RayWorkerGroup(cluster, RayWorkerBuilder("x.Y"), bundle_indices_list=[(2, [0])])
    with pytest.raises(UserError, match="3 ranks, the group 4"):
        RayWorkerGroup(
            cluster, RayWorkerBuilder("x.Y"), sharding_annotations=NamedSharding([0, 1, 2], ["data_parallel"])
        )


def test_a_group_of_four_works_together(make_group: Callable[..., RayWorkerGroup]) -> None:
    sharding = NamedSharding([[0, 1], [2, 3]], ["data_parallel", "tensor_parallel"])
    group = make_group("TorchWorker", workers=4, sharding_annotations=sharding)
    assert [m.name for m in group.worker_metadata] == ["w-0", "w-1", "w-2", "w-3"]
    assert len({m.pid for m in group.worker_metadata}) == 4
    assert group.get_all_worker_results(group.run_all_workers_single_data("ping")) == [0, 1, 2, 3]
    sums = group.run_all_workers_sharded_data(
        "sum_of",
        in_sharded_axes=["data_parallel"],
        replicate_on_axes=["tensor_parallel"],
        output_is_replicated=["tensor_parallel"],
        value=[1.0, 10.0],
    )
    # 1 * 1 + 1 * 2 + 10 * 3 + 10 * 4
    assert sums.get_results(group, reason="sum") == [73.0, 73.0]
    threads = group.get_all_worker_results(group.run_all_workers_single_data("threads"))
    assert threads == [max(1, available_cores() // 4)] * 4

    copy = cloudpickle.loads(cloudpickle.dumps(group))
    assert copy.get_all_worker_results(copy.run_all_workers_single_data("ping")) == [0, 1, 2, 3]
    assert group.shutdown(cleanup_method="shutdown", timeout=20) is True
    assert group.shutdown() is True, "twice is fine"


def test_the_environment_of_workers(make_group: Callable[..., RayWorkerGroup]) -> None:
    group = make_group("PlainWorker", env_vars={"TOKENIZERS_PARALLELISM": "true", "MINE": "1"})
    names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "NODE_RANK", "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "MINE"]
    found = group.get_all_worker_results(group.run_all_workers_single_data("environment", names=names))
    share = str(max(1, available_cores() // 2))
    for rank, values in enumerate(found):
        assert list(values.values()) == [str(rank), "2", str(rank), "0", share, "lo", "1"]
    refs = group.run_all_workers_single_data("environment", names=["TOKENIZERS_PARALLELISM"])
    assert group.get_all_worker_results(refs)[0] == {"TOKENIZERS_PARALLELISM": "true"}, "env_vars are stronger"


def test_arguments_reach_the_worker_whatever_their_name(make_group: Callable[..., RayWorkerGroup]) -> None:
    group = make_group("PlainWorker")
    refs = group.run_all_workers_single_data("echo", kwargs=1, args=[1, 2], big=np.arange(3))
    for rank, (seen_rank, kwargs) in enumerate(group.get_all_worker_results(refs)):
        assert (
            seen_rank == rank
            and (kwargs["kwargs"], kwargs["args"]) == (1, [1, 2])
            and kwargs["big"].tolist() == [0, 1, 2]
        )


def test_part_of_the_places(make_group: Callable[..., RayWorkerGroup]) -> None:
    group = make_group("PlainWorker", workers=None, bundle_indices_list=[(0, [3, 1])])
    assert [(m.rank, m.local_rank) for m in group.worker_metadata] == [(0, 3), (1, 1)]
    found = group.get_all_worker_results(group.run_all_workers_single_data("environment", names=["RANK", "LOCAL_RANK"]))
    assert [list(values.values()) for values in found] == [["0", "3"], ["1", "1"]]


def test_a_constructor_that_fails_leaves_no_worker(cluster: RayVirtualCluster) -> None:
    builder = RayWorkerBuilder("distributed_workers.PlainWorker", fail_on_rank=1)
    with pytest.raises(UserError, match=r"^rank 1 \(w-1.*\): model_dir: no config.json in it$"):
        RayWorkerGroup(cluster, builder, workers_per_node=2, name_prefix="w")


@pytest.mark.parametrize("name", ["no_such_module.Worker", "distributed_workers.Nope", "os.path", "Worker"])
def test_a_class_that_can_not_be_imported(cluster: RayVirtualCluster, name: str) -> None:
    with pytest.raises(UserError, match=f"worker class {name} "):
        RayWorkerGroup(cluster, RayWorkerBuilder(name), workers_per_node=1)

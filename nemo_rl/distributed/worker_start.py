"""Starting the workers of a group: where each one goes, its process, its object, and the process group of all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray import ObjectRef, cloudpickle
from ray.actor import ActorHandle

from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl.distributed.waits import wait_for
from nemo_rl.distributed.worker_host import HostReport, WorkerHost
from nemo_rl.utils.errors import UserError


class RayWorkerBuilder:
    """What to construct in each worker process: a plain class by dotted name, and its arguments.

    The class is imported in the worker process only, so that the caller needs none of its imports.
    """

    def __init__(self, worker_class_fqn: str, *args: Any, **kwargs: Any):
        self.worker_class_fqn = worker_class_fqn
        self.args = args
        self.kwargs = kwargs


@dataclass(frozen=True)
class WorkerMetadata:
    """Who a worker is and where it runs.

    Attributes:
        name: `<prefix>-<rank>`.
        rank: 0-based, over the group.
        local_rank: 0-based, among the group's workers of its node.
        node: 0-based node of the virtual cluster.
        node_ip: the node's address; empty until the process has started, as are the next two.
        pid: the worker's process.
        actor_id: Ray's id of the actor, in hex.
    """

    name: str
    rank: int
    local_rank: int
    node: int
    node_ip: str = ""
    pid: int = 0
    actor_id: str = ""

    def __str__(self) -> str:
        place = f", pid {self.pid} on {self.node_ip}" if self.pid else ""
        return f"rank {self.rank} ({self.name}{place})"


def place_workers(
    places: Sequence[int],
    name_prefix: str,
    workers_per_node: int | Sequence[int] | None = None,
    bundle_indices_list: Sequence[tuple[int, Sequence[int]]] | None = None,
) -> list[WorkerMetadata]:
    """Name, rank and place of each worker, ranks counted node by node.

    Args:
        places: places on each node of the cluster.
        workers_per_node: workers on each node, or one number per node; None takes every place.
        bundle_indices_list: (node, local ranks) groups that take the place of `workers_per_node`.

    Raises:
        UserError: a place that the cluster does not have.
    """
    if bundle_indices_list is None:
        if workers_per_node is None:
            workers_per_node = places
        elif isinstance(workers_per_node, int):
            workers_per_node = [workers_per_node] * len(places)
        bundle_indices_list = [(node, range(count)) for node, count in enumerate(workers_per_node)]
    spots = [(node, local) for node, locals_ in bundle_indices_list for local in locals_]
    for node, local in spots:
        if not (0 <= node < len(places) and 0 <= local < places[node]):
            raise UserError(f"{name_prefix}: no place {local} on node {node}; the cluster has {list(places)} per node")
    return [
        WorkerMetadata(f"{name_prefix}-{rank}", rank=rank, local_rank=local, node=node)
        for rank, (node, local) in enumerate(spots)
    ]


def start_workers(
    cluster: RayVirtualCluster,
    builder: RayWorkerBuilder,
    metadata: Sequence[WorkerMetadata],
    env_vars: Mapping[str, str],
) -> tuple[list[ActorHandle], list[WorkerMetadata]]:
    """The actors, built and connected, and the metadata with their processes; both in rank order.

    Raises:
        UserError, RunError: see `wait_for`. No worker is left behind then.
    """
    host_class = ray.remote(WorkerHost)
    workers: list[Any] = []
    try:
        for worker in metadata:
            options: dict[str, Any] = {
                "num_cpus": 0,
                "num_gpus": cluster.gpu_share(),
                "scheduling_strategy": cluster.scheduling(worker.node),
            }
            on_node = sum(other.node == worker.node for other in metadata)
            env = {**_environment(worker, metadata, cluster.use_gpus), **env_vars}
            workers.append(host_class.options(**options).remote(env, on_node))
        reports: list[HostReport] = _wait(
            cluster, metadata, [worker.report.remote() for worker in workers], "worker processes"
        )
        started = [
            replace(worker, node_ip=report.node_ip, pid=report.pid, actor_id=report.actor_id)
            for worker, report in zip(metadata, reports, strict=True)
        ]
        arguments = ray.put(cloudpickle.dumps((builder.args, builder.kwargs)))
        built = [worker.build.remote(builder.worker_class_fqn, arguments) for worker in workers]
        if all(_wait(cluster, started, built, f"{builder.worker_class_fqn} to be built")):
            _connect(cluster, workers, started)
    except BaseException:
        for worker in workers:
            ray.kill(worker)
        raise
    return workers, started


def _connect(cluster: RayVirtualCluster, workers: list[Any], metadata: list[WorkerMetadata]) -> None:
    host = "127.0.0.1" if _on_one_node(metadata) else metadata[0].node_ip
    bound = workers[0].call.remote("bind_rendezvous", host=host, port_range=cluster.port_range)
    [(host, port)] = _wait(cluster, metadata, [bound], "rank 0 to listen")
    joined = [
        worker.call.remote("join_rendezvous", host=host, port=port, timeout_s=cluster.step_timeout_s)
        for worker in workers
    ]
    _wait(cluster, metadata, joined, "the process group")


def _wait(
    cluster: RayVirtualCluster, metadata: Sequence[WorkerMetadata], refs: list[ObjectRef], what: str
) -> list[Any]:
    """The results of `refs`, which belong to the first workers in rank order."""
    names = [str(worker) for worker in metadata[: len(refs)]]
    reason = f"start of {metadata[0].name.rpartition('-')[0]}, waiting for {what}"
    return wait_for(refs, reason=reason, timeout_s=cluster.start_timeout_s, names=names)


def _environment(worker: WorkerMetadata, group: Sequence[WorkerMetadata], use_gpus: bool) -> dict[str, str]:
    env = {
        "RANK": str(worker.rank),
        "WORLD_SIZE": str(len(group)),
        "LOCAL_RANK": str(worker.local_rank),
        "NODE_RANK": str(worker.node),
    }
    if _on_one_node(group):
        env["GLOO_SOCKET_IFNAME"] = "lo"
    if not use_gpus:
        env["CUDA_VISIBLE_DEVICES"] = ""
    return env


def _on_one_node(group: Sequence[WorkerMetadata]) -> bool:
    return len({worker.node for worker in group}) == 1

"""Room for workers on the nodes of a Ray cluster."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from nemo_rl.distributed.config import ClusterConfig, available_cores, check_cluster
from nemo_rl.distributed.ray_session import RaySession, init_ray
from nemo_rl.utils.errors import UserError

__all__ = [
    "ClusterConfig",
    "RaySession",
    "RayVirtualCluster",
    "available_cores",
    "check_cluster",
    "init_ray",
]

logger = logging.getLogger(__name__)

_REPORT_EVERY_S = 30.0
_POLL_S = 1.0
_REMOVAL_S = 5.0


class RayVirtualCluster:
    """A reservation of worker places: `bundle_ct_per_node_list[n]` of them on node `n`, each node a different machine.

    Reserved lazily, by the first `get_placement_groups()` or `scheduling(...)`. Picklable: a copy in another process
    uses the same reservation, and only the object that made it gives it back. Nothing is given back by garbage
    collection; a reservation also ends with the job of the process that made it.

    One Ray bundle stands for one node (`{"CPU": k}` or `{"GPU": k, "CPU": k}`) and bundles are strictly spread,
    which is the one way in Ray to get exactly `k` places on each of `n` machines.

    Args:
        bundle_ct_per_node_list: workers per node.
        use_gpus: reserve one GPU per worker.
        max_colocated_worker_groups: worker groups that share the places; a worker's GPU share is the inverse.
        num_gpus_per_node: upper bound of places per node when `use_gpus`; None for no bound.
        name: what the reservation is called in messages.
        port_range_low, port_range_high: ports for the rank-0 worker, inclusive; None lets the system choose.
        start_timeout_s: longest wait for the reservation, for worker processes and for their process group.
        step_timeout_s: longest wait for one call to the workers, unless the call says otherwise.

    Raises:
        UserError: counts below 1 or above `num_gpus_per_node`.
    """

    def __init__(
        self,
        bundle_ct_per_node_list: list[int],
        use_gpus: bool = True,
        max_colocated_worker_groups: int = 1,
        num_gpus_per_node: int | None = None,
        name: str = "",
        port_range_low: int | None = None,
        port_range_high: int | None = None,
        start_timeout_s: float = 600.0,
        step_timeout_s: float = 3600.0,
    ):
        if not bundle_ct_per_node_list or min(bundle_ct_per_node_list) < 1:
            raise UserError(
                f"bundle_ct_per_node_list: every node needs at least one worker, got {bundle_ct_per_node_list}"
            )
        if use_gpus and num_gpus_per_node is not None and max(bundle_ct_per_node_list) > num_gpus_per_node:
            raise UserError(
                f"bundle_ct_per_node_list: {bundle_ct_per_node_list} asks for more than num_gpus_per_node="
                f"{num_gpus_per_node}"
            )
        self.bundle_ct_per_node_list = list(bundle_ct_per_node_list)
        self.use_gpus = use_gpus
        self.max_colocated_worker_groups = max_colocated_worker_groups
        self.name = name
        self.port_range = (
            None if port_range_low is None or port_range_high is None else (port_range_low, port_range_high)
        )
        self.start_timeout_s = start_timeout_s
        self.step_timeout_s = step_timeout_s
        self._group: PlacementGroup | None = None
        self._is_creator = False

    @classmethod
    def from_config(
        cls, config: ClusterConfig, *, name: str = "", max_colocated_worker_groups: int = 1
    ) -> RayVirtualCluster:
        """The places that the `cluster` section asks for; GPUs when the connected Ray has any."""
        return cls(
            bundle_ct_per_node_list=[config.gpus_per_node] * config.num_nodes,
            use_gpus=ray.cluster_resources().get("GPU", 0) > 0,
            max_colocated_worker_groups=max_colocated_worker_groups,
            name=name,
            port_range_low=config.master_port_range_low,
            port_range_high=config.master_port_range_high,
            start_timeout_s=config.start_timeout_s,
            step_timeout_s=config.step_timeout_s,
        )

    def world_size(self) -> int:
        """The number of places over all nodes."""
        return sum(self.bundle_ct_per_node_list)

    def node_count(self) -> int:
        """The number of nodes."""
        return len(self.bundle_ct_per_node_list)

    def get_placement_groups(self) -> list[PlacementGroup]:
        """The reservation, made now if it isn't yet; one group whose bundle `n` is node `n`.

        Raises:
            UserError: the nodes did not have the room within `start_timeout_s`; names wanted and available per node.
        """
        if self._group is None:
            self._group = self._reserve()
            self._is_creator = True
        return [self._group]

    def scheduling(self, node: int) -> PlacementGroupSchedulingStrategy:
        """Where Ray has to start a worker of node `node`."""
        return PlacementGroupSchedulingStrategy(self.get_placement_groups()[0], placement_group_bundle_index=node)

    def gpu_share(self) -> float:
        """The part of a GPU that Ray books for one worker; 0.0 without GPUs."""
        return 1.0 / self.max_colocated_worker_groups if self.use_gpus else 0.0

    def shutdown(self) -> None:
        """Give the reservation back, if this object made it. May be called twice."""
        if self._group is not None and self._is_creator and ray.is_initialized():
            # In a thread, because Ray asks a control service that was killed again and again, a minute long. The
            # reservation ends with this process anyway.
            removal = threading.Thread(target=remove_placement_group, args=(self._group,), daemon=True)
            removal.start()
            removal.join(_REMOVAL_S)
        self._group = None
        self._is_creator = False

    def _reserve(self) -> PlacementGroup:
        bundles = [
            {"CPU": float(count), **({"GPU": float(count)} if self.use_gpus else {})}
            for count in self.bundle_ct_per_node_list
        ]
        group = placement_group(bundles, strategy="STRICT_SPREAD", name=self.name)
        started = time.monotonic()
        next_report = _REPORT_EVERY_S
        try:
            while not group.wait(_POLL_S):
                waited = time.monotonic() - started
                if waited > self.start_timeout_s:
                    raise UserError(f"{self._shortage()}; waited {waited:.0f} s (cluster.start_timeout_s)")
                if waited > next_report:
                    logger.warning("%s; waiting for %.0f s", self._shortage(), waited)
                    next_report += _REPORT_EVERY_S
        except BaseException:
            remove_placement_group(group)
            raise
        return group

    def _shortage(self) -> str:
        kind = "GPU" if self.use_gpus else "CPU"
        wanted = ", ".join(f"{count} {kind}" for count in self.bundle_ct_per_node_list)
        nodes = [node for node in ray.nodes() if node["Alive"]]
        available = "; ".join(_describe_node(node) for node in nodes)
        return (
            f"the cluster has no room for {self.name or 'the workers'}: wanted per node: {wanted} "
            f"(cluster.gpus_per_node, cluster.num_nodes); total per node: {available}; free now: "
            f"{_resources(ray.available_resources())}"
        )

    def __getstate__(self) -> dict[str, Any]:
        self.get_placement_groups()
        return {**self.__dict__, "_is_creator": False}


def _describe_node(node: dict[str, Any]) -> str:
    return f"{node['NodeManagerAddress']} has {_resources(node['Resources'])}"


def _resources(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{resources.get(kind, 0):g} {kind}" for kind in ("CPU", "GPU"))

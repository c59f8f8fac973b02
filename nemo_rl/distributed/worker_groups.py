"""A group of workers on a virtual cluster, and the rules by which a call is spread over them."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import ray
from ray import ObjectRef, cloudpickle
from ray.actor import ActorHandle

from nemo_rl.distributed.named_sharding import REPLICATED_AXES, NamedSharding
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl.distributed.waits import wait_for
from nemo_rl.distributed.worker_start import RayWorkerBuilder, WorkerMetadata, place_workers, start_workers
from nemo_rl.utils.errors import RunError, UserError

__all__ = ["MultiWorkerFuture", "RayWorkerBuilder", "RayWorkerGroup", "WorkerMetadata"]

logger = logging.getLogger(__name__)

# What is smaller travels with each call. A place in the object store costs every worker a trip to fetch it.
_INLINE_BYTES = 16 * 1024


@dataclass(frozen=True)
class MultiWorkerFuture:
    """The pending results of one sharded call.

    Attributes:
        futures: one ref per called worker, in rank order.
        called_workers: the ranks of those workers.
        return_from_workers: the ranks whose results are returned; the others' results are waited for and dropped.
    """

    futures: list[ObjectRef]
    called_workers: list[int]
    return_from_workers: list[int]

    def get_results(self, worker_group: RayWorkerGroup, *, reason: str, timeout_s: float | None = None) -> list[Any]:
        """The results of `return_from_workers`, in rank order; errors as in `wait_for`."""
        return worker_group.get_all_worker_results(self, reason=reason, timeout_s=timeout_s)


class RayWorkerGroup:
    """Workers of one class, one per place of the cluster, started and connected when the constructor returns.

    Each worker process has `RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `NODE_RANK`, its share of the node's cores in
    `OMP_NUM_THREADS`, and, on one node, `GLOO_SOCKET_IFNAME=lo`. A worker class with the two rendezvous methods of
    `DistributedWorker` gets its process group. Calls to a worker run one at a time, in the order they were made.
    Picklable: a copy in another process talks to the same workers.

    Args:
        workers_per_node: workers on each node, or one number per node; None takes every place.
        name_prefix: the workers are called `<name_prefix>-<rank>`.
        bundle_indices_list: (node, local ranks) groups that take the place of `workers_per_node`; ranks are
            assigned in that order.
        sharding_annotations: where each rank sits on the mesh axes; needed for dispatch by axis.
        env_vars: added to every worker's environment, and stronger than what the group sets.

    Raises:
        UserError: no room, more workers than places, a class that can't be imported, a constructor's UserError.
        RunError: a worker died or stayed silent while starting. No worker is left behind by a failed constructor.
    """

    def __init__(
        self,
        cluster: RayVirtualCluster,
        remote_worker_builder: RayWorkerBuilder,
        workers_per_node: int | list[int] | None = None,
        name_prefix: str = "",
        bundle_indices_list: list[tuple[int, list[int]]] | None = None,
        sharding_annotations: NamedSharding | None = None,
        env_vars: Mapping[str, str] | None = None,
    ):
        self.cluster = cluster
        self.name_prefix = name_prefix or remote_worker_builder.worker_class_fqn.rpartition(".")[2]
        self.sharding_annotations = sharding_annotations
        places = place_workers(cluster.bundle_ct_per_node_list, self.name_prefix, workers_per_node, bundle_indices_list)
        if sharding_annotations is not None and sharding_annotations.size != len(places):
            raise UserError(
                f"sharding_annotations hold {sharding_annotations.size} ranks, the group {len(places)} workers"
            )
        self._workers, self._metadata = start_workers(cluster, remote_worker_builder, places, env_vars or {})

    @property
    def workers(self) -> list[ActorHandle]:
        """The actors, in rank order; call them through the `run_*` methods."""
        return list(self._workers)

    @property
    def worker_metadata(self) -> list[WorkerMetadata]:
        """Name, rank and place of each worker, in rank order."""
        return list(self._metadata)

    @property
    def dp_size(self) -> int:
        """The number of model replicas; without annotations every worker is one."""
        if self.sharding_annotations is None:
            return len(self._metadata)
        return self.sharding_annotations.shape.get("data_parallel", 1)

    def get_dp_leader_worker_idx(self, dp_shard_idx: int) -> int:
        """The rank that leads replica `dp_shard_idx`; `IndexError` when there is no such replica."""
        if not 0 <= dp_shard_idx < self.dp_size:
            raise IndexError(f"replica {dp_shard_idx} of {self.dp_size}")
        if self.sharding_annotations is None:
            return dp_shard_idx
        names = self.sharding_annotations.names
        coords = {axis: 0 for axis in REPLICATED_AXES if axis in names}
        if "data_parallel" in names:
            coords["data_parallel"] = dp_shard_idx
        return self.sharding_annotations.get_ranks_by_coord(**coords)[0]

    def run_single_worker_single_data(self, method_name: str, worker_idx: int, **kwargs: Any) -> ObjectRef:
        """Call one worker."""
        return self._workers[worker_idx].call.remote(method_name, **kwargs)

    def run_all_workers_single_data(
        self, method_name: str, *, run_rank_0_only_axes: Sequence[str] | None = None, **kwargs: Any
    ) -> list[ObjectRef]:
        """Call the workers with the same arguments, large ones placed once in the object store; refs in rank order.

        Args:
            run_rank_0_only_axes: workers whose coordinate on any of these axes is above 0 are not called.
        """
        shared = self._share(kwargs)
        return [
            self.run_single_worker_single_data(method_name, rank, **shared)
            for rank in self._ranks_at_zero(run_rank_0_only_axes)
        ]

    def run_all_workers_multiple_data(
        self,
        method_name: str,
        *,
        run_rank_0_only_axes: Sequence[str] | None = None,
        common_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Sequence[Any],
    ) -> list[ObjectRef]:
        """Call the workers, the i-th called one with the i-th element of each list; refs in rank order.

        Args:
            run_rank_0_only_axes: workers whose coordinate on any of these axes is above 0 are not called.
            common_kwargs: further arguments, the same for all.
        """
        ranks = self._ranks_at_zero(run_rank_0_only_axes)
        assert kwargs, f"{method_name}: no list to spread over the workers"
        lengths = {name: len(values) for name, values in kwargs.items()}
        assert set(lengths.values()) == {len(ranks)}, f"{method_name}: {len(ranks)} workers, but lists of {lengths}"
        shared = self._share(common_kwargs or {})
        return [
            self.run_single_worker_single_data(
                method_name, rank, **{name: values[i] for name, values in kwargs.items()}, **shared
            )
            for i, rank in enumerate(ranks)
        ]

    def run_all_workers_sharded_data(
        self,
        method_name: str,
        *,
        in_sharded_axes: Sequence[str] | None = None,
        replicate_on_axes: Sequence[str] | None = None,
        output_is_replicated: Sequence[str] | None = None,
        make_dummy_calls_to_free_axes: bool = False,
        common_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> MultiWorkerFuture:
        """Call the workers, each with its part of every argument.

        Args:
            in_sharded_axes: each argument is a nested list, indexed by the worker's coordinates on these axes in this
                order.
            replicate_on_axes: all workers along these axes get the same part. On the remaining, free axes only the
                workers at 0 are called.
            output_is_replicated: of the workers along these axes, only those at 0 return their results.
            make_dummy_calls_to_free_axes: call the other workers of the free axes too, with None for each argument.
            common_kwargs: further arguments, the same for all, dummy calls included.

        Raises:
            ValueError: no annotations, an unknown axis, an axis both sharded and replicated.
        """
        sharded, replicated = list(in_sharded_axes or []), list(replicate_on_axes or [])
        free = self._free_axes(sharded, replicated, list(output_is_replicated or []))
        shared = self._share(common_kwargs or {})
        # A part that goes to several workers is placed once.
        copies = len(self._metadata) > len({tuple(self._coords(m.rank)[a] for a in sharded) for m in self._metadata})
        placed: dict[tuple[str, tuple[int, ...]], Any] = {}
        futures, called, returning = [], [], []
        for metadata in self._metadata:
            coords = self._coords(metadata.rank)
            at_zero = NamedSharding.is_axis_zero(coords, free)
            if not at_zero and not make_dummy_calls_to_free_axes:
                continue
            index = tuple(coords[axis] for axis in sharded)
            arguments: dict[str, Any] = dict.fromkeys(kwargs)
            if at_zero:
                for name, nested in kwargs.items():
                    if (name, index) not in placed:
                        part = _nested_item(nested, index)
                        placed[name, index] = self._share({name: part})[name] if copies else part
                    arguments[name] = placed[name, index]
            futures.append(self.run_single_worker_single_data(method_name, metadata.rank, **arguments, **shared))
            called.append(metadata.rank)
            if at_zero and NamedSharding.is_axis_zero(coords, output_is_replicated or []):
                returning.append(metadata.rank)
        return MultiWorkerFuture(futures, called_workers=called, return_from_workers=returning)

    def get_all_worker_results(
        self,
        future: MultiWorkerFuture | Sequence[ObjectRef],
        *,
        reason: str = "a call to the workers",
        timeout_s: float | None = None,
    ) -> list[Any]:
        """The results of any of the `run_*` methods, in rank order; of a sharded call, those of its returning workers.

        Args:
            reason: what is waited for, for messages, such as `"training step 3"`.
            timeout_s: longest wait in seconds; None takes the cluster's `step_timeout_s`.

        Raises:
            UserError, RunError: see `wait_for`.
        """
        refs = future.futures if isinstance(future, MultiWorkerFuture) else list(future)
        limit = self.cluster.step_timeout_s if timeout_s is None else timeout_s
        results = wait_for(refs, reason=reason, timeout_s=limit, names=[self._name_of(ref) for ref in refs])
        if not isinstance(future, MultiWorkerFuture):
            return results
        returning = set(future.return_from_workers)
        return [result for rank, result in zip(future.called_workers, results, strict=True) if rank in returning]

    def shutdown(self, cleanup_method: str | None = None, timeout: float = 30.0, force: bool = False) -> bool:
        """End all worker processes; whether the clean-up went well. Never raises, may be called twice.

        Args:
            cleanup_method: called on each worker first, so that it can flush and close what it holds.
            timeout: longest wait for that, in seconds; workers that are still busy then are killed.
            force: kill at once.
        """
        clean = True
        if not ray.is_initialized():
            return clean
        if cleanup_method is not None and not force:
            try:
                refs = self.run_all_workers_single_data(cleanup_method)
                self.get_all_worker_results(refs, reason=f"{cleanup_method} of {self.name_prefix}", timeout_s=timeout)
            except (UserError, RunError) as error:
                logger.warning("shutting down %s: %s", self.name_prefix, error)
                clean = False
        for worker in self._workers:
            ray.kill(worker)
        self._workers = []
        return clean

    def _name_of(self, ref: ObjectRef) -> str:
        return self._name_by_actor.get(ref.task_id().actor_id().hex(), "another actor")

    @cached_property
    def _name_by_actor(self) -> dict[str, str]:
        return {metadata.actor_id: str(metadata) for metadata in self._metadata}

    def _share(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments, with the large ones placed in the object store when more than one worker reads them."""
        if len(self._workers) == 1:
            return dict(kwargs)
        return {name: ray.put(value) if _is_large(value) else value for name, value in kwargs.items()}

    def _coords(self, rank: int) -> dict[str, int]:
        return {} if self.sharding_annotations is None else self.sharding_annotations.get_worker_coords(rank)

    def _ranks_at_zero(self, axes: Sequence[str] | None) -> list[int]:
        return [m.rank for m in self._metadata if NamedSharding.is_axis_zero(self._coords(m.rank), axes or [])]

    def _free_axes(self, sharded: list[str], replicated: list[str], output_replicated: list[str]) -> list[str]:
        if self.sharding_annotations is None:
            raise ValueError("a sharded call needs the group's sharding_annotations")
        names = self.sharding_annotations.names
        if unknown := [axis for axis in sharded + replicated + output_replicated if axis not in names]:
            raise ValueError(f"unknown axes {unknown}; the axes are {names}")
        if both := sorted(set(sharded) & set(replicated)):
            raise ValueError(f"axes {both} are both sharded and replicated")
        return [axis for axis in names if axis not in sharded and axis not in replicated]


def _is_large(value: Any) -> bool:
    # Pickled as Ray does it, since nothing else says how much an object refers to.
    return len(cloudpickle.dumps(value)) > _INLINE_BYTES


def _nested_item(nested: Any, index: tuple[int, ...]) -> Any:
    for at in index:
        nested = nested[at]
    return nested

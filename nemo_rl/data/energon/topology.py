"""Which replica reads which logical shards of the data.

A logical shard is one of a fixed number of contiguous slices of the rows, with its own loader and its own saved state.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Protocol

from nemo_rl.utils.errors import UserError

if TYPE_CHECKING:
    from nemo_rl.distributed.named_sharding import NamedSharding

DATA_AXIS = "data_parallel"


@dataclass(frozen=True)
class LoaderCopy:
    """The loader of one data-parallel replica.

    Example: with 2 replicas of 2 tensor-parallel workers, `LoaderCopy(1, 2, owner_rank=2, delivery_ranks=(2, 3))`.
    """

    logical_rank: int
    """Index of the replica on the data axis."""
    logical_world_size: int
    """Number of replicas."""
    owner_rank: int
    """The worker that loads: coordinate 0 on every axis but the data axis."""
    delivery_ranks: tuple[int, ...]
    """All workers of the replica."""


@dataclass(frozen=True)
class DataLoaderPlacementPlan:
    """The loaders of a run, in order of `logical_rank`, and the number of shards they share."""

    copies: tuple[LoaderCopy, ...]
    placement_hash: str
    """sha256, hex; a resume needs the same one."""
    num_logical_shards: int

    @property
    def logical_world_size(self) -> int:
        """Number of replicas."""
        return len(self.copies)

    def copy_for_logical_rank(self, logical_rank: int) -> LoaderCopy:
        """The copy of a replica. Raises `ValueError` where there is none."""
        if not 0 <= logical_rank < len(self.copies):
            raise ValueError(f"logical rank {logical_rank} is not one of 0..{len(self.copies) - 1}")
        return self.copies[logical_rank]

    def shards_of(self, logical_rank: int) -> tuple[int, ...]:
        """The shards of a replica: an equal, contiguous share, so that replica order is shard order."""
        self.copy_for_logical_rank(logical_rank)
        share = self.num_logical_shards // len(self.copies)
        return tuple(range(logical_rank * share, (logical_rank + 1) * share))


class DataLoaderTopologyMapper(Protocol):
    """Places loaders on the workers of a sharding."""

    def map(self, sharding: NamedSharding) -> DataLoaderPlacementPlan:
        """The plan. Raises `ValueError` without a data axis, or where a replica has not exactly one owner."""
        ...


class DefaultDataLoaderTopologyMapper:
    """One shard per replica. The hash covers the whole layout, so that a resume needs the same one."""

    def map(self, sharding: NamedSharding) -> DataLoaderPlacementPlan:
        """See `DataLoaderTopologyMapper.map`."""
        copies = _copies(sharding)
        covered = {
            "parallel_shape": dict(sharding.shape),
            "parallel_axes": list(sharding.names),
            "copies": [asdict(copy) for copy in copies],
        }
        return DataLoaderPlacementPlan(copies, _sha256(covered), num_logical_shards=len(copies))


@dataclass(frozen=True)
class ElasticDataLoaderTopologyMapper:
    """A fixed number of shards, dealt equally to the replicas. The hash covers the shards only: rows and their order do
    not depend on the number of replicas, so a resume may change it."""

    num_logical_shards: int

    def map(self, sharding: NamedSharding) -> DataLoaderPlacementPlan:
        """See `DataLoaderTopologyMapper.map`. Raises `UserError` where the replicas do not divide the shards."""
        copies = _copies(sharding)
        if self.num_logical_shards % len(copies):
            raise UserError(
                f"data.energon.logical_shards: {self.num_logical_shards} can't be dealt to {len(copies)} data-parallel "
                f"replicas in equal parts: use a number of replicas that divides it"
            )
        covered = {"mapper": "elastic", "num_logical_shards": self.num_logical_shards}
        return DataLoaderPlacementPlan(copies, _sha256(covered), self.num_logical_shards)


def resolve_topology_mapper(name: str, logical_shards: int | None = None) -> DataLoaderTopologyMapper:
    """The mapper of `data.energon.topology_mapper`. Raises `ValueError` for another name than `default` or `elastic`,
    or for `elastic` without `logical_shards`."""
    if name == "default":
        return DefaultDataLoaderTopologyMapper()
    if name == "elastic":
        if logical_shards is None:
            raise UserError("data.energon.topology_mapper: elastic needs data.energon.logical_shards")
        return ElasticDataLoaderTopologyMapper(logical_shards)
    raise UserError(f"data.energon.topology_mapper: {name!r} is neither 'default' nor 'elastic'")


def _copies(sharding: NamedSharding) -> tuple[LoaderCopy, ...]:
    if DATA_AXIS not in sharding.names:
        raise ValueError(f"the sharding has no axis {DATA_AXIS!r}, only {list(sharding.names)}")
    other_axes = [axis for axis in sharding.names if axis != DATA_AXIS]
    world_size = sharding.get_axis_size(DATA_AXIS)
    copies = []
    for logical_rank in range(world_size):
        ranks = sharding.get_ranks_by_coord(**{DATA_AXIS: logical_rank})
        owners = [r for r in ranks if sharding.is_axis_zero(sharding.get_worker_coords(r), other_axes)]
        if len(owners) != 1:
            raise ValueError(f"replica {logical_rank} has {len(owners)} loader owners in ranks {ranks}, not one")
        copies.append(LoaderCopy(logical_rank, world_size, owners[0], tuple(ranks)))
    return tuple(copies)


def _sha256(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()

"""Where a rank stands: the four named axes, the groups along them, and who leads a replica."""

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from nemo_rl.models.engine.config import AXES, CONTEXT, DATA, PIPELINE, TENSOR, ParallelSizes


@dataclass(frozen=True)
class Mesh:
    """A rank's view of the mesh `pipeline x data x context x tensor`.

    All groups are made at construction on every rank in the same order, as torch.distributed asks.
    """

    device_mesh: DeviceMesh
    device: torch.device
    replica_group: dist.ProcessGroup | None
    """The tensor, context and pipeline siblings of this rank; None when it has none."""
    save_group: dist.ProcessGroup
    """All ranks, for checkpoint writing in the background: its collectives never mix with those of a step."""

    @cached_property
    def coords(self) -> dict[str, int]:
        """This rank's coordinate on each axis."""
        return {axis: self.device_mesh.get_local_rank(axis) for axis in AXES}

    @property
    def data_group(self) -> dist.ProcessGroup:
        """The ranks that hold the same part of the model and train on different rows."""
        return self.device_mesh.get_group(DATA)

    def size(self, axis: str) -> int:
        """Number of ranks along `axis`."""
        return self.device_mesh.size(AXES.index(axis))

    @property
    def is_replica_leader(self) -> bool:
        """True on the one rank of a replica that reads from and writes to the data plane."""
        return all(self.coords[axis] == 0 for axis in (TENSOR, CONTEXT, PIPELINE))


def build_mesh(parallel: ParallelSizes, device: torch.device) -> Mesh:
    """The mesh over all ranks of the default process group.

    Raises:
        ValueError: the world does not divide by the replica's size.
    """
    world = dist.get_world_size()
    if world % parallel.replica:
        raise ValueError(
            f"{world} workers can't form replicas of tensor {parallel.tensor} x context {parallel.context} x "
            f"pipeline {parallel.pipeline} = {parallel.replica} ranks"
        )
    data = world // parallel.replica
    shape = (parallel.pipeline, data, parallel.context, parallel.tensor)
    device_mesh = init_device_mesh(device.type, shape, mesh_dim_names=AXES)
    layout = torch.arange(world).reshape(shape)
    replica_group: dist.ProcessGroup | None = None
    if parallel.replica > 1:
        for d in range(data):
            ranks = layout[:, d].flatten().tolist()
            group = dist.new_group(ranks)
            if isinstance(group, dist.ProcessGroup) and dist.get_rank() in ranks:
                replica_group = group
    save_group = dist.new_group(backend="gloo")
    assert isinstance(save_group, dist.ProcessGroup)
    return Mesh(
        device_mesh=device_mesh,
        device=device,
        replica_group=replica_group,
        save_group=save_group,
    )


__all__ = ["AXES", "CONTEXT", "DATA", "PIPELINE", "TENSOR", "Mesh", "build_mesh"]

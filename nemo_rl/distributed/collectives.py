"""Moving a batch from one rank of a group to the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from nemo_rl.distributed.batched_data_dict import BatchedDataDict

# Any element type can be viewed in a byte buffer at a multiple of this.
_ALIGNMENT = 16


@dataclass(frozen=True)
class _TensorSpec:
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    device_type: str


@dataclass(frozen=True)
class _BatchSpec:
    """What the other ranks need to know to receive a batch; `problem` is why there is none."""

    order: list[str]
    tensors: list[_TensorSpec]
    objects: dict[str, Any]
    plan: dict[str, Any]
    problem: str | None = None


_PLAN = ("micro_batch_indices", "micro_batch_lengths", "elem_counts_per_gb")


def broadcast_batch(batch: BatchedDataDict | None, group: dist.ProcessGroup, src: int) -> BatchedDataDict:
    """The batch of rank `src`, on every rank of `group`; `src` gets its own object back.

    Two phases: names, dtypes, shapes, lists and scalars go as one object; then all tensors of a device type go as one
    buffer of bytes. Tensors arrive bit-equal, on the device type they had; received ones are views of one buffer and
    belong to the caller. Every rank of the group must call it.

    Args:
        batch: the batch on `src`, ignored elsewhere.
        src: global rank of the sender.

    Raises:
        TypeError: on every rank, when a column is neither a strided tensor nor a list nor a scalar.
    """
    sends = dist.get_rank() == src
    box: list[Any] = [_describe(batch) if sends else None]
    dist.broadcast_object_list(box, src=src, group=group)
    spec: _BatchSpec = box[0]
    if spec.problem is not None:
        raise TypeError(spec.problem)
    received: dict[str, Any] = dict(spec.objects)
    for device_type in sorted({tensor.device_type for tensor in spec.tensors}):
        specs = [tensor for tensor in spec.tensors if tensor.device_type == device_type]
        buffer = torch.empty(sum(_room(tensor) for tensor in specs), dtype=torch.uint8, device=device_type)
        views = _views(buffer, specs)
        if sends and batch is not None:
            for name, view in views.items():
                view.copy_(batch[name].detach())
        dist.broadcast(buffer, src=src, group=group)
        received.update(views)
    if sends and batch is not None:
        return batch
    result = BatchedDataDict({name: received[name] for name in spec.order})
    for name, value in spec.plan.items():
        setattr(result, name, value)
    return result


def _describe(batch: BatchedDataDict | None) -> _BatchSpec:
    if batch is None:
        return _BatchSpec([], [], {}, {}, problem="the sending rank has no batch")
    tensors, objects = [], {}
    for name, value in batch.items():
        if isinstance(value, torch.Tensor) and value.layout is torch.strided:
            tensors.append(_TensorSpec(name, value.dtype, tuple(value.shape), value.device.type))
        elif value is None or isinstance(value, (list, bool, int, float, str)):
            objects[name] = value
        else:
            kind = f"{value.layout} tensor" if isinstance(value, torch.Tensor) else type(value).__name__
            return _BatchSpec([], [], {}, {}, problem=f"column {name!r} can't be broadcast: {kind}")
    return _BatchSpec(list(batch), tensors, objects, {name: getattr(batch, name) for name in _PLAN})


def _room(spec: _TensorSpec) -> int:
    """Bytes of the tensor, rounded up so that the next one is aligned."""
    size = spec.dtype.itemsize * torch.Size(spec.shape).numel()
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _views(buffer: torch.Tensor, specs: list[_TensorSpec]) -> dict[str, torch.Tensor]:
    views, offset = {}, 0
    for spec in specs:
        size = spec.dtype.itemsize * torch.Size(spec.shape).numel()
        views[spec.name] = buffer[offset : offset + size].view(spec.dtype).view(spec.shape)
        offset += _room(spec)
    return views

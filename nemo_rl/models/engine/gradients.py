"""Gradients over the data axis: raw sums on every rank become one sum, are divided once and clipped."""

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor


def _gradients(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    return [p.grad for p in parameters if p.grad is not None]


def _local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, which shares its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def sync_in_backward(module: nn.Module, enabled: bool) -> None:
    """Whether the next backward of a sharded module reduces its gradients, or only adds them up locally."""
    if isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(enabled)


def discard_unreduced(module: nn.Module) -> None:
    """Forgets what backward passes of a sharded module added up locally, which `zero_grad` doesn't reach.

    Through what torch 2.10 to 2.13 hold it in: the public way out is to reduce it, for which all ranks have to meet.
    """
    for part in module.modules():
        if isinstance(part, FSDPModule):
            state = part._get_fsdp_state()
            for group in getattr(state, "_fsdp_param_groups", None) or filter(None, [state._fsdp_param_group]):
                for parameter in group.fsdp_params:
                    parameter.unsharded_accumulated_grad = None
                    if hasattr(parameter, "_unsharded_param"):
                        parameter._unsharded_param.grad = None


def sum_over_data_ranks(parameters: Sequence[nn.Parameter], group: dist.ProcessGroup) -> None:
    """All-reduces the gradients of replicated parameters as one flat float32 tensor; a missing one counts as 0."""
    flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in parameters])
    dist.all_reduce(flat, group=group)
    for parameter, total in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        parameter.grad = total.view_as(parameter)


def gradient_norm(parameters: Sequence[nn.Parameter], group: dist.ProcessGroup | None) -> float:
    """L2 norm of all gradients, the same on all ranks.

    Args:
        parameters: those without a gradient count as 0.
        group: the ranks over which gradients are sharded; None when each rank holds them whole.

    The squares are added in float64, row by row: one float32 sum over a large matrix is off by 1e-4 on CPU, by an
    amount that depends on how it is cut into shards.
    """
    rows = [torch.linalg.vector_norm(_local(g), dim=-1).double() for g in _gradients(parameters)]
    square = torch.stack([row.square().sum() for row in rows]).sum()
    if group is not None:
        dist.all_reduce(square, group=group)
    return float(square.sqrt())


def scale_and_clip(
    parameters: Sequence[nn.Parameter], scale: float, max_norm: float | None, group: dist.ProcessGroup | None
) -> float:
    """Multiplies the gradients by `scale`, then clips them to `max_norm`; returns the norm before clipping.

    Where the norm is not finite the gradients are not to be used and are left alone.
    """
    norm = gradient_norm(parameters, group) * scale
    if math.isfinite(norm):
        clip = 1.0 if max_norm is None else min(1.0, max_norm / (norm + 1e-6))
        torch._foreach_mul_([_local(g) for g in _gradients(parameters)], scale * clip)
    return norm

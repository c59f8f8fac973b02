"""Optimizer and learning-rate schedule from names in `torch.optim`."""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer, lr_scheduler

from nemo_rl.models.engine.config import OptimizerSpec, ScheduleSpec
from nemo_rl.utils.errors import UserError


def torch_class(name: str, module: Any, prefix: str, key: str) -> Any:
    """The class `name` of a torch module; `prefix` may be left out. Names outside that module are refused.

    Raises:
        UserError: no such class, naming `key`.
    """
    short = name.removeprefix(f"{prefix}.")
    found = getattr(module, short, None)
    if not inspect.isclass(found):
        raise UserError(f"{key} is {name!r}, which is not a class of {prefix}")
    return found


def check_kwargs(cls: Any, kwargs: dict[str, Any], key: str) -> list[str]:
    """One line per keyword argument that `cls` does not take."""
    known = [p for p in inspect.signature(cls.__init__).parameters if p not in ("self", "params", "optimizer")]
    return [
        f"{key}.{name} is not an argument of {cls.__name__}; it takes {', '.join(known)}"
        for name in kwargs
        if name not in known
    ]


def build_optimizer(
    spec: OptimizerSpec, parameters: Sequence[nn.Parameter], *, fused: bool, section: str = "policy"
) -> Optimizer:
    """The optimizer over `parameters`.

    Args:
        spec: class and arguments.
        parameters: those to update.
        fused: use torch's one-pass kernel where the class has one and the config does not say.
        section: of the config, for messages.

    Raises:
        UserError: unknown class or argument.
    """
    cls = torch_class(spec.name, torch.optim, "torch.optim", f"{section}.optimizer.name")
    kwargs = dict(spec.kwargs)
    problems = check_kwargs(cls, kwargs, f"{section}.optimizer.kwargs")
    if problems:
        raise UserError("; ".join(problems))
    if fused and not kwargs.get("foreach") and "fused" in inspect.signature(cls.__init__).parameters:
        kwargs.setdefault("fused", True)
    return cls(parameters, **kwargs)


def build_schedule(spec: ScheduleSpec, optimizer: Optimizer, *, section: str = "policy") -> lr_scheduler.LRScheduler:
    """The schedule; it ticks once per optimizer step. Without phases the rate is constant.

    Raises:
        UserError: unknown class or argument, or milestones that do not separate the phases.
    """
    if not spec.phases:
        return lr_scheduler.ConstantLR(optimizer, factor=1.0, total_iters=0)
    if len(spec.milestones) != len(spec.phases) - 1:
        raise UserError(
            f"{section}.scheduler has {len(spec.phases)} schedulers and {len(spec.milestones)} milestones; "
            "it needs one milestone between each two"
        )
    phases = []
    for phase in spec.phases:
        cls = torch_class(phase.name, lr_scheduler, "torch.optim.lr_scheduler", f"{section}.scheduler.name")
        problems = check_kwargs(cls, phase.kwargs, f"{section}.scheduler.kwargs")
        if problems:
            raise UserError("; ".join(problems))
        phases.append(cls(optimizer, **phase.kwargs))
    if len(phases) == 1:
        return phases[0]
    return lr_scheduler.SequentialLR(optimizer, phases, milestones=list(spec.milestones))

"""What torch and transformers would refuse of a model's config, asked before any worker starts."""

import difflib
import inspect
import math
import warnings
from collections.abc import Callable, Mapping
from copy import copy
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer, lr_scheduler

from nemo_rl.models.config import ModelConfig
from nemo_rl.models.engine.compiled_blocks import compiler_problem
from nemo_rl.models.engine.config import OptimizerSpec, ScheduleSpec
from nemo_rl.models.engine.model_config import read_model_config
from nemo_rl.models.engine.optimizer import build_schedule, check_kwargs, torch_class
from nemo_rl.utils.errors import UserError

_MAX_TICKS = 1000
"""So many steps of a schedule are tried; some schedules refuse what they were given at a later step only."""


def check_overrides(config: ModelConfig) -> list[str]:
    """One line per entry of `hf_config_overrides` that the model's config would ignore, for lack of such a field, or
    refuse.

    Raises:
        UserError: the model's config can't be read.
    """
    if not config.hf_config_overrides:
        return []
    model = read_model_config(config.model_name, section=config.section)
    kind = f"the config of a {model.model_type} model"
    problems = []
    for name, value in config.hf_config_overrides.items():
        key = f"{config.section}.hf_config_overrides.{name}"
        if not hasattr(model, name):
            close = difflib.get_close_matches(name, model.to_dict(), n=1)
            hint = f", did you mean {close[0]}?" if close else ""
            problems.append(f"{key}: {kind} has no such field{hint}")
        elif why := _refusal(lambda name=name, value=value: setattr(copy(model), name, value)):
            problems.append(f"{key}: {value!r} is refused by {kind}: {why}")
    return problems


def check_training(config: ModelConfig, run_steps: int) -> list[str]:
    """One line per fault of the optimizer and of the schedule, which are built once, over two weights, and of what
    training needs on this machine.

    Args:
        config: of the model.
        run_steps: length of the run in optimizer steps; a decay without an end of its own takes it.
    """
    compiler = compiler_problem(f"{config.section}.torch_compile") if config.torch_compile else None
    problems: list[str] = [compiler] if compiler else []
    optimizer = OptimizerSpec(name="AdamW")  # the schedule is tried on it when there is no other
    try:
        spec = config.optimizer_spec()
        refused = _optimizer_problems(spec, config.section)
        problems += refused
        optimizer = optimizer if refused else spec
    except UserError as error:
        problems.append(str(error))
    megatron = config.megatron
    if megatron is not None and megatron.train_iters is None:
        config = config.model_copy(update={"megatron_cfg": megatron.model_copy(update={"train_iters": run_steps})})
    try:
        problems += _schedule_problems(
            config.schedule_spec(), _phase_keys(config), optimizer, run_steps, f"{config.section}.scheduler"
        )
    except UserError as error:
        problems.append(str(error))
    return problems


def _optimizer_problems(spec: OptimizerSpec, section: str) -> list[str]:
    """Raises `UserError` when there is no such class."""
    name_key, key = f"{section}.optimizer.name", f"{section}.optimizer.kwargs"
    cls = torch_class(spec.name, torch.optim, "torch.optim", name_key)
    problems = check_kwargs(cls, spec.kwargs, key) or _wrong_kinds(cls, spec.kwargs, key)
    if problems:
        return problems
    if why := _refusal(lambda: _build(OptimizerSpec(name=spec.name))):
        return [f"{name_key}: {cls.__name__} can't be used: {why}"]
    if _needed(cls.step):
        return [f"{name_key}: {cls.__name__} can't be used: it computes the loss again within a step"]
    for name, value in spec.kwargs.items():
        if why := _refusal(lambda name=name, value=value: _build(OptimizerSpec(name=spec.name, kwargs={name: value}))):
            problems.append(f"{key}.{name}: {value!r} is refused by {cls.__name__}: {why}")
    if not problems and (why := _refusal(lambda: _build(spec))):
        problems.append(f"{key}: refused by {cls.__name__}: {why}")
    return problems


def _schedule_problems(
    spec: ScheduleSpec, keys: list[str], optimizer: OptimizerSpec, run_steps: int, key_of_all: str
) -> list[str]:
    """Raises `UserError` when phases and milestones do not alternate."""
    problems: list[str] = []
    for key, phase in zip(keys, spec.phases, strict=True):
        try:
            problems += _phase_problems(phase, key, optimizer)
        except UserError as error:
            problems.append(str(error))
    if problems:
        return problems
    if list(spec.milestones) != sorted(set(spec.milestones)):
        return [f"{key_of_all}: the milestones {list(spec.milestones)} do not increase"]
    schedule = build_schedule(spec, _build(optimizer))
    if why := _refusal(lambda: _tick(schedule, min(run_steps, _MAX_TICKS))):
        return [f"{key_of_all}: it can't be used for {run_steps} steps: {why}"]
    return []


def _phase_problems(phase: OptimizerSpec, key: str, optimizer: OptimizerSpec) -> list[str]:
    """Raises `UserError` when there is no such class."""
    cls = torch_class(phase.name, lr_scheduler, "torch.optim.lr_scheduler", f"{key}.name")
    problems = check_kwargs(cls, phase.kwargs, f"{key}.kwargs") or _wrong_kinds(cls, phase.kwargs, f"{key}.kwargs")
    if problems:
        return problems
    if needed := _needed(cls.step):
        return [f"{key}.name: {cls.__name__} can't be used: each of its steps needs {', '.join(needed)}"]
    if why := _refusal(lambda: _tick(cls(_build(optimizer), **phase.kwargs), 2)):
        return [f"{key}.kwargs: refused by {cls.__name__}: {why}"]
    return []


def _phase_keys(config: ModelConfig) -> list[str]:
    """The dotted key of each phase of `schedule_spec`."""
    if config.megatron is not None and config.megatron.optimizer is not None:
        return [f"{config.section}.megatron_cfg.scheduler"] * len(config.schedule_spec().phases)
    if not isinstance(config.scheduler, list):
        return [f"{config.section}.scheduler"] if config.scheduler else []
    return [f"{config.section}.scheduler.{i}" for i, entry in enumerate(config.scheduler) if entry.milestones is None]


def _wrong_kinds(cls: Any, kwargs: Mapping[str, Any], key: str) -> list[str]:
    """One line per value that is true or false where the default is a number, the other way round, or not finite."""
    problems = []
    parameters = inspect.signature(cls.__init__).parameters
    for name, value in kwargs.items():
        default = parameters[name].default
        if isinstance(default, int | float) and isinstance(default, bool) != isinstance(value, bool):
            expected = "true or false" if isinstance(default, bool) else "a number"
            problems.append(f"{key}.{name}: expected {expected}, got {value!r}")
        elif isinstance(value, float) and not math.isfinite(value):
            problems.append(f"{key}.{name}: expected a finite number, got {value!r}")
    return problems


def _build(spec: OptimizerSpec) -> Optimizer:
    """The optimizer over a matrix and a vector, the two shapes that weights of a model have."""
    cls = torch_class(spec.name, torch.optim, "torch.optim", "policy.optimizer.name")
    # As torch decorates it, this method imports torch's compiler, which takes seconds that only a worker has to spend.
    light = type(cls.__name__, (cls,), {"add_param_group": inspect.unwrap(Optimizer.add_param_group)})
    return light([nn.Parameter(torch.zeros(1, 1)), nn.Parameter(torch.zeros(1))], **spec.kwargs)


def _tick(schedule: lr_scheduler.LRScheduler, steps: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that no optimizer step comes between
        for _ in range(steps):
            schedule.step()


def _needed(step: Callable[..., Any]) -> list[str]:
    """What a `step` must be given; the engine gives it nothing."""
    parameters = list(inspect.signature(step).parameters.values())[1:]
    return [p.name for p in parameters if p.default is inspect.Parameter.empty]


def _refusal(action: Callable[[], Any]) -> str | None:
    """What `action` raises, in one line, or None."""
    try:
        action()
    except Exception as error:  # noqa: BLE001  the libraries' checks raise errors of many types
        return " ".join(str(error).split()) or type(error).__name__
    return None

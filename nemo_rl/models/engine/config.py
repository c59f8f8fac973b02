"""What the engine needs to know: plain values, resolved from the policy's or the critic's config by the driver."""

from dataclasses import dataclass, field
from typing import Any, Literal

import torch

DATA, CONTEXT, TENSOR, PIPELINE = "data_parallel", "context_parallel", "tensor_parallel", "pipeline_parallel"
AXES: tuple[str, ...] = (PIPELINE, DATA, CONTEXT, TENSOR)
"""Mesh axes, outermost first: rank = ((pipeline * data + d) * context + c) * tensor + t."""

HeadName = Literal["lm"]


@dataclass(frozen=True, kw_only=True)
class ParallelSizes:
    """Sizes of the axes inside one replica. The data axis takes what is left of the world."""

    tensor: int = 1
    context: int = 1
    pipeline: int = 1

    @property
    def replica(self) -> int:
        """Ranks that hold one copy of the model."""
        return self.tensor * self.context * self.pipeline


@dataclass(frozen=True, kw_only=True)
class OptimizerSpec:
    """A class of `torch.optim` by name and its keyword arguments."""

    name: str
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ScheduleSpec:
    """Schedulers of `torch.optim.lr_scheduler` in order; `milestones[i]` is the step at which phase `i + 1` starts."""

    phases: tuple[OptimizerSpec, ...] = ()
    milestones: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """One model's training set-up. `microbatch_tokens` is the token budget of a forward pass."""

    model_name: str
    optimizer: OptimizerSpec | None
    schedule: ScheduleSpec = ScheduleSpec()
    hf_config_overrides: dict[str, Any] = field(default_factory=dict)
    head: HeadName = "lm"
    precision: str = "auto"
    parallel: ParallelSizes = ParallelSizes()
    data_parallel: Literal["auto", "replicate", "shard"] = "auto"
    max_grad_norm: float | None = 1.0
    activation_checkpointing: bool = False
    microbatch_tokens: int = 4096
    seed: int = 42


_PRECISIONS = {
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float32": torch.float32,
    "fp32": torch.float32,
}


def compute_dtype(precision: str, device: torch.device) -> torch.dtype:
    """The dtype of matmuls for `policy.precision`.

    `auto` is bfloat16 where the hardware multiplies in it (a CPU with avx512_bf16 or amx, a GPU), else float32.

    Raises:
        ValueError: unknown name.
    """
    if precision == "auto":
        if device.type == "cuda":
            fast = torch.cuda.is_bf16_supported(including_emulation=False)
        else:
            fast = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
        return torch.bfloat16 if fast else torch.float32
    if precision not in _PRECISIONS:
        raise ValueError(f"policy.precision is {precision!r}; use auto, bfloat16 or float32")
    return _PRECISIONS[precision]


PRECISION_NAMES: tuple[str, ...] = ("auto", *_PRECISIONS)

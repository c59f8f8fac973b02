"""What the engine needs to know: plain values, resolved from the policy's or the critic's config by the driver."""

from dataclasses import dataclass, field
from typing import Any, Literal

DATA, CONTEXT, TENSOR, PIPELINE = "data_parallel", "context_parallel", "tensor_parallel", "pipeline_parallel"
AXES: tuple[str, ...] = (PIPELINE, DATA, CONTEXT, TENSOR)
"""Mesh axes, outermost first: rank = ((pipeline * data + d) * context + c) * tensor + t."""

HeadName = Literal["lm", "value"]
ValueHeadInit = Literal["zero", "normal"]


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
    """One model's training set-up.

    Attributes:
        head: `lm` gives log-probabilities of tokens, `value` one number per token; it decides what is loaded.
        value_head_init: start of a value head that `model_name` does not hold; `normal` draws from N(0, 0.02).
        temperature: the LM head's logits are divided by it, as the sampler's are.
        reference: also hold a frozen copy of the weights of `model_name`.
        torch_compile: compile the decoder's blocks, see `compiled_blocks`.
        microbatch_tokens: token budget of a forward pass.
        measure_microbatch_tokens: find the budget by trying, from `microbatch_tokens` on.
        inference_microbatch_tokens: that of a pass without gradients; None takes the other.
        seed: of dropout and of a drawn value head.
        section: of the config, for messages: `policy` or `value`.
    """

    model_name: str
    optimizer: OptimizerSpec | None
    schedule: ScheduleSpec = ScheduleSpec()
    hf_config_overrides: dict[str, Any] = field(default_factory=dict)
    head: HeadName = "lm"
    value_head_init: ValueHeadInit = "zero"
    temperature: float = 1.0
    reference: bool = False
    precision: str = "auto"
    parallel: ParallelSizes = ParallelSizes()
    data_parallel: Literal["auto", "replicate", "shard"] = "auto"
    max_grad_norm: float | None = 1.0
    activation_checkpointing: bool = False
    torch_compile: bool = False
    microbatch_tokens: int = 4096
    measure_microbatch_tokens: bool = False
    inference_microbatch_tokens: int | None = None
    seed: int = 42
    section: str = "policy"

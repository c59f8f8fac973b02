"""The `policy.generation` section. Imports no torch, so that a config is checked before anything heavy starts."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from nemo_rl.models.generation.interfaces import SamplingParams
from nemo_rl.utils.config import ConfigModel

Precision = Literal["auto", "bfloat16", "bf16", "float32", "fp32"]


class ColocatedConfig(ConfigModel):
    """Whether sampler and trainer share devices."""

    enabled: bool = True
    """Share them, in turn. False is accepted where the sampler has devices of its own."""
    resources: dict[str, Any] | None = None
    """Accepted from existing recipes; the `cluster` section decides what the sampler gets."""


class VllmConfig(ConfigModel):
    """Settings that go to vLLM; the `hf` backend reads `max_model_len` only."""

    gpu_memory_utilization: float = Field(default=0.9, gt=0, le=1)
    """Part of a GPU's memory that vLLM may take."""
    max_model_len: int | None = Field(default=None, ge=2)
    """Longest prompt with its answer, in tokens; null takes what the model was made for."""
    enforce_eager: bool = False
    """Run without compiled graphs: starts sooner, samples slower on GPUs. On a CPU it is always on."""
    tensor_parallel_size: int = Field(default=1, ge=1, le=1)
    """Must be 1 for now."""
    pipeline_parallel_size: int = Field(default=1, ge=1, le=1)
    """Must be 1 for now."""
    async_engine: bool = False
    """Accepted from existing recipes; samples always come and go one by one."""


class GenerationConfig(ConfigModel):
    """How answers are sampled, and by what."""

    backend: Literal["hf", "vllm"] = "hf"
    """`hf` is built in and runs any model that the trainer runs; `vllm` needs its extra (`make setup-vllm`)."""
    max_new_tokens: int = Field(default=256, ge=1)
    """Most tokens of an answer, its stop token included."""
    temperature: float = Field(default=1.0, ge=0)
    """Logits are divided by this; 0 takes the likeliest token."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Keep the smallest set of tokens with at least this probability."""
    top_k: int | None = Field(default=None, ge=1)
    """Keep this many tokens; null keeps all."""
    stop_token_ids: list[int] | None = None
    """Tokens that end an answer; null takes the tokenizer's end-of-sequence token."""
    precision: Precision | None = None
    """Compute dtype; null takes the policy's, which keeps the sampler's log-probabilities nearest to the trainer's."""
    max_slots: int = Field(default=64, ge=1)
    """Samples decoded together by a rollout process; more need more memory for their keys and values."""
    workers: int = Field(default=1, ge=1)
    """Rollout processes, each with its own copy of the weights."""
    colocated: ColocatedConfig = Field(default_factory=ColocatedConfig)
    vllm_cfg: VllmConfig = Field(default_factory=VllmConfig)
    vllm_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of `vllm.LLM`, by name."""

    @model_validator(mode="after")
    def _stop_ids_are_ids(self) -> Self:
        if any(token < 0 for token in self.stop_token_ids or ()):
            raise ValueError(f"stop_token_ids holds a negative id: {self.stop_token_ids}")
        return self

    def sampling_params(self, eos_token_id: int | list[int] | None = None) -> SamplingParams:
        """What a request of this section asks for.

        Args:
            eos_token_id: of the tokenizer (or model); taken where `stop_token_ids` is null.
        """
        stops = self.stop_token_ids
        if stops is None:
            stops = [eos_token_id] if isinstance(eos_token_id, int) else list(eos_token_id or ())
        return SamplingParams(
            max_new_tokens=self.max_new_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            stop_token_ids=tuple(stops),
        )

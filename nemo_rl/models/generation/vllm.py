"""Sampling with vLLM, in this process: the same interface over its engine's `add_request` and `step`. The only file
that imports vLLM.

The same seed gives the same tokens only as far as vLLM promises it: its kernels round by the batch a sample is in.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from nemo_rl.models.engine.model_config import read_model_config
from nemo_rl.models.engine.precision import compute_dtype
from nemo_rl.models.generation.config import GenerationConfig
from nemo_rl.models.generation.interfaces import (
    FinishReason,
    GenerationEngine,
    GenerationOutput,
    GenerationRequest,
    SamplingParams,
)
from nemo_rl.utils.errors import UserError

# With its own process vLLM could not be handed weights by an iterator.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

_SEED_MASK = 2**63 - 1
_MOST_CPU_CACHE = 4 * 2**30
_CPU_BLOCK = 32  # tokens; the least that its attention takes there


@dataclass
class _Sample:
    """One sample in work."""

    request: GenerationRequest
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    start_version: int = -1


class VllmGenerationEngine(GenerationEngine):
    """Samples with vLLM.

    vLLM gives log-probabilities either before everything or after everything, so that a request may have a temperature
    or cut to `top_k` and `top_p`, but not both; which of the two an engine takes is decided when it is made.

    Args:
        model_name: local directory or hub name.
        precision: `auto`, `bfloat16` or `float32`.
        max_slots: samples decoded together.
        max_model_len: longest prompt with its answer, in tokens; None takes the model's `max_position_embeddings`.
        cuts: requests have a `top_k` or `top_p`, and temperature 1 or 0.
        hf_config_overrides: fields of the model's config to replace.
        llm_arguments: further arguments of `vllm.LLM`; they win over what is set here.

    Raises:
        UserError: vLLM is not installed, or can't load the model.
    """

    def __init__(
        self,
        model_name: str,
        *,
        precision: str = "auto",
        max_slots: int = 64,
        max_model_len: int | None = None,
        cuts: bool = False,
        hf_config_overrides: dict[str, Any] | None = None,
        llm_arguments: dict[str, Any] | None = None,
    ):
        try:
            import vllm  # pyrefly: ignore[missing-import]
            from vllm.sampling_params import RequestOutputKind  # pyrefly: ignore[missing-import]
        except ImportError as error:
            raise UserError(
                f"policy.generation.backend is vllm, which can't be imported here ({error}): run it from .venv-vllm "
                "(make setup-vllm), or set the backend to hf"
            ) from error
        on_gpu = torch.cuda.is_available()
        dtype = compute_dtype(precision, torch.device("cuda" if on_gpu else "cpu"))
        config = read_model_config(model_name, hf_config_overrides)
        limit = max_model_len or getattr(config.get_text_config(), "max_position_embeddings", None)
        arguments: dict[str, Any] = {
            "dtype": str(dtype).removeprefix("torch."),
            "max_num_seqs": max_slots,
            "max_model_len": limit,
            "hf_overrides": hf_config_overrides or {},
            "logprobs_mode": "raw_logprobs" if cuts else "processed_logprobs",
            "skip_tokenizer_init": True,
            "disable_log_stats": True,
            "trust_remote_code": False,
        }
        if not on_gpu:
            arguments["enforce_eager"] = True
            # Samples of one prompt share its whole blocks; vLLM's own 128 is longer than many a prompt.
            arguments["block_size"] = _CPU_BLOCK
            arguments["kv_cache_memory_bytes"] = _cpu_cache_bytes(config, dtype, max_slots, limit or 2048)
        try:
            self._llm = vllm.LLM(model=model_name, **(arguments | (llm_arguments or {})))
        except (ValueError, OSError, RuntimeError) as error:
            first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise UserError(f"policy.generation.backend: vllm can't sample from {model_name}: {first_line}") from error
        self._engine = self._llm.llm_engine
        self._make_params = vllm.SamplingParams
        self._deltas = RequestOutputKind.DELTA
        self._cuts = cuts
        self.max_model_len = int(self._engine.model_config.max_model_len)
        self._samples: dict[str, _Sample] = {}
        self._version = -1

    @classmethod
    def from_config(
        cls,
        config: GenerationConfig,
        model_name: str,
        *,
        precision: str,
        hf_config_overrides: dict[str, Any] | None = None,
    ) -> VllmGenerationEngine:
        """The engine of a `generation` section.

        Raises:
            UserError: as the constructor, or the section has a temperature and cuts.
        """
        cuts = config.top_k is not None or config.top_p < 1
        if cuts and config.temperature not in (0, 1):
            raise UserError(
                f"policy.generation: vllm gives no log-probabilities at temperature {config.temperature} before top_k "
                "and top_p cut; set temperature to 1, or top_p to 1 and top_k to null, or the backend to hf"
            )
        arguments: dict[str, Any] = {"gpu_memory_utilization": config.vllm_cfg.gpu_memory_utilization}
        if torch.cuda.is_available():
            arguments["enforce_eager"] = config.vllm_cfg.enforce_eager
        return cls(
            model_name,
            precision=precision,
            max_slots=config.max_slots,
            max_model_len=config.vllm_cfg.max_model_len,
            cuts=cuts,
            hf_config_overrides=hf_config_overrides,
            llm_arguments=arguments | config.vllm_kwargs,
        )

    def add(self, requests: Sequence[GenerationRequest]) -> None:
        for request in requests:
            if not request.prompt_ids:
                raise ValueError(f"{request.request_id}: an empty prompt")
            if len(request.prompt_ids) >= self.max_model_len:
                raise ValueError(
                    f"{request.request_id}: a prompt of {len(request.prompt_ids)} tokens leaves no room for an answer "
                    f"in max_model_len {self.max_model_len}"
                )
            if request.request_id in self._samples:
                raise ValueError(f"{request.request_id} is in work already")
            params = self._params(request)
            self._engine.add_request(request.request_id, {"prompt_token_ids": list(request.prompt_ids)}, params)
            self._samples[request.request_id] = _Sample(request)

    def step(self) -> list[GenerationOutput]:
        outputs = []
        if not self._engine.has_unfinished_requests():
            return outputs
        for result in self._engine.step():
            sample = self._samples.get(result.request_id)
            if sample is None:
                continue
            completion = result.outputs[0]
            if not sample.tokens:
                sample.start_version = self._version
            # None where vLLM dropped a log-probability; the row is then rejected, not guessed.
            tables = completion.logprobs or [{}] * len(completion.token_ids)
            for token, table in zip(completion.token_ids, tables, strict=True):
                sample.tokens.append(token)
                sample.logprobs.append(table[token].logprob if token in table else math.nan)
            if result.finished:
                del self._samples[result.request_id]
                outputs.append(self._output(sample, completion.finish_reason))
        return outputs

    @property
    def num_unfinished(self) -> int:
        return len(self._samples)

    def abort(self, request_ids: Iterable[str]) -> None:
        known = [request_id for request_id in request_ids if self._samples.pop(request_id, None) is not None]
        if known:
            self._engine.abort_request(known)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(weights)})
        self._llm.apply_model(_pack_head)
        # Samples in work go back to the queue, and are computed again from their prompt on.
        self._engine.reset_prefix_cache(reset_running_requests=True)
        self._version = version

    @property
    def version(self) -> int:
        return self._version

    def close(self) -> None:
        self.abort(list(self._samples))
        self._engine.engine_core.shutdown()

    def _params(self, request: GenerationRequest) -> Any:
        sampling = request.sampling
        if self._cuts and sampling.temperature not in (0, 1):
            raise ValueError(f"{request.request_id}: temperature {sampling.temperature} in an engine made for cuts")
        if not self._cuts and _cuts(sampling):
            raise ValueError(f"{request.request_id}: top_k or top_p in an engine made without cuts")
        return self._make_params(
            max_tokens=min(sampling.max_new_tokens, self.max_model_len - len(request.prompt_ids)),
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k or 0,
            stop_token_ids=list(sampling.stop_token_ids),
            ignore_eos=True,
            seed=request.seed & _SEED_MASK,
            logprobs=0,
            detokenize=False,
            output_kind=self._deltas,
        )

    def _output(self, sample: _Sample, finish_reason: str | None) -> GenerationOutput:
        reason: FinishReason = "stop" if finish_reason == "stop" else "length" if finish_reason == "length" else "error"
        error = None if reason != "error" else f"vLLM gave the sample up ({finish_reason})"
        broken = [i for i, value in enumerate(sample.logprobs) if not math.isfinite(value)]
        if broken:
            reason, error = "error", f"vLLM gave no finite log-probability for token {broken[0]} of the answer"
        return GenerationOutput(
            request_id=sample.request.request_id,
            token_ids=tuple(sample.tokens),
            logprobs=tuple(sample.logprobs),
            finish_reason=reason,
            start_version=sample.start_version,
            end_version=self._version,
            error=error,
        )


def _pack_head(model: torch.nn.Module) -> None:
    """Packs the output head anew where vLLM keeps a packed copy of it (on CPUs): a reload passes over a tied one, whose
    weight is loaded as the embedding's."""
    head = getattr(model, "lm_head", None)
    method = getattr(head, "quant_method", None)
    if method is not None and hasattr(head, "cpu_linear"):
        method.process_weights_after_loading(head)


def _cuts(sampling: SamplingParams) -> bool:
    return sampling.temperature > 0 and (sampling.top_k is not None or sampling.top_p < 1)


def _cpu_cache_bytes(config: PretrainedConfig, dtype: torch.dtype, max_slots: int, length: int) -> int:
    """Room for all slots at full length, at most 4 GiB; vLLM alone would take nearly half of the machine's memory."""
    text = config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    tokens = math.ceil(length / _CPU_BLOCK) * _CPU_BLOCK
    needed = 2 * text.num_hidden_layers * heads * width * dtype.itemsize * tokens * (max_slots + 1)
    return max(2**26, min(needed, _MOST_CPU_CACHE))

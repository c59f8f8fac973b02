"""The engine of a `generation` section. Imports torch or vLLM only when an engine is built."""

from __future__ import annotations

from typing import Any

from nemo_rl.models.generation.config import GenerationConfig
from nemo_rl.models.generation.interfaces import GenerationEngine


def build_generation_engine(
    config: GenerationConfig,
    model_name: str,
    *,
    precision: str = "auto",
    hf_config_overrides: dict[str, Any] | None = None,
) -> GenerationEngine:
    """An engine with the weights of `model_name`, at version -1, on the GPU if this process sees one.

    Args:
        model_name: local directory or hub name of a causal language model.
        precision: the policy's; used where `config.precision` is null.
        hf_config_overrides: fields of the model's config to replace, as in `policy.hf_config_overrides`.

    Raises:
        UserError: the model can't be loaded or sampled, or the backend is not installed.
    """
    chosen = config.precision or precision
    overrides = dict(hf_config_overrides or {})
    if config.backend == "vllm":
        from nemo_rl.models.generation.vllm import VllmGenerationEngine

        return VllmGenerationEngine.from_config(config, model_name, precision=chosen, hf_config_overrides=overrides)
    from nemo_rl.models.generation.hf import HFGenerationEngine

    return HFGenerationEngine(
        model_name,
        precision=chosen,
        max_slots=config.max_slots,
        max_model_len=config.vllm_cfg.max_model_len,
        hf_config_overrides=overrides,
    )

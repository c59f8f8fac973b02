"""What makes two starts the same run: its checkpoints keep this record, and a resume must agree with all of it.

It holds what decides rows, tokens, sizes and updates. What decides speed, memory, places and lengths of time is not in
it and may change at a resume; so may `max_grad_norm` and the precision, which no checkpoint restores.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_rl.data.energon.identity import loader_identity
from nemo_rl.utils.json_values import json_value

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

    from nemo_rl.algorithms.sft_config import MasterConfig
    from nemo_rl.data.energon.sources import PreparedSource
    from nemo_rl.data.energon.topology import DataLoaderPlacementPlan
    from nemo_rl.models.config import ModelConfig
    from nemo_rl.models.engine.config import OptimizerSpec

_OF_ONE_SHARD = ("shard", "num_shards", "rows_per_shard")
_MODEL_SIZES = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "tie_word_embeddings",
)


def run_identity(
    config: MasterConfig,
    *,
    model: PretrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    train: PreparedSource,
    plan: DataLoaderPlacementPlan,
    steps: int,
) -> dict[str, Any]:
    """The record of a run of `steps` steps whose config has no problem, as JSON values."""
    policy, energon = config.policy, config.data.energon
    rows = loader_identity(
        config.data,
        train,
        tokenizer,
        shard=0,
        num_shards=plan.num_logical_shards,
        batch_size=policy.train_global_batch_size // plan.num_logical_shards,
        max_sequence_length=config.data.max_input_seq_length or policy.max_total_sequence_length,
        only_unmask_final=config.sft.only_unmask_final,
        seed=config.sft.seed,
    )
    template = hashlib.sha256(f"{tokenizer.chat_template}".encode()).hexdigest()
    record = {
        **{name: value for name, value in rows.items() if name not in _OF_ONE_SHARD},
        "chat_template": template,
        "train_global_batch_size": policy.train_global_batch_size,
        "topology_mapper": energon.topology_mapper,
        "data_shards": plan.num_logical_shards,
        # With one shard per replica, the replicas have to be the same ones; see `placement_hash`.
        "parallel": asdict(policy.parallel) if energon.topology_mapper == "default" else None,
        "model": {
            "name": Path(policy.model_name).name,
            **model_sizes(model),
            "hf_config_overrides": policy.hf_config_overrides or {},
        },
        "optimizer": optimizer_record(policy.optimizer_spec()),
        "scheduler": schedule_record(policy, steps),
    }
    return json_value(record)


def model_sizes(model: PretrainedConfig) -> dict[str, Any]:
    """The fields of a model's config that decide the names and shapes of its weights."""
    plain = model.to_dict()
    return {name: plain.get(name) for name in _MODEL_SIZES}


def optimizer_record(spec: OptimizerSpec) -> dict[str, Any]:
    """An optimizer, or a phase of a schedule, by name and arguments."""
    return {"name": spec.name, **spec.kwargs}


def schedule_record(policy: ModelConfig, steps: int) -> dict[str, Any]:
    """The schedule's phases by number; the length of the run matters only where it is the end of a decay."""
    if policy.megatron_cfg is not None:
        megatron = policy.megatron_cfg.model_copy(update={"train_iters": steps})
        policy = policy.model_copy(update={"megatron_cfg": megatron})
    spec = policy.schedule_spec()
    phases = {f"phase_{number}": optimizer_record(phase) for number, phase in enumerate(spec.phases)}
    return {**phases, "milestones": spec.milestones}

"""What the saved state of a shard must agree with: everything that decides rows, order and tokens, nothing of speed."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from nemo_rl.data.config import DataConfig
from nemo_rl.data.energon.multimodal.registry import selected_registry_identity
from nemo_rl.data.energon.sources import PreparedSource

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def loader_identity(
    data_config: DataConfig,
    prepared: PreparedSource,
    tokenizer: PreTrainedTokenizerBase,
    *,
    shard: int,
    num_shards: int,
    batch_size: int,
    max_sequence_length: int,
    only_unmask_final: bool,
    seed: int,
) -> dict[str, Any]:
    """The identity of a training shard, as JSON values."""
    energon = data_config.energon
    return {
        "data": prepared.identity,
        "shard": shard,
        "num_shards": num_shards,
        "rows_per_shard": batch_size,
        "shuffle": data_config.shuffle,
        "seed": seed + energon.seed_offset,
        "slice_rows": prepared.slice_rows(energon.max_samples_per_sequence),
        "max_sequence_length": max_sequence_length,
        "only_unmask_final": only_unmask_final,
        "overlong": data_config.overlong,
        "add_bos": data_config.add_bos,
        "add_eos": data_config.add_eos,
        "chat_template_kwargs": data_config.chat_template_kwargs,
        "tokenizer": tokenizer_digest(tokenizer),
        **selected_registry_identity(task_encoder=energon.task_encoder, cookers=energon.cookers),
    }


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """sha256, hex, of everything that decides the ids and the mask of a text: vocabulary, rules and chat template."""
    special = [tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id]
    return _sha256([_vocabulary_digest(tokenizer), tokenizer.chat_template, special])


@functools.lru_cache(maxsize=1)
def _vocabulary_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """Kept for the next shard: a large vocabulary takes half a second."""
    parts = json.loads(tokenizer.backend_tokenizer.to_str())
    # Calls that pad or truncate leave their settings behind in the tokenizer.
    return _sha256({name: part for name, part in parts.items() if name not in ("padding", "truncation")})


def _sha256(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """`key old -> new` for every value that differs, dotted keys, sorted."""
    for key in sorted({*old, *new}):
        name = f"{prefix}{key}"
        if key not in old:
            yield f"{name} (absent) -> {new[key]!r}"
        elif key not in new:
            yield f"{name} {old[key]!r} -> (absent)"
        elif isinstance(old[key], Mapping) and isinstance(new[key], Mapping):
            yield from differences(old[key], new[key], f"{name}.")
        elif old[key] != new[key]:
            yield f"{name} {old[key]!r} -> {new[key]!r}"

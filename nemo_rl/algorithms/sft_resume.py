"""Where a run starts: at step 0, or at the newest checkpoint, which has to be one of this run."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_rl.algorithms.sft_state import SFTV2SaveState, _restore_save_state
from nemo_rl.data.energon.topology import DataLoaderPlacementPlan
from nemo_rl.models.config import PolicyConfig
from nemo_rl.models.engine.model_config import read_model_config
from nemo_rl.utils.checkpoint import CheckpointingConfig, CheckpointManager
from nemo_rl.utils.errors import UserError

_SHAPE_KEYS = (
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


@dataclass(frozen=True)
class ResumePoint:
    """Where a run starts.

    Attributes:
        save_state: the counters.
        checkpoint: the checkpoint that is resumed; it and all below are None for a fresh run.
        weights_path: its weights.
        optimizer_path: its optimizer state, None when it was saved without.
        loader_states: the state of each logical shard, in shard order.
    """

    save_state: SFTV2SaveState
    checkpoint: Path | None = None
    weights_path: Path | None = None
    optimizer_path: Path | None = None
    loader_states: list[dict[str, Any]] | None = None


def find_resume_point(
    checkpointing: CheckpointingConfig, policy: PolicyConfig, plan: DataLoaderPlacementPlan
) -> ResumePoint:
    """Reads the newest checkpoint, all but its tensors.

    Raises:
        UserError: it is of another model or data placement, or a part of it is missing or can't be read.
    """
    manager = CheckpointManager(checkpointing)
    last = manager.get_latest_checkpoint_path() if checkpointing.enabled else None
    save_state = _restore_save_state(manager.load_training_info(last), placement_hash=plan.placement_hash)
    weights_path, optimizer_path = manager.get_resume_paths(last)
    if last is None or weights_path is None:
        return ResumePoint(save_state)
    _check_same_model(policy, weights_path)
    return ResumePoint(
        save_state=save_state,
        checkpoint=last,
        weights_path=weights_path,
        optimizer_path=optimizer_path,
        loader_states=_read_loader_states(last, plan.num_logical_shards),
    )


def _read_loader_states(checkpoint: Path, num_shards: int) -> list[dict[str, Any]]:
    """The state of each shard, in shard order.

    Raises:
        UserError: a file is missing or no JSON.
    """
    states = []
    for shard in range(num_shards):
        path = checkpoint / "loaders" / f"shard_{shard}.json"
        try:
            states.append(json.loads(path.read_text()))
        except (OSError, ValueError) as error:
            raise UserError(f"{path}: the state of data shard {shard} can't be read ({error})") from error
    return states


def _check_same_model(policy: PolicyConfig, weights_path: Path) -> None:
    """Refuses a checkpoint whose model has other sizes than `policy.model_name`.

    Raises:
        UserError: names the fields, old and new.
    """
    ours = read_model_config(policy.model_name, policy.hf_config_overrides).to_dict()
    saved = read_model_config(str(weights_path)).to_dict()
    changed = [f"{key} {saved.get(key)} -> {ours.get(key)}" for key in _SHAPE_KEYS if saved.get(key) != ours.get(key)]
    if changed:
        raise UserError(
            f"the checkpoint {weights_path.parent.parent} is of another model than policy.model_name "
            f"{policy.model_name} ({', '.join(changed)}); use another checkpointing.checkpoint_dir"
        )

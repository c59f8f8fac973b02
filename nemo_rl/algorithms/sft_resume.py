"""Where a run starts: at step 0, or at the newest checkpoint, which has to be one of this run."""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_rl.algorithms.sft_identity import model_sizes
from nemo_rl.algorithms.sft_state import IDENTITY, SFTV2SaveState, _restore_save_state
from nemo_rl.data.energon.identity import differences
from nemo_rl.data.energon.topology import DataLoaderPlacementPlan
from nemo_rl.models.config import ModelConfig, PolicyConfig
from nemo_rl.models.engine.model_config import read_model_config
from nemo_rl.utils.checkpoint import CheckpointingConfig, CheckpointManager
from nemo_rl.utils.errors import UserError

log = logging.getLogger(__name__)

_WAYS_OUT = (
    "Restore the old values, use another checkpointing.checkpoint_dir, or give checkpointing.start_fresh=true, which "
    "moves the checkpoints there aside and starts at step 0"
)


@dataclass(frozen=True)
class ResumePoint:
    """Where a run starts.

    Attributes:
        save_state: the counters.
        identity: the record that the checkpoints of this run keep, `sft_identity.run_identity`.
        checkpoint: the checkpoint that is resumed; it and all below are None for a fresh run.
        weights_path: its weights.
        optimizer_path: its optimizer state, None when it was saved without.
        loader_states: the state of each logical shard, in shard order; None also where the checkpoint is from before
            there were any.
    """

    save_state: SFTV2SaveState
    identity: Mapping[str, Any]
    checkpoint: Path | None = None
    weights_path: Path | None = None
    optimizer_path: Path | None = None
    loader_states: list[dict[str, Any]] | None = None


def find_resume_point(
    checkpointing: CheckpointingConfig,
    policy: PolicyConfig,
    plan: DataLoaderPlacementPlan,
    identity: Mapping[str, Any],
) -> ResumePoint:
    """Reads the newest checkpoint, and every byte of it is compared with its digest; nothing is changed.

    Under `checkpointing.start_fresh` a run starts at step 0 whatever there is.

    Raises:
        UserError: it is damaged, of another run, or a part of it is missing or can't be read.
    """
    manager = CheckpointManager(checkpointing)
    is_resuming = checkpointing.enabled and not checkpointing.start_fresh
    last = manager.get_latest_checkpoint_path() if is_resuming else None
    if last is None:
        return ResumePoint(_restore_save_state(None, placement_hash=plan.placement_hash), identity)
    manager.verify(last)
    info = manager.load_training_info(last) or {}
    check_same_run(last, info, identity)
    states = _read_loader_states(last, plan.num_logical_shards)
    if states is None:
        # Nothing in it depends on a placement.
        info["placement_hash"] = plan.placement_hash
    save_state = _restore_save_state(info, placement_hash=plan.placement_hash)
    weights_path, optimizer_path = manager.get_resume_paths(last)
    assert weights_path is not None, "there is a checkpoint"
    check_same_model(policy, weights_path)
    return ResumePoint(
        save_state=save_state,
        identity=identity,
        checkpoint=last,
        weights_path=weights_path,
        optimizer_path=optimizer_path,
        loader_states=states,
    )


def check_same_run(checkpoint: Path, info: Mapping[str, Any], identity: Mapping[str, Any]) -> None:
    """Refuses a checkpoint that another run saved; one without a record is left to the checks of model and loaders.

    Raises:
        UserError: lists `key old -> new` for all that differs.
    """
    saved = info.get(IDENTITY)
    if not isinstance(saved, Mapping):
        log.warning(
            "%s has no record of its run (an older version made it): model and data are compared later", checkpoint
        )
        return
    changed = list(differences(saved, identity))
    if not changed:
        return
    is_layout = (
        any(line.startswith("data_shards ") for line in changed) and identity.get("topology_mapper") == "default"
    )
    hint = "; a run with data.energon.topology_mapper: elastic may change its number of workers" if is_layout else ""
    raise UserError(f"the checkpoint {checkpoint} is of another run: {'; '.join(changed)}. {_WAYS_OUT}{hint}")


def _read_loader_states(checkpoint: Path, num_shards: int) -> list[dict[str, Any]] | None:
    """The state of each shard, in shard order; None, with a warning, when the checkpoint is older than such states.

    Raises:
        UserError: a file is missing or no JSON.
    """
    folder = checkpoint / "loaders"
    if not folder.is_dir():
        log.warning("%s has no loader states (an older version made it): the data starts at its first row", checkpoint)
        return None
    states = []
    for shard in range(num_shards):
        path = folder / f"shard_{shard}.json"
        try:
            states.append(json.loads(path.read_text()))
        except (OSError, ValueError) as error:
            raise UserError(f"{path}: the state of data shard {shard} can't be read ({error})") from error
    return states


def check_same_model(model: ModelConfig, weights_path: Path) -> None:
    """Refuses a checkpoint whose model has other sizes than `model.model_name`.

    Raises:
        UserError: names the fields, old and new.
    """
    ours = model_sizes(read_model_config(model.model_name, model.hf_config_overrides))
    changed = list(differences(model_sizes(read_model_config(str(weights_path))), ours))
    if changed:
        raise UserError(
            f"the checkpoint {weights_path.parent.parent} is of another model than {model.section}.model_name "
            f"{model.model_name}: {'; '.join(changed)}. {_WAYS_OUT}"
        )

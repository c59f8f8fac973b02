"""Where an SFT run stands: the counters a checkpoint keeps, and what the driver hands to the controller."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_rl.algorithms.sft_config import MasterConfig
from nemo_rl.data.energon.config import EnergonSourceConfig
from nemo_rl.utils.errors import UserError

if TYPE_CHECKING:
    from nemo_rl.algorithms.loss.loss_functions import NLLLossFn
    from nemo_rl.data.energon.sft_types import LoaderSettings
    from nemo_rl.data.energon.topology import DataLoaderPlacementPlan
    from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
    from nemo_rl.models.policy.tq_policy import TQPolicy

IDENTITY = "identity"
"""The key of a checkpoint's `training_info.json` that holds the record of its run."""


@dataclass
class SFTV2SaveState:
    """Controller state committed at an optimizer-step boundary.

    Attributes:
        total_steps: completed steps, skipped ones included.
        consumed_samples: rows trained, each time they were.
        total_valid_tokens: trained tokens.
        placement_hash: of the data placement; a resume needs the same one.
        dropped_samples: rows that were drawn and not trained, by reason.
        skipped_steps: steps that changed nothing, by reason.
    """

    total_steps: int
    consumed_samples: int
    total_valid_tokens: int
    placement_hash: str
    dropped_samples: dict[str, int] = field(default_factory=dict)
    skipped_steps: dict[str, int] = field(default_factory=dict)


@dataclass
class SFTV2ActorArgs:
    """Driver-built objects used by the SFTv2 controller actor.

    Attributes:
        trainer: the policy on its workers.
        loss_fn: applied to every microbatch.
        train_cluster: kept so that its places stay reserved.
        placement_plan: which replica reads which shards.
        save_state: where the run starts.
        loader_states: state of each logical shard, in shard order; None to start at the first row.
        loader_settings: what the leaders build their loaders from.
        identity: the record of the run that its checkpoints keep.
        last_checkpoint_path: the checkpoint that is resumed, or None.
    """

    trainer: TQPolicy
    loss_fn: NLLLossFn
    train_cluster: RayVirtualCluster
    placement_plan: DataLoaderPlacementPlan
    save_state: SFTV2SaveState
    loader_states: list[dict[str, Any]] | None
    loader_settings: LoaderSettings
    identity: Mapping[str, Any]
    last_checkpoint_path: Path | None = None


def _initial_save_state(placement_hash: str) -> SFTV2SaveState:
    return SFTV2SaveState(total_steps=0, consumed_samples=0, total_valid_tokens=0, placement_hash=placement_hash)


def _restore_save_state(loaded: dict[str, Any] | None, *, placement_hash: str) -> SFTV2SaveState:
    """The state a run continues from; unknown keys are ignored.

    Raises:
        UserError: the checkpoint was saved with another placement, or says of none.
    """
    if loaded is None:
        return _initial_save_state(placement_hash)
    saved_hash = loaded.get("placement_hash")
    if saved_hash != placement_hash:
        raise UserError(
            f"the checkpoint was saved with data placement {saved_hash}, this run has {placement_hash}: the number of "
            "workers or of data.energon.logical_shards changed. Go back to the saved layout, use another "
            "checkpointing.checkpoint_dir, or train with data.energon.topology_mapper: elastic from the start"
        )
    known = {f.name for f in fields(SFTV2SaveState)}
    return replace(_initial_save_state(placement_hash), **{key: value for key, value in loaded.items() if key in known})


def _max_train_steps(master_config: MasterConfig) -> int:
    """Steps of the run: `max_num_steps`, or fewer when `max_num_epochs` passes end earlier.

    Raises:
        UserError: the length of a pass is not known; `setup_sft_v2` derives it from the row count.
    """
    source = EnergonSourceConfig.model_validate(master_config.data["train"], from_attributes=True)
    if not source.virtual_epoch_length or source.virtual_epoch_length <= 0:
        raise UserError(f"data.train.virtual_epoch_length is {source.virtual_epoch_length}; it must be above 0")
    return min(master_config.sft.max_num_steps, master_config.sft.max_num_epochs * source.virtual_epoch_length)

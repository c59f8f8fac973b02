"""Where a run stands: the counters that a checkpoint keeps, and what the driver hands to the controller."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nemo_rl.algorithms.loss.interfaces import LossFunction
    from nemo_rl.algorithms.single_controller_utils.prompt_cursor import PromptCursor
    from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
    from nemo_rl.distributed.worker_groups import RayWorkerGroup
    from nemo_rl.models.policy.tq_policy import TQPolicy
    from nemo_rl.models.value.tq_value import TQValue


IDENTITY = "identity"
"""The key of a checkpoint's `training_info.json` that holds the record of its run."""


@dataclass
class SaveState:
    """State committed at the end of a step.

    Attributes:
        total_steps: finished steps; also the version of the sampler's weights.
        policy_updates: optimizer steps of the policy; fewer, where the critic was warmed up first.
        consumed_samples: samples trained.
        total_valid_tokens: trained tokens.
        prompts_ordered: prompts handed out so far, over all passes.
        ordered_steps: steps whose prompts were handed out.
        dropped: prompts and samples that were not trained, by reason.
        dropped_prompts: prompts among them that no other one replaced.
        skipped_steps: policy updates that changed nothing, by reason.
        skipped_in_a_row: of the last updates, those with a non-finite gradient.
    """

    total_steps: int = 0
    policy_updates: int = 0
    consumed_samples: int = 0
    total_valid_tokens: int = 0
    prompts_ordered: int = 0
    ordered_steps: int = 0
    dropped_prompts: int = 0
    skipped_in_a_row: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    skipped_steps: dict[str, int] = field(default_factory=dict)

    @classmethod
    def restore(cls, saved: Mapping[str, Any] | None) -> SaveState:
        """The state of `training_info.json`; unknown keys are ignored, None is a fresh run."""
        known = {f.name for f in fields(cls)}
        return cls(**{key: value for key, value in (saved or {}).items() if key in known})

    def count_dropped(self, reason: str, count: int = 1) -> None:
        """Counts what will not be trained."""
        if count:
            self.dropped[reason] = self.dropped.get(reason, 0) + count


@dataclass
class SingleControllerActorArgs:
    """Driver-built objects that the controller uses. Handles only: nothing here holds a tensor.

    Attributes:
        trainer_handle: the policy.
        value_handle: the critic; None for GRPO.
        rollout_group: the workers that sample.
        stage_group: the one worker beside the controller that computes advantages and keeps unconsumed rows.
        train_cluster: kept so that its places stay reserved.
        loss_fn, value_loss_fn: applied to every microbatch.
        partition_id: of the rollouts.
        prompts: which prompt comes next.
        validation_prompts: usable prompts of `data.validation`.
        save_state: where the run starts.
        identity: the record of the run that its checkpoints keep.
        last_checkpoint_path: the checkpoint that is resumed, or None.
    """

    trainer_handle: TQPolicy
    value_handle: TQValue | None
    rollout_group: RayWorkerGroup
    stage_group: RayWorkerGroup
    train_cluster: RayVirtualCluster
    loss_fn: LossFunction
    value_loss_fn: LossFunction | None
    partition_id: str
    prompts: PromptCursor
    validation_prompts: int
    save_state: SaveState
    identity: Mapping[str, Any]
    last_checkpoint_path: Path | None = None

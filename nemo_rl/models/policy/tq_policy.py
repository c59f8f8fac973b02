"""The policy behind a data plane: the controller sends metas, the workers fetch their rows in one hop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from nemo_rl.data_plane.interfaces import DataPlaneRuntimeConfig, KVBatchMeta
from nemo_rl.data_plane.leveling import level_placed_rows
from nemo_rl.data_plane.preshard import stamp_common_width
from nemo_rl.data_plane.schema import DP_TRAIN_FIELDS, LP_SEED_FIELDS
from nemo_rl.models.driver import aggregate_train_results
from nemo_rl.models.policy.lm_policy import Policy
from nemo_rl.models.tq_driver import TQModelDriver
from nemo_rl.utils.timer import Timer

if TYPE_CHECKING:
    from nemo_rl.algorithms.loss.interfaces import LossFunction

# The tasks that read the rows of a step, in their order.
_PREV_LP, _REF_LP, _TRAIN = "prev_lp", "ref_lp", "train"


class TQPolicy(TQModelDriver, Policy):
    """A `Policy` whose calls take metas. It starts what the clients of a shared plane attach to.

    Args:
        dp_cfg: the data plane; workers attach to it when the policy is built.
        tq_partition_id: partition that this policy registers on a shared plane.
        *args, **kwargs: of `Policy`.

    Raises:
        ValueError: there is no data axis to place rows on.
    """

    _bootstraps = True
    _train_fields = DP_TRAIN_FIELDS
    _train_task = _TRAIN
    _train_label = "policy_training"

    def __init__(self, *args: Any, dp_cfg: DataPlaneRuntimeConfig, tq_partition_id: str = "train", **kwargs: Any):
        super().__init__(*args, dp_cfg=dp_cfg, **kwargs)
        self.tq_partition_id = tq_partition_id

    # -- rows of a step -----------------------------------------------------------------------------------------------

    def prepare_step(self, num_samples: int, group_size: int | None = None) -> None:
        """Registers the partition of a step.

        Args:
            num_samples: its rows.
            group_size: rows per prompt, as the interface has it; rows carry their group in their id.
        """
        self.dp_client.register_partition(
            self.tq_partition_id, DP_TRAIN_FIELDS, num_samples, [_PREV_LP, _REF_LP, _TRAIN]
        )

    def prepare_val_partition(self, num_samples: int, *, partition_id: str = "val") -> None:
        """Registers a partition for rows that are only scored; its one task has its name."""
        self.dp_client.register_partition(partition_id, DP_TRAIN_FIELDS, num_samples, [partition_id])

    def discard_samples(self, sample_ids: Sequence[str], partition_id: str) -> None:
        """Removes rows from the plane; those that are not there are no error."""
        self.dp_client.clear_samples(list(sample_ids), partition_id)

    def finish_step(self, meta: KVBatchMeta) -> None:
        """Removes the rows of `meta` from the plane."""
        self.discard_samples(meta.sample_ids, meta.partition_id)

    # -- whole calls --------------------------------------------------------------------------------------------------

    def get_logprobs_from_meta(
        self, meta: KVBatchMeta, micro_batch_size: int | None = None, timer: Timer | None = None
    ) -> None:
        """Writes the column `prev_logprobs` of the rows: the trained positions, 0 elsewhere.

        Args:
            micro_batch_size: rows of a pass if all had the greatest length; None takes the configured budget.
            timer: gets `get_logprobs/shard_meta` and `get_logprobs/submit_futures`.

        Raises:
            ValueError: no rows, or a process-local plane.
        """
        self._infer_on_meta(
            "get_logprobs_presharded",
            meta,
            fields=LP_SEED_FIELDS,
            task_name=_PREV_LP,
            micro_batch_size=micro_batch_size,
            timer=timer,
            labels=("get_logprobs", "submit_futures"),
            reason="log-probabilities",
        )

    def get_reference_policy_logprobs_from_meta(
        self, meta: KVBatchMeta, micro_batch_size: int | None = None, timer: Timer | None = None
    ) -> None:
        """Writes the column `reference_policy_logprobs`, as `get_logprobs_from_meta`, by the weights of the start."""
        self._infer_on_meta(
            "get_reference_policy_logprobs_presharded",
            meta,
            fields=LP_SEED_FIELDS,
            task_name=_REF_LP,
            micro_batch_size=micro_batch_size,
            timer=timer,
            labels=("get_reference_policy_logprobs", "submit_futures"),
            reason="reference log-probabilities",
        )

    def train_from_meta(
        self,
        meta: KVBatchMeta,
        loss_fn: LossFunction,
        eval_mode: bool = False,
        gbs: int | None = None,
        mbs: int | None = None,
        timer: Timer | None = None,
        train_fields: Sequence[str] = DP_TRAIN_FIELDS,
    ) -> dict[str, Any]:
        """Optimizer steps of `gbs` rows each over the rows of `meta`; see `aggregate_train_results`.

        Args:
            loss_fn: applied to every microbatch.
            eval_mode: forward only.
            gbs: None takes `train_global_batch_size`.
            mbs: rows of a pass if all had the greatest length; None takes the configured budget.
            timer: gets `policy_training/shard_meta` and `policy_training/submit_training_futures`.
            train_fields: columns that the loss reads.

        Raises:
            ValueError: rows that do not divide into steps, or a process-local plane.
        """
        results = self._train_on_meta(
            meta, loss_fn, eval_mode=eval_mode, gbs=gbs, mbs=mbs, timer=timer, train_fields=train_fields
        )
        return aggregate_train_results(results)

    # -- rows that lie with their replicas ----------------------------------------------------------------------------

    def train_placed_microbatches(self, dp_metas: list[KVBatchMeta], timer: Timer | None = None) -> None:
        """Forward and backward over rows that already lie with their replicas, `dp_metas[i]` with replica i.

        The metas are not changed; all ranks get the same padded width. A few rows change places between replicas, so
        that all compute about equally many tokens. Returns at once: what fails there fails the next call.

        Raises:
            ValueError: not one meta per replica.
        """
        metas = level_placed_rows(self._placed(dp_metas))
        with (timer or Timer()).time("policy_training/submit_microbatch_futures"):
            self._send_sharded("train_microbatch_presharded", reason="forward and backward", meta=metas)

    def eval_placed_microbatches(self, dp_metas: list[KVBatchMeta], loss_fn: LossFunction) -> dict[str, float]:
        """Sums over rows that lie with their replicas: `loss_sum`, `valid_tokens`, `valid_rows`.

        Raises:
            ValueError: not one meta per replica.
        """
        results = self._call_sharded(
            "eval_microbatch_presharded",
            reason="validation",
            meta=self._placed(dp_metas),
            common={"loss_fn": loss_fn},
        )
        return {key: sum(result[key] for result in results) for key in results[0]}

    def _placed(self, dp_metas: list[KVBatchMeta]) -> list[KVBatchMeta]:
        if len(dp_metas) != self.data_parallel_size:
            raise ValueError(f"{len(dp_metas)} metas for {self.data_parallel_size} replicas")
        return [replace(meta, task_name=_TRAIN) for meta in stamp_common_width(dp_metas)]

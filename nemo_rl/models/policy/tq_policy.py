"""The policy behind a data plane: the controller sends metas, the workers fetch their rows in one hop."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from nemo_rl.data_plane.driver_mixin import TQDriverMixin
from nemo_rl.data_plane.factory import build_data_plane_client
from nemo_rl.data_plane.interfaces import DataPlaneRuntimeConfig, KVBatchMeta
from nemo_rl.data_plane.preshard import shard_meta_for_dp, stamp_common_width
from nemo_rl.data_plane.schema import DP_TRAIN_FIELDS
from nemo_rl.models.driver import aggregate_train_results
from nemo_rl.models.policy.lm_policy import Policy
from nemo_rl.utils.errors import MemoryExhaustedError
from nemo_rl.utils.timer import Timer

if TYPE_CHECKING:
    from nemo_rl.algorithms.loss.interfaces import LossFunction

log = logging.getLogger(__name__)


class TQPolicy(TQDriverMixin, Policy):
    """A `Policy` whose training calls take metas.

    Args:
        dp_cfg: the data plane; workers attach to it when the policy is built.
        tq_partition_id: partition that this policy registers on a shared plane.
        *args, **kwargs: of `Policy`.

    Raises:
        ValueError: there is no data axis to place rows on.
    """

    def __init__(self, *args: Any, dp_cfg: DataPlaneRuntimeConfig, tq_partition_id: str = "train", **kwargs: Any):
        super().__init__(*args, **kwargs)
        if self.data_parallel_size <= 0:
            raise ValueError(f"the data axis has size {self.data_parallel_size}")
        self.dp_cfg = dp_cfg
        self.tq_partition_id = tq_partition_id
        self.dp_client = build_data_plane_client(dp_cfg, bootstrap=True)
        self._call_all("setup_data_plane", reason="attaching to the data plane", cfg=dp_cfg)

    def __getstate__(self) -> dict[str, Any]:
        """The handles without the data-plane client; a copy in another process attaches on its own."""
        return {key: value for key, value in self.__dict__.items() if key != "dp_client"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.dp_client = build_data_plane_client(self.dp_cfg, bootstrap=False)

    def shutdown(self) -> bool:
        """Closes the data-plane client, then ends the workers."""
        try:
            self.dp_client.close()
        except Exception as error:  # noqa: BLE001  a plane that fails to close must not keep the workers alive
            log.warning("closing the data plane: %s", error)
        return super().shutdown()

    # -- one optimizer step in parts ----------------------------------------------------------------------------------

    def begin_train_step(self, loss_fn: LossFunction, gbs: int | None = None, mbs: int | None = None) -> None:
        """Opens a step on every worker.

        Raises:
            RunError: a step is open.
        """
        self._call_all(
            "begin_train_step_presharded", reason="opening a training step", loss_fn=loss_fn, gbs=gbs, mbs=mbs
        )

    def train_placed_microbatches(self, dp_metas: list[KVBatchMeta], timer: Timer | None = None) -> None:
        """Forward and backward over rows that already lie with their replicas, `dp_metas[i]` with replica i.

        The metas are not changed; all ranks get the same padded width.

        Raises:
            ValueError: not one meta per replica.
        """
        metas = self._placed(dp_metas)
        with (timer or Timer()).time("policy_training/submit_microbatch_futures"):
            self._call_sharded("train_microbatch_presharded", reason="forward and backward", meta=metas)

    def train_microbatches_from_meta(
        self, meta: KVBatchMeta, timer: Timer | None = None, train_fields: Sequence[str] = DP_TRAIN_FIELDS
    ) -> None:
        """Forward and backward over rows of a shared plane, dealt to the replicas here; gradients add up.

        Raises:
            ValueError: the plane is process-local, so that rows can't be dealt, or the rows do not divide.
        """
        if self.dp_client.process_local:
            raise ValueError("rows of a process-local data plane lie with their replicas: train_placed_microbatches")
        timer = timer or Timer()
        with timer.time("policy_training/shard_meta"):
            isolated = self._isolated_meta(meta, fields=train_fields, task_name="train")
            metas, _ = shard_meta_for_dp(isolated, dp_world=self.data_parallel_size)
        with timer.time("policy_training/submit_microbatch_futures"):
            self._call_sharded("train_microbatch_presharded", reason="forward and backward", meta=metas)

    def finish_train_step(self) -> dict[str, Any]:
        """One reduction, one update; `loss`, `grad_norm`, `skipped`, `all_mb_metrics`, `num_ranks`."""
        return aggregate_train_results(self._call_all("finish_train_step_presharded", reason="the optimizer step"))

    def can_retry(self, error: BaseException) -> bool:
        """Whether the step that failed with `error` may be tried again after `abort_train_step`.

        Only when a pass ran out of memory, and only where ranks do not wait for each other inside a pass: where they
        do, the other ranks are stuck in a collective.
        """
        cause = getattr(error.__cause__, "cause", None)
        return isinstance(cause, MemoryExhaustedError) and not self.model_info["sharded"]

    def halve_microbatches(self) -> int:
        """Halves the token budget of all later passes; returns the new one."""
        return min(self._call_all("halve_microbatches", reason="making microbatches smaller"))

    def abort_train_step(self) -> None:
        """Discards the open step on every worker; a no-op where there is none."""
        self._call_all("abort_train_step_presharded", reason="aborting a training step")

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
        return [replace(meta, task_name="train") for meta in stamp_common_width(dp_metas)]

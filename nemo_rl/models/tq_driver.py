"""What policy and critic share behind a data plane: metas come in, rows are dealt to the replicas, one hop each."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from nemo_rl.data_plane.control import ControlOnlyClient
from nemo_rl.data_plane.driver_mixin import TQDriverMixin
from nemo_rl.data_plane.factory import build_data_plane_client
from nemo_rl.data_plane.interfaces import DataPlaneRuntimeConfig, KVBatchMeta
from nemo_rl.data_plane.preshard import deal_meta_by_length
from nemo_rl.models.driver import ModelDriver, aggregate_train_results
from nemo_rl.utils.errors import MemoryExhaustedError
from nemo_rl.utils.timer import Timer

if TYPE_CHECKING:
    from nemo_rl.algorithms.loss.interfaces import LossFunction

log = logging.getLogger(__name__)


class TQModelDriver(TQDriverMixin, ModelDriver):
    """A model whose calls take metas. A role sets the four class attributes.

    The rows of a call are dealt to the replicas by length, and their number need not divide. Metas are not changed.
    The calls here read and write no column: `dp_client` may be replaced by a `ControlOnlyClient`.

    Raises:
        ValueError: there is no data axis to place rows on.
    """

    _bootstraps: ClassVar[bool]
    """Whether this role starts what all clients of the plane share, or attaches to it."""
    _train_fields: ClassVar[Sequence[str]]
    """Columns that a step reads."""
    _train_task: ClassVar[str]
    """The task that training reads them for."""
    _train_label: ClassVar[str]
    """First part of the names of its timings."""

    def __init__(self, *args: Any, dp_cfg: DataPlaneRuntimeConfig, **kwargs: Any):
        super().__init__(*args, **kwargs)
        try:
            if self.data_parallel_size <= 0:
                raise ValueError(f"the data axis has size {self.data_parallel_size}")
            self.dp_cfg = dp_cfg
            self.dp_client = build_data_plane_client(dp_cfg, bootstrap=self._bootstraps)
            self._call_all("setup_data_plane", reason="attaching to the data plane", cfg=dp_cfg)
        except BaseException:
            self.worker_group.shutdown(force=True)
            raise

    def __getstate__(self) -> dict[str, Any]:
        """The handles without the data-plane client; a copy in another process attaches a client of the same kind."""
        handles = {key: value for key, value in self.__dict__.items() if key != "dp_client"}
        return {"handles": handles, "control_only": isinstance(self.dp_client, ControlOnlyClient)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state["handles"])
        client = build_data_plane_client(self.dp_cfg, bootstrap=False)
        self.dp_client = ControlOnlyClient(client) if state["control_only"] else client

    def shutdown(self) -> bool:
        """Closes the data-plane client, then ends the workers."""
        try:
            self.dp_client.close()
        except Exception as error:  # noqa: BLE001  a plane that fails to close must not keep the workers alive
            log.warning("closing the data plane: %s", error)
        return super().shutdown()

    # -- one optimizer step in parts ----------------------------------------------------------------------------------

    def begin_train_step(self, loss_fn: LossFunction, gbs: int | None = None, mbs: int | None = None) -> None:
        """Opens a step on every worker. Returns at once: a step that is open already fails the next call."""
        self._send_all(
            "begin_train_step_presharded", reason="opening a training step", loss_fn=loss_fn, gbs=gbs, mbs=mbs
        )

    def train_microbatches_from_meta(
        self, meta: KVBatchMeta, timer: Timer | None = None, train_fields: Sequence[str] | None = None
    ) -> None:
        """Forward and backward over rows of a shared plane; gradients add up.

        Args:
            meta: any part of the step's rows.
            timer: gets `<label>/shard_meta` and `<label>/submit_microbatch_futures`.
            train_fields: columns to read; None takes those of the role.

        Raises:
            ValueError: no rows, or the plane is process-local, so that rows can't be dealt.
            RunError: no step is open.
        """
        timer = timer or Timer()
        metas = self._deal(
            meta,
            fields=self._train_fields if train_fields is None else train_fields,
            task_name=self._train_task,
            timer=timer,
            label=self._train_label,
        )
        with timer.time(f"{self._train_label}/submit_microbatch_futures"):
            self._call_sharded("train_microbatch_presharded", reason="forward and backward", meta=metas)

    def finish_train_step(self) -> dict[str, Any]:
        """One reduction, one update; `loss`, `grad_norm`, `skipped`, `all_mb_metrics`, `num_ranks`.

        Raises:
            RunError: a worker failed since the step began, or a step was open already. Nothing is updated then.
        """
        return aggregate_train_results(self._call_all("finish_train_step_presharded", reason="the optimizer step"))

    def train_step_from_meta(
        self, meta: KVBatchMeta, loss_fn: LossFunction, train_fields: Sequence[str] | None = None
    ) -> dict[str, Any]:
        """One step over all its rows, with one call to the workers in place of three; as `finish_train_step`.

        Args:
            meta: the rows of the step.
            loss_fn: applied to every microbatch.
            train_fields: columns to read; None takes those of the role.

        Raises:
            ValueError: no rows, or the plane is process-local.
            RunError: a step is open.
        """
        results = self._train_on_meta(
            meta, loss_fn, eval_mode=False, gbs=meta.size, mbs=None, timer=None, train_fields=train_fields
        )
        return aggregate_train_results(results)

    def abort_train_step(self) -> None:
        """Discards the open step on every worker; a no-op where there is none."""
        self._call_all("abort_train_step_presharded", reason="aborting a training step")

    def can_retry(self, error: BaseException) -> bool:
        """Whether the step that failed with `error` may be tried again after `abort_train_step`.

        Only when a pass ran out of memory, and only where ranks do not wait for each other inside a pass: where they
        do, the other ranks are stuck in a collective.
        """
        cause = getattr(error.__cause__, "cause", None)
        return isinstance(cause, MemoryExhaustedError) and not self.model_info["sharded"]

    def halve_microbatches(self) -> int:
        """Halves the token budget of all later passes; returns the new one of training."""
        return min(self._call_all("halve_microbatches", reason="making microbatches smaller"))

    # -- whole calls --------------------------------------------------------------------------------------------------

    def _train_on_meta(
        self,
        meta: KVBatchMeta,
        loss_fn: LossFunction,
        *,
        eval_mode: bool,
        gbs: int | None,
        mbs: int | None,
        timer: Timer | None,
        train_fields: Sequence[str] | None = None,
    ) -> list[dict[str, Any]]:
        """The leaders' results of whole optimizer steps of `gbs` rows each."""
        timer = timer or Timer()
        gbs = self.cfg.train_global_batch_size if gbs is None else gbs
        metas = self._deal(
            meta,
            fields=self._train_fields if train_fields is None else train_fields,
            task_name=self._train_task,
            timer=timer,
            label=self._train_label,
            batch_size=gbs,
        )
        with timer.time(f"{self._train_label}/submit_training_futures"):
            return self._call_sharded(
                "train_presharded",
                reason="training",
                meta=metas,
                common={"loss_fn": loss_fn, "eval_mode": eval_mode, "gbs": gbs, "mbs": mbs},
            )

    def _infer_on_meta(
        self,
        method: str,
        meta: KVBatchMeta,
        *,
        fields: Sequence[str],
        task_name: str,
        micro_batch_size: int | None,
        timer: Timer | None,
        labels: tuple[str, str],
        reason: str,
    ) -> None:
        """Has the workers add a column to the rows; `labels` are what timings start with and end on."""
        timer = timer or Timer()
        first, last = labels
        metas = self._deal(meta, fields=fields, task_name=task_name, timer=timer, label=first)
        with timer.time(f"{first}/{last}"):
            self._call_sharded(method, reason=reason, meta=metas, common={"micro_batch_size": micro_batch_size})

    def _deal(
        self,
        meta: KVBatchMeta,
        *,
        fields: Sequence[str],
        task_name: str,
        timer: Timer,
        label: str,
        batch_size: int | None = None,
    ) -> list[KVBatchMeta]:
        if self.dp_client.process_local:
            raise ValueError("rows of a process-local data plane lie with their replicas: train_placed_microbatches")
        with timer.time(f"{label}/shard_meta"):
            isolated = self._isolated_meta(meta, fields=fields, task_name=task_name)
            return deal_meta_by_length(isolated, dp_world=self.data_parallel_size, batch_size=batch_size)

"""The critic behind a data plane, as `TQPolicy` is the policy: metas come in, values stay in the plane."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nemo_rl.data_plane.interfaces import KVBatchMeta
from nemo_rl.data_plane.schema import DP_VALUE_TRAIN_FIELDS, VALUE_SEED_FIELDS
from nemo_rl.models.driver import aggregate_train_results
from nemo_rl.models.tq_driver import TQModelDriver
from nemo_rl.models.value.lm_value import Value, value_train_result
from nemo_rl.utils.timer import Timer

if TYPE_CHECKING:
    from nemo_rl.algorithms.loss.interfaces import LossFunction

_REPLICATED_AXES: list[str] = ["context_parallel", "tensor_parallel", "pipeline_parallel"]
"""The siblings of a replica along these axes hold the same rows; the one at 0 on all of them reads and writes."""


class TQValue(TQModelDriver, Value):
    """A `Value` whose calls take metas.

    It attaches to a plane that someone else started, such as the `TQPolicy` built before it, and never registers or
    clears a partition. A step is one `train_from_meta`, or comes in parts: `begin_train_step`, any number of
    `train_microbatches_from_meta`, then `finish_train_step` or `abort_train_step`; the update is the same.

    Args:
        dp_cfg: the data plane; workers attach to it when the critic is built.
        *args, **kwargs: of `Value`.

    Raises:
        ValueError: there is no data axis to place rows on.
    """

    _bootstraps = False
    _train_fields = DP_VALUE_TRAIN_FIELDS
    _train_task = "value_train"
    _train_label = "value_training"

    def get_values_from_meta(
        self, meta: KVBatchMeta, micro_batch_size: int | None = None, timer: Timer | None = None
    ) -> None:
        """Writes the column `values` of the rows: the estimate before each token, column 0 is 0.

        They do not depend on the number of replicas, on packing or on the order of the rows.

        Args:
            micro_batch_size: rows of a pass if all had the greatest length; None takes the configured budget.
            timer: gets `get_values/shard_meta` and `get_values/submit_value_futures`.

        Raises:
            ValueError: no rows, or a process-local plane.
        """
        self._infer_on_meta(
            "get_values_presharded",
            meta,
            fields=VALUE_SEED_FIELDS,
            task_name="value_fwd",
            micro_batch_size=micro_batch_size,
            timer=timer,
            labels=("get_values", "submit_value_futures"),
            reason="values",
        )

    def train_from_meta(
        self,
        meta: KVBatchMeta,
        loss_fn: LossFunction,
        eval_mode: bool = False,
        gbs: int | None = None,
        mbs: int | None = None,
        timer: Timer | None = None,
    ) -> dict[str, Any]:
        """One optimizer step per `gbs` rows of `meta`; the columns `values` and `returns` must be there.

        Args:
            loss_fn: the value loss.
            eval_mode: forward only.
            gbs: None takes `train_global_batch_size`.
            mbs: rows of a pass if all had the greatest length; None takes the configured budget.
            timer: gets `value_training/shard_meta` and `value_training/submit_training_futures`.

        Returns:
            `loss`, `grad_norm`, `all_mb_metrics`; see `value_train_result`.

        Raises:
            ValueError: rows that do not divide into steps, or a process-local plane.
        """
        results = self._train_on_meta(meta, loss_fn, eval_mode=eval_mode, gbs=gbs, mbs=mbs, timer=timer)
        return _aggregate_train_results(results)


def _aggregate_train_results(results: list[dict[str, Any]]) -> dict[str, Any]:
    """The workers' results as `Value.train` returns them.

    Raises:
        ValueError: no results.
    """
    return value_train_result(aggregate_train_results(results))

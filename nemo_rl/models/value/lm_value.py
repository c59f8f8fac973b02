"""The critic as a plain model: batches go to the workers from the caller."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl.models.driver import ModelDriver
from nemo_rl.models.value.config import ValueConfig
from nemo_rl.models.value.interfaces import ValueInterface
from nemo_rl.utils.timer import Timer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from nemo_rl.algorithms.loss.interfaces import LossFunction
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict

WORKER_CLASS = "nemo_rl.models.worker.ModelWorker"


class Value(ModelDriver, ValueInterface):
    """A critic on the workers of a cluster, which a policy may share.

    Args:
        cluster: where the workers run.
        config: the `value` section.
        tokenizer: saved with checkpoints; gives the pad id of padded views.
        name_prefix: workers are called `<name_prefix>-<rank>`.
        workers_per_node: None takes every place of the cluster.
        init_optimizer: False builds a model for inference only.
        weights_path: `value/weights` of a checkpoint to continue from.
        optimizer_path: its `value/optimizer`.
        seed: of dropout and of a drawn value head.
    """

    def __init__(
        self,
        cluster: RayVirtualCluster,
        config: ValueConfig,
        tokenizer: PreTrainedTokenizerBase,
        name_prefix: str = "lm_value",
        workers_per_node: int | list[int] | None = None,
        init_optimizer: bool = True,
        weights_path: str | Path | None = None,
        optimizer_path: str | Path | None = None,
        seed: int = 42,
    ):
        super().__init__(
            cluster,
            config,
            tokenizer,
            name_prefix=name_prefix,
            worker_class_fqn=WORKER_CLASS,
            workers_per_node=workers_per_node,
            init_optimizer=init_optimizer,
            weights_path=weights_path,
            optimizer_path=optimizer_path,
            seed=seed,
        )

    def get_values(
        self, data: BatchedDataDict, timer: Timer | None = None, micro_batch_size: int | None = None
    ) -> BatchedDataDict:
        """`values [B, S]` float32, in the order of `data`: the estimate before each token; column 0 and padding are 0.

        Args:
            data: `input_ids [B, S]`, `input_lengths [B]`; any number of rows.
            timer: gets `get_values/submit_value_futures`.
            micro_batch_size: rows of a pass if all had the greatest length; None takes the configured budget.
        """
        with (timer or Timer()).time("get_values/submit_value_futures"):
            return self._infer("get_values", data, micro_batch_size, reason="values")

    def train(
        self,
        data: BatchedDataDict,
        loss_fn: LossFunction,
        eval_mode: bool = False,
        gbs: int | None = None,
        mbs: int | None = None,
        timer: Timer | None = None,
    ) -> dict[str, Any]:
        """Optimizer steps of `gbs` rows over `data`, which is sent from here; see `value_train_result`.

        Raises:
            ValueError: the rows do not divide into steps and replicas.
        """
        with (timer or Timer()).time("value_training/submit_training_futures"):
            return value_train_result(super().train(data, loss_fn, eval_mode, gbs, mbs))


def value_train_result(joined: dict[str, Any]) -> dict[str, Any]:
    """Of a joined result `loss` (mean over the steps), `grad_norm` of the last step, `all_mb_metrics`; nothing else.

    A step that changed nothing shows as a `grad_norm` that is not finite, or as 0 `global_valid_toks`.
    """
    return {key: joined[key] for key in ("loss", "grad_norm", "all_mb_metrics")}

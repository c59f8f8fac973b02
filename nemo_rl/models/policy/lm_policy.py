"""The policy as a plain model: batches go to the workers from the caller."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl.models.config import PolicyConfig
from nemo_rl.models.driver import ModelDriver

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from nemo_rl.distributed.batched_data_dict import BatchedDataDict

WORKER_CLASS = "nemo_rl.models.worker.ModelWorker"


class Policy(ModelDriver):
    """A language model on the workers of a cluster.

    Args:
        cluster: where the workers run.
        config: the `policy` section.
        tokenizer: saved with checkpoints; gives the pad id of padded views.
        name_prefix: workers are called `<name_prefix>-<rank>`.
        workers_per_node: None takes every place of the cluster.
        init_optimizer: False builds a model for inference only.
        weights_path: `policy/weights` of a checkpoint to continue from.
        optimizer_path: its `policy/optimizer`.
        worker_extension_cls_fqn: a worker class in place of `ModelWorker`, by dotted name.
        seed: of dropout.
    """

    def __init__(
        self,
        cluster: RayVirtualCluster,
        config: PolicyConfig,
        tokenizer: PreTrainedTokenizerBase,
        name_prefix: str = "lm_policy",
        workers_per_node: int | list[int] | None = None,
        init_optimizer: bool = True,
        weights_path: str | Path | None = None,
        optimizer_path: str | Path | None = None,
        worker_extension_cls_fqn: str | None = None,
        seed: int = 42,
    ):
        super().__init__(
            cluster,
            config,
            tokenizer,
            section="policy",
            name_prefix=name_prefix,
            worker_class_fqn=worker_extension_cls_fqn or WORKER_CLASS,
            workers_per_node=workers_per_node,
            init_optimizer=init_optimizer,
            weights_path=weights_path,
            optimizer_path=optimizer_path,
            seed=seed,
        )

    def get_logprobs(self, data: BatchedDataDict, micro_batch_size: int | None = None) -> BatchedDataDict:
        """`logprobs [B, S]` float32 of each token given its prefix, in the order of `data`; column 0 is 0.

        Raises:
            ValueError: the rows do not divide by the number of replicas.
        """
        if data.size % self.data_parallel_size:
            raise ValueError(f"{data.size} rows do not divide by {self.data_parallel_size} replicas")
        results: list[Any] = self._call_sharded(
            "get_logprobs",
            reason="log-probabilities",
            data=data.shard_by_batch_size(self.data_parallel_size),
            common={"micro_batch_size": micro_batch_size},
        )
        return type(data).from_batches(results)

"""The policy as a plain model: batches go to the workers from the caller."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl.models.config import PolicyConfig
from nemo_rl.models.driver import ModelDriver
from nemo_rl.utils.timer import Timer

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
        init_reference_model: also hold a frozen copy of the weights of `model_name`, whatever is continued from.
        worker_extension_cls_fqn: a worker class in place of `ModelWorker`, by dotted name.
        seed: of dropout.
        temperature: that of the sampler; logits are divided by it here too.
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
        init_reference_model: bool = False,
        worker_extension_cls_fqn: str | None = None,
        seed: int = 42,
        temperature: float = 1.0,
    ):
        super().__init__(
            cluster,
            config,
            tokenizer,
            name_prefix=name_prefix,
            worker_class_fqn=worker_extension_cls_fqn or WORKER_CLASS,
            workers_per_node=workers_per_node,
            init_optimizer=init_optimizer,
            weights_path=weights_path,
            optimizer_path=optimizer_path,
            seed=seed,
            engine_options={"reference": init_reference_model, "temperature": temperature},
        )

    def get_logprobs(
        self, data: BatchedDataDict, micro_batch_size: int | None = None, timer: Timer | None = None
    ) -> BatchedDataDict:
        """`logprobs [B, S]` float32 of each token given its prefix, in the order of `data`; column 0 is 0.

        Where `data` has a column `token_mask`, of its tokens only; the others are 0. Any number of rows is taken.
        """
        with (timer or Timer()).time("get_logprobs/submit_futures"):
            return self._infer("get_logprobs", data, micro_batch_size, reason="log-probabilities")

    def get_reference_policy_logprobs(
        self, data: BatchedDataDict, micro_batch_size: int | None = None, timer: Timer | None = None
    ) -> BatchedDataDict:
        """`reference_logprobs [B, S]` float32: as `get_logprobs`, by the weights that the run started from.

        Raises:
            RunError: the policy was built without `init_reference_model`.
        """
        with (timer or Timer()).time("get_reference_policy_logprobs/submit_futures"):
            method = "get_reference_policy_logprobs"
            return self._infer(method, data, micro_batch_size, reason="reference log-probabilities")

"""What the driver builds before the controller runs: workers, placement, resume state."""

import logging
from typing import Any

from nemo_rl.algorithms.loss.loss_functions import NLLLossFn
from nemo_rl.algorithms.sft_checks import SFTInputs, inspect_inputs
from nemo_rl.algorithms.sft_config import MasterConfig
from nemo_rl.algorithms.sft_state import SFTV2ActorArgs, _max_train_steps
from nemo_rl.data.energon.sft_types import LoaderSettings
from nemo_rl.data.energon.sources import batches_per_pass
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl.models.policy.tq_policy import TQPolicy
from nemo_rl.utils.checkpoint import CheckpointManager
from nemo_rl.utils.errors import ConfigError

log = logging.getLogger(__name__)

WORKER_CLASS = "nemo_rl.data.energon.sft_worker.SFTPolicyWorker"


def build_actor_args(config: MasterConfig, tokenizer: Any, inputs: SFTInputs | None = None) -> SFTV2ActorArgs:
    """What `nemo_rl.algorithms.sft_v2.setup_sft_v2` returns; see there.

    `inputs` is what `inspect_inputs` found, for callers that have asked it already.
    """
    inputs = inspect_inputs(config) if inputs is None else inputs
    if inputs.problems or inputs.train is None or inputs.plan is None or inputs.resume is None:
        raise ConfigError(inputs.problems)
    plan = inputs.plan
    rows_per_shard = config.policy.train_global_batch_size // plan.num_logical_shards
    if not config.data.train.virtual_epoch_length:
        config.data.train.virtual_epoch_length = batches_per_pass(inputs.train, plan.num_logical_shards, rows_per_shard)
    if config.policy.megatron_cfg is not None:
        config.policy.megatron_cfg.train_iters = _max_train_steps(config)
    resume = inputs.resume
    if resume.checkpoint is not None:
        log.info("resuming from %s, step %d", resume.checkpoint, resume.save_state.total_steps)
    settings = LoaderSettings(
        data_config=config.data,
        train=inputs.train,
        validation=inputs.validation,
        num_logical_shards=plan.num_logical_shards,
        rows_per_shard=rows_per_shard,
        val_rows_per_shard=-(-config.sft.val_global_batch_size // plan.num_logical_shards),
        max_val_batches=config.sft.val_batches or None,
        max_sequence_length=config.data.max_input_seq_length or config.policy.max_total_sequence_length,
        only_unmask_final=config.sft.only_unmask_final,
        seed=config.sft.seed,
    )
    cluster = RayVirtualCluster.from_config(config.cluster, name="sft_v2_cluster")
    try:
        trainer = TQPolicy(
            cluster,
            config.policy,
            tokenizer,
            weights_path=resume.weights_path,
            optimizer_path=resume.optimizer_path,
            worker_extension_cls_fqn=WORKER_CLASS,
            seed=config.sft.seed,
            dp_cfg=config.data_plane,
        )
        if config.checkpointing.enabled and config.checkpointing.start_fresh:
            # As late as this, so that a run which can't start leaves the checkpoints where they are.
            CheckpointManager(config.checkpointing).set_aside()
    except BaseException:
        cluster.shutdown()
        raise
    megatron = config.policy.megatron
    return SFTV2ActorArgs(
        trainer=trainer,
        loss_fn=NLLLossFn(use_fused_linear_logprobs=megatron is not None and megatron.use_fused_linear_logprobs),
        train_cluster=cluster,
        placement_plan=plan,
        save_state=resume.save_state,
        loader_states=resume.loader_states,
        loader_settings=settings,
        identity=resume.identity,
        last_checkpoint_path=resume.checkpoint,
    )

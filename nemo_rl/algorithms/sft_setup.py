"""What the driver builds before the controller runs: workers, placement, resume state."""

import json
import logging
from pathlib import Path
from typing import Any

from nemo_rl.algorithms.loss.loss_functions import NLLLossFn
from nemo_rl.algorithms.sft_checks import inspect_inputs
from nemo_rl.algorithms.sft_config import MasterConfig
from nemo_rl.algorithms.sft_state import SFTV2ActorArgs, _max_train_steps, _restore_save_state
from nemo_rl.data.energon.sft_types import LoaderSettings
from nemo_rl.data.energon.sources import batches_per_pass
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl.models.engine.model_config import read_model_config
from nemo_rl.models.policy.tq_policy import TQPolicy
from nemo_rl.utils.checkpoint import CheckpointManager
from nemo_rl.utils.errors import ConfigError, UserError

log = logging.getLogger(__name__)

WORKER_CLASS = "nemo_rl.data.energon.sft_worker.SFTPolicyWorker"

_SHAPE_KEYS = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "tie_word_embeddings",
)


def build_actor_args(config: MasterConfig, tokenizer: Any) -> SFTV2ActorArgs:
    """What `nemo_rl.algorithms.sft_v2.setup_sft_v2` returns; see there."""
    inputs = inspect_inputs(config)
    if inputs.problems or inputs.train is None or inputs.plan is None:
        raise ConfigError(inputs.problems)
    plan = inputs.plan
    rows_per_shard = config.policy.train_global_batch_size // plan.num_logical_shards
    if not config.data.train.virtual_epoch_length:
        config.data.train.virtual_epoch_length = batches_per_pass(inputs.train, plan.num_logical_shards, rows_per_shard)
    if config.policy.megatron_cfg is not None:
        config.policy.megatron_cfg.train_iters = _max_train_steps(config)
    checkpoints = CheckpointManager(config.checkpointing)
    last = checkpoints.get_latest_checkpoint_path() if config.checkpointing.enabled else None
    save_state = _restore_save_state(checkpoints.load_training_info(last), placement_hash=plan.placement_hash)
    weights_path, optimizer_path = checkpoints.get_resume_paths(last)
    if last is not None and weights_path is not None:
        _check_same_model(config, weights_path)
        log.info("resuming from %s, step %d", last, save_state.total_steps)
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
    loader_states = None if last is None else _read_loader_states(last, plan.num_logical_shards)
    cluster = RayVirtualCluster.from_config(config.cluster, name="sft_v2_cluster")
    try:
        trainer = TQPolicy(
            cluster,
            config.policy,
            tokenizer,
            weights_path=weights_path,
            optimizer_path=optimizer_path,
            worker_extension_cls_fqn=WORKER_CLASS,
            seed=config.sft.seed,
            dp_cfg=config.data_plane,
        )
    except BaseException:
        cluster.shutdown()
        raise
    megatron = config.policy.megatron
    return SFTV2ActorArgs(
        trainer=trainer,
        loss_fn=NLLLossFn(use_fused_linear_logprobs=megatron is not None and megatron.use_fused_linear_logprobs),
        train_cluster=cluster,
        placement_plan=plan,
        save_state=save_state,
        loader_states=loader_states,
        loader_settings=settings,
        last_checkpoint_path=last,
    )


def _read_loader_states(checkpoint: Path, num_shards: int) -> list[dict[str, Any]]:
    """The state of each shard, in shard order.

    Raises:
        UserError: a file is missing or no JSON.
    """
    states = []
    for shard in range(num_shards):
        path = checkpoint / "loaders" / f"shard_{shard}.json"
        try:
            states.append(json.loads(path.read_text()))
        except (OSError, ValueError) as error:
            raise UserError(f"{path}: the state of data shard {shard} can't be read ({error})") from error
    return states


def _check_same_model(config: MasterConfig, weights_path: Path) -> None:
    """Refuses a checkpoint whose model has other sizes than `policy.model_name`.

    Raises:
        UserError: names the fields, old and new.
    """
    ours = read_model_config(config.policy.model_name, config.policy.hf_config_overrides).to_dict()
    saved = read_model_config(str(weights_path)).to_dict()
    changed = [f"{key} {saved.get(key)} -> {ours.get(key)}" for key in _SHAPE_KEYS if saved.get(key) != ours.get(key)]
    if changed:
        raise UserError(
            f"the checkpoint {weights_path.parent.parent} is of another model than policy.model_name "
            f"{config.policy.model_name} ({', '.join(changed)}); use another checkpointing.checkpoint_dir"
        )

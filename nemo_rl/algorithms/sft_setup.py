"""What the driver builds before the controller runs: workers, placement, resume state."""

import json
import logging
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from nemo_rl.algorithms.loss.loss_functions import NLLLossFn
from nemo_rl.algorithms.sft_config import MasterConfig, inspect_inputs
from nemo_rl.data.energon.config import EnergonSourceConfig
from nemo_rl.data.energon.sft_worker import LoaderSettings
from nemo_rl.data.energon.sources import batches_per_pass
from nemo_rl.data.energon.topology import DataLoaderPlacementPlan
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl.models.engine.build import read_model_config
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


@dataclass
class SFTV2SaveState:
    """Controller state committed at an optimizer-step boundary.

    Attributes:
        total_steps: completed steps, skipped ones included.
        consumed_samples: rows trained, each time they were.
        total_valid_tokens: trained tokens.
        placement_hash: of the data placement; a resume needs the same one.
        dropped_samples: rows that were drawn and not trained, by reason.
        skipped_steps: steps that changed nothing, by reason.
    """

    total_steps: int
    consumed_samples: int
    total_valid_tokens: int
    placement_hash: str
    dropped_samples: dict[str, int] = field(default_factory=dict)
    skipped_steps: dict[str, int] = field(default_factory=dict)


@dataclass
class SFTV2ActorArgs:
    """Driver-built objects used by the SFTv2 controller actor.

    Attributes:
        trainer: the policy on its workers.
        loss_fn: applied to every microbatch.
        train_cluster: kept so that its places stay reserved.
        placement_plan: which replica reads which shards.
        save_state: where the run starts.
        loader_states: state of each logical shard, in shard order; None for a fresh run.
        loader_settings: what the leaders build their loaders from.
        last_checkpoint_path: the checkpoint that is resumed, or None.
    """

    trainer: TQPolicy
    loss_fn: NLLLossFn
    train_cluster: RayVirtualCluster
    placement_plan: DataLoaderPlacementPlan
    save_state: SFTV2SaveState
    loader_states: list[dict[str, Any]] | None
    loader_settings: LoaderSettings
    last_checkpoint_path: Path | None = None


def _initial_save_state(placement_hash: str) -> SFTV2SaveState:
    return SFTV2SaveState(total_steps=0, consumed_samples=0, total_valid_tokens=0, placement_hash=placement_hash)


def _restore_save_state(loaded: dict[str, Any] | None, *, placement_hash: str) -> SFTV2SaveState:
    """The state a run continues from; unknown keys are ignored.

    Raises:
        UserError: the checkpoint was saved with another placement, or says of none.
    """
    if loaded is None:
        return _initial_save_state(placement_hash)
    saved_hash = loaded.get("placement_hash")
    if saved_hash != placement_hash:
        raise UserError(
            f"the checkpoint was saved with data placement {saved_hash}, this run has {placement_hash}: the number of "
            "workers or of data.energon.logical_shards changed. Go back to the saved layout, use another "
            "checkpointing.checkpoint_dir, or train with data.energon.topology_mapper: elastic from the start"
        )
    known = {f.name for f in fields(SFTV2SaveState)}
    return replace(_initial_save_state(placement_hash), **{key: value for key, value in loaded.items() if key in known})


def _max_train_steps(master_config: MasterConfig) -> int:
    """Steps of the run: `max_num_steps`, or fewer when `max_num_epochs` passes end earlier.

    Raises:
        UserError: the length of a pass is not known; `setup_sft_v2` derives it from the row count.
    """
    source = EnergonSourceConfig.model_validate(master_config.data["train"], from_attributes=True)
    if not source.virtual_epoch_length or source.virtual_epoch_length <= 0:
        raise UserError(f"data.train.virtual_epoch_length is {source.virtual_epoch_length}; it must be above 0")
    return min(master_config.sft.max_num_steps, master_config.sft.max_num_epochs * source.virtual_epoch_length)


def setup_sft_v2(master_config: MasterConfig, tokenizer_or_processor: Any) -> SFTV2ActorArgs:
    """Build the V2 cluster, TQPolicy, placement, and resume state.

    Ray must be connected. `data.train.virtual_epoch_length` and the schedule's horizon are filled in on
    `master_config`. When anything fails, no worker is left behind.

    Raises:
        ConfigError: the config can't be run; all problems at once, before any worker starts.
        UserError: a checkpoint that is not of this run, or a model that can't be loaded.
        RunError: a worker died or did not start in time.
    """
    config = master_config
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
            tokenizer_or_processor,
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

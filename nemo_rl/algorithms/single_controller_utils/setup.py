"""What the driver builds before the controller runs: workers, data plane, resume state."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from nemo_rl.algorithms.loss.config import MseValueLossConfig
from nemo_rl.algorithms.loss.loss_functions import ClippedPGLossFn, MseValueLossFn
from nemo_rl.algorithms.single_controller_utils.checks import RLInputs, inspect_rl_inputs, updates
from nemo_rl.algorithms.single_controller_utils.config import (
    MasterConfig,
    algo_config,
    needs_prev_logprobs,
    needs_reference,
)
from nemo_rl.algorithms.single_controller_utils.prompt_cursor import PromptCursor
from nemo_rl.algorithms.single_controller_utils.requests import AdvantageStageConfig
from nemo_rl.algorithms.single_controller_utils.state import SingleControllerActorArgs
from nemo_rl.data_plane.schema import SC_ROLLOUT_SCHEMA_FIELDS
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl.distributed.worker_groups import RayWorkerBuilder, RayWorkerGroup
from nemo_rl.experience.config import RolloutWorkerConfig
from nemo_rl.models.policy.tq_policy import TQPolicy
from nemo_rl.models.value.tq_value import TQValue
from nemo_rl.utils.checkpoint import CheckpointManager
from nemo_rl.utils.errors import ConfigError

log = logging.getLogger(__name__)

READ_WEIGHTS = "nemo_rl.weight_sync.buckets.read_buckets"
ROLLOUT_WORKER = "nemo_rl.experience.rollout_worker.RolloutWorker"
STAGE_WORKER = "nemo_rl.algorithms.single_controller_utils.stages.StageWorker"


def setup_single_controller(
    config: MasterConfig, tokenizer: Any, inputs: RLInputs | None = None, *, partition_id: str = "rollout_data"
) -> SingleControllerActorArgs:
    """The workers of a run and where it starts. Ray must be connected. When anything fails, no worker is left behind.

    Args:
        inputs: what `inspect_rl_inputs` found, for callers that have asked it already.

    Raises:
        ConfigError: the config can't be run; all problems at once, before any worker starts.
        UserError: a checkpoint that is not of this run, or a model that can't be loaded.
        RunError: a worker died or did not start in time.
    """
    inputs = inspect_rl_inputs(config) if inputs is None else inputs
    if inputs.problems or inputs.resume is None:
        raise ConfigError(inputs.problems)
    algorithm, resume = algo_config(config), inputs.resume
    for model, ticks in zip((config.policy, config.value), updates(config, inputs.steps), strict=False):
        if model is not None and model.megatron_cfg is not None:
            model.megatron_cfg.train_iters = ticks
    if resume.checkpoint is not None:
        log.info("resuming from %s, step %d", resume.checkpoint, resume.save_state.total_steps)
    cluster = RayVirtualCluster.from_config(
        config.cluster, name="train_cluster", max_colocated_worker_groups=2 + (config.value is not None)
    )
    built: list[Any] = []
    try:
        policy = TQPolicy(
            cluster,
            config.policy,
            tokenizer,
            weights_path=resume.policy[0],
            optimizer_path=resume.policy[1],
            init_reference_model=needs_reference(config),
            seed=algorithm.seed,
            temperature=config.policy.generation.temperature or 1.0,
            dp_cfg=config.data_plane,
            tq_partition_id=partition_id,
        )
        built.append(policy)
        policy.dp_client.register_partition(
            partition_id,
            SC_ROLLOUT_SCHEMA_FIELDS,
            num_samples=config.policy.train_global_batch_size,
            consumer_tasks=["train"],
        )
        value = None
        if config.value is not None:
            value = TQValue(
                cluster,
                config.value,
                tokenizer,
                weights_path=resume.value[0],
                optimizer_path=resume.value[1],
                seed=algorithm.seed,
                dp_cfg=config.data_plane,
            )
            built.append(value)
        rollouts = _rollout_group(config, cluster, tokenizer, partition_id)
        built.append(rollouts)
        stage = _stage_group(config, cluster)
        built.append(stage)
        if config.checkpointing.enabled and config.checkpointing.start_fresh:
            # As late as this, so that a run which can't start leaves the checkpoints where they are.
            CheckpointManager(config.checkpointing).set_aside()
    except BaseException:
        for group in reversed(built):
            group.shutdown()
        cluster.shutdown()
        raise
    return SingleControllerActorArgs(
        trainer_handle=policy,
        value_handle=value,
        rollout_group=rollouts,
        stage_group=stage,
        train_cluster=cluster,
        loss_fn=ClippedPGLossFn(config.loss_fn),
        value_loss_fn=None if value is None else MseValueLossFn(config.value_loss_fn or MseValueLossConfig()),
        partition_id=partition_id,
        prompts=PromptCursor(
            num_prompts=inputs.num_prompts,
            num_generations=algorithm.num_generations_per_prompt,
            seed=algorithm.seed,
            shuffle=config.data.shuffle,
            max_epochs=algorithm.max_num_epochs,
            position=resume.save_state.prompts_ordered,
        ),
        validation_prompts=inputs.num_validation_prompts,
        save_state=resume.save_state,
        identity=inputs.identity,
        last_checkpoint_path=resume.checkpoint,
    )


def shut_down(args: SingleControllerActorArgs) -> None:
    """Ends all workers, those first that use what others hold."""
    args.rollout_group.shutdown(cleanup_method="shutdown")
    args.stage_group.shutdown(cleanup_method="shutdown")
    if args.value_handle is not None:
        args.value_handle.shutdown()
    args.trainer_handle.shutdown()
    args.train_cluster.shutdown()


def _stage_group(config: MasterConfig, cluster: RayVirtualCluster) -> RayWorkerGroup:
    algorithm = algo_config(config)
    stage_config = AdvantageStageConfig(
        estimator_config=algorithm.adv_estimator,
        loss_config=config.loss_fn,
        has_values=config.value is not None,
        has_prev_logprobs=needs_prev_logprobs(config),
        has_reference=needs_reference(config),
        overlong_filtering=algorithm.overlong_filtering,
        max_logprob_error=algorithm.seq_logprob_error_threshold,
    )
    builder = RayWorkerBuilder(STAGE_WORKER, config=stage_config, data_plane=config.data_plane)
    return RayWorkerGroup(cluster, builder, bundle_indices_list=[(0, [0])], name_prefix="advantage_stage")


def _rollout_group(
    config: MasterConfig, cluster: RayVirtualCluster, tokenizer: Any, partition_id: str
) -> RayWorkerGroup:
    generation, algorithm = config.policy.generation, algo_config(config)
    worker_config = RolloutWorkerConfig(
        model_name=config.policy.model_name,
        data=config.data,
        env=config.env,
        generation=generation,
        failure=config.async_rl.rollout_failure,
        partition_id=partition_id,
        max_total_sequence_length=config.policy.max_total_sequence_length,
        precision=config.policy.precision,
        hf_config_overrides=config.policy.hf_config_overrides,
        max_turns=algorithm.max_rollout_turns,
        seed=algorithm.seed,
        rollouts_path=str(Path(config.logger.log_dir).absolute() / "rollouts.jsonl")
        if config.logger.log_rollouts
        else None,
    )
    places = [(node, [local]) for node in range(cluster.node_count()) for local in range(config.cluster.gpus_per_node)]
    group = RayWorkerGroup(
        cluster,
        RayWorkerBuilder(ROLLOUT_WORKER, worker_config, tokenizer, read_weights=READ_WEIGHTS),
        bundle_indices_list=places[: generation.workers],
        name_prefix="rollout",
    )
    try:
        calls: dict[str, dict[str, Any]] = {"initialize": {}, "setup_data_plane": {"cfg": config.data_plane}}
        for method, kwargs in calls.items():
            refs = group.run_all_workers_single_data(method, **kwargs)
            reason = f"{method} of the rollout workers"
            group.get_all_worker_results(refs, reason=reason, timeout_s=cluster.start_timeout_s)
    except BaseException:
        group.shutdown(force=True)
        raise
    return group

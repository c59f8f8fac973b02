"""What is wrong with an SFT run's config, as far as that can be known without starting a worker."""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from nemo_rl.algorithms.sft_config import MasterConfig
from nemo_rl.algorithms.sft_identity import run_identity
from nemo_rl.algorithms.sft_resume import ResumePoint, find_resume_point
from nemo_rl.data.config import DataConfig
from nemo_rl.data.energon.config import EnergonLoaderConfig, EnergonSourceConfig
from nemo_rl.data.energon.multimodal.registry import COOKER_REGISTRY, TASK_ENCODER_REGISTRY
from nemo_rl.data.energon.sources import PreparedSource, batches_per_pass, prepare_source
from nemo_rl.data.energon.topology import DataLoaderPlacementPlan, resolve_topology_mapper
from nemo_rl.data.tokenizer import get_tokenizer
from nemo_rl.distributed.config import check_cluster
from nemo_rl.models.config import PolicyConfig, TokenizerConfig
from nemo_rl.models.config_checks import check_overrides, check_training
from nemo_rl.models.driver import check_parallel_sizes, sharding_of
from nemo_rl.models.engine.model_config import packing_problem, read_model_config
from nemo_rl.utils.errors import UserError
from nemo_rl.utils.logger import check_logger


@dataclass
class SFTInputs:
    """What a config points at, and every problem found on the way.

    Attributes:
        problems: one line each, naming the key, its value and the remedy; empty when the run can start.
        train: the indexed training rows, None when they can't be read.
        validation: the indexed validation rows, None when there are none.
        plan: which replica reads which shards, None when that can't be told.
        resume: where the run starts, None when that can't be told.
    """

    problems: list[str] = field(default_factory=list)
    train: PreparedSource | None = None
    validation: PreparedSource | None = None
    plan: DataLoaderPlacementPlan | None = None
    resume: ResumePoint | None = None


def tokenizer_options(config: MasterConfig) -> TokenizerConfig:
    """`policy.tokenizer` with the model's name filled in."""
    tokenizer = config.policy.tokenizer
    return tokenizer if tokenizer.name else tokenizer.model_copy(update={"name": config.policy.model_name})


def inspect_inputs(config: MasterConfig) -> SFTInputs:
    """Reads model config, tokenizer, data and the newest checkpoint, and checks the config as a whole.

    Starts nothing; indexes the data.
    """
    inputs = SFTInputs()
    problems = inputs.problems
    policy, data = config.policy, config.data
    world_size = config.cluster.gpus_per_node * config.cluster.num_nodes

    def attempt(action: Callable[[], Any]) -> Any:
        try:
            return action()
        except UserError as error:
            problems.append(str(error))
            return None

    problems += check_cluster(config.cluster)
    problems += check_logger(config.logger)
    problems += check_parallel_sizes(policy.parallel, world_size, "policy")
    problems += _check_backend(policy)
    refused = attempt(lambda: check_overrides(policy))
    problems += refused or []
    model = attempt(lambda: read_model_config(policy.model_name, policy.hf_config_overrides)) if refused == [] else None
    if model is not None and (problem := packing_problem(model)):
        problems.append(f"policy.model_name: {problem}")
    tokenizer = None if model is None else attempt(lambda: get_tokenizer(tokenizer_options(config)))
    problems += _check_components(data.energon)
    if data.backend != "energon":
        problems.append(f"data.backend: {data.backend!r} is not supported; set it to energon")
    if data.max_input_seq_length is not None and data.max_input_seq_length > policy.max_total_sequence_length:
        problems.append(
            f"data.max_input_seq_length: {data.max_input_seq_length} is above policy.max_total_sequence_length "
            f"{policy.max_total_sequence_length}"
        )
    inputs.train = attempt(lambda: _prepare(data, data.train, "data.train"))
    if data.validation is not None:
        validation = data.validation
        inputs.validation = attempt(lambda: _prepare(data, validation, "data.validation"))
    metric = config.checkpointing.metric_name
    if metric is not None and metric.startswith("val:") and data.validation is None:
        problems.append(f"checkpointing.metric_name: {metric} needs data.validation; use train:loss or null")
    if world_size % policy.parallel.replica == 0:
        sharding = sharding_of(policy.parallel, world_size)
        mapper = attempt(lambda: resolve_topology_mapper(data.energon.topology_mapper, data.energon.logical_shards))
        inputs.plan = None if mapper is None else attempt(lambda: mapper.map(sharding))
    if inputs.plan is not None and policy.train_global_batch_size % inputs.plan.num_logical_shards:
        shards = inputs.plan.num_logical_shards
        whose = (
            "data.energon.logical_shards"
            if data.energon.topology_mapper == "elastic"
            else "data-parallel workers (cluster.gpus_per_node x cluster.num_nodes)"
        )
        problems.append(
            f"policy.train_global_batch_size: {policy.train_global_batch_size} does not divide by {shards}, the number "
            f"of {whose}; use a multiple of {shards}"
        )
    train, plan = inputs.train, inputs.plan
    steps = _run_steps(config, train, plan)
    problems += check_training(policy, steps)
    # Only a run that could start has an identity, which is what a checkpoint is compared with.
    if not problems and model is not None and tokenizer is not None and train is not None and plan is not None:
        identity: dict[str, Any] = {}
        if config.checkpointing.enabled:
            identity = run_identity(config, model=model, tokenizer=tokenizer, train=train, plan=plan, steps=steps)
        inputs.resume = attempt(lambda: find_resume_point(config.checkpointing, policy, plan, identity))
    return inputs


def _prepare(data: DataConfig, source: EnergonSourceConfig, key: str) -> PreparedSource:
    return prepare_source(source, key=key, cache_dir=data.energon.nvdataset_cache_dir)


def _check_backend(policy: PolicyConfig) -> list[str]:
    problems = []
    if policy.megatron is not None and policy.dtensor is not None:
        problems.append("policy.megatron_cfg.enabled and policy.dtensor_cfg.enabled: enable one of them")
    if policy.sequence_packing.enabled and policy.dynamic_batching.enabled:
        problems.append("policy.sequence_packing.enabled and policy.dynamic_batching.enabled: enable one of them")
    if policy.tokenizer.use_processor:
        problems.append("policy.tokenizer.use_processor: only text rows are supported; set it to false")
    return problems


def _check_components(energon: EnergonLoaderConfig) -> list[str]:
    """One line per cooker or task encoder that can't be found, or that does not take its options."""
    encoder = energon.task_encoder

    def bind_encoder() -> None:
        factory = TASK_ENCODER_REGISTRY.resolve_configured(encoder.name, encoder.python_file, encoder.object_name)
        inspect.signature(factory).bind(None, **encoder.options)

    checks: dict[str, Callable[[], Any]] = {"data.energon.task_encoder": bind_encoder}
    for i, cooker in enumerate(energon.cookers):
        checks[f"data.energon.cookers.{i}"] = functools.partial(COOKER_REGISTRY.build, cooker)
    problems = []
    for key, check in checks.items():
        try:
            check()
        except Exception as error:  # noqa: BLE001  a Python file of the user may raise anything
            kind = "" if isinstance(error, UserError | TypeError) else f"{type(error).__name__}: "
            problems.append(f"{key}: {kind}{' '.join(str(error).split())}")
    return problems


def _run_steps(config: MasterConfig, train: PreparedSource | None, plan: DataLoaderPlacementPlan | None) -> int:
    """Steps of the run, or the most that there can be where the rows are not known."""
    if train is None or plan is None:
        return config.sft.max_num_steps
    rows_per_shard = max(1, config.policy.train_global_batch_size // plan.num_logical_shards)
    per_pass = config.data.train.virtual_epoch_length or batches_per_pass(
        train, plan.num_logical_shards, rows_per_shard
    )
    return min(config.sft.max_num_steps, config.sft.max_num_epochs * per_pass)

"""What is wrong with an SFT run's config, as far as that can be known without starting a worker."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import lr_scheduler

from nemo_rl.algorithms.sft_config import MasterConfig
from nemo_rl.algorithms.sft_resume import ResumePoint, find_resume_point
from nemo_rl.data.config import DataConfig
from nemo_rl.data.energon.config import EnergonSourceConfig
from nemo_rl.data.energon.sources import PreparedSource, prepare_source
from nemo_rl.data.energon.topology import DataLoaderPlacementPlan, resolve_topology_mapper
from nemo_rl.data.tokenizer import get_tokenizer
from nemo_rl.distributed.config import check_cluster
from nemo_rl.models.config import PolicyConfig, TokenizerConfig
from nemo_rl.models.driver import check_parallel_sizes, sharding_of
from nemo_rl.models.engine.model_config import packing_problem, read_model_config
from nemo_rl.models.engine.optimizer import check_kwargs, torch_class
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
    model = attempt(lambda: read_model_config(policy.model_name, policy.hf_config_overrides))
    if model is not None and (problem := packing_problem(model)):
        problems.append(f"policy.model_name: {problem}")
    if model is not None:
        attempt(lambda: get_tokenizer(tokenizer_options(config)))
    problems += _check_optimizer(policy)
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
    plan = inputs.plan
    if plan is not None and model is not None:
        inputs.resume = attempt(lambda: find_resume_point(config.checkpointing, policy, plan))
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


def _check_optimizer(policy: PolicyConfig) -> list[str]:
    problems: list[str] = []
    try:
        spec = policy.optimizer_spec()
        cls = torch_class(spec.name, torch.optim, "torch.optim", "policy.optimizer.name")
        problems += check_kwargs(cls, spec.kwargs, "policy.optimizer.kwargs")
    except UserError as error:
        problems.append(str(error))
    try:
        for phase in policy.schedule_spec().phases:
            cls = torch_class(phase.name, lr_scheduler, "torch.optim.lr_scheduler", "policy.scheduler.name")
            problems += check_kwargs(cls, phase.kwargs, "policy.scheduler.kwargs")
    except UserError as error:
        problems.append(str(error))
    return problems

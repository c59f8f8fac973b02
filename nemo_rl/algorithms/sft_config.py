"""The config of an SFT run, and the way to it from a file. Importing this loads neither torch nor Ray."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

from nemo_rl.data.config import DataConfig
from nemo_rl.data_plane.interfaces import LocalDataPlaneConfig
from nemo_rl.distributed.config import ClusterConfig
from nemo_rl.models.config import PolicyConfig
from nemo_rl.telemetry.config import TelemetryConfig
from nemo_rl.utils.checkpoint import CheckpointingConfig
from nemo_rl.utils.config import ConfigModel, load_config, validate_config
from nemo_rl.utils.errors import ConfigError
from nemo_rl.utils.logger import LoggerConfig

log = logging.getLogger(__name__)

# Names of existing recipes that change what is trained, so that a value other than this one can't be passed over.
ONLY_VALUE: dict[str, Any] = {
    "policy.dtensor_cfg.lora_cfg.enabled": False,
    "policy.automodel_cfg.lora_cfg.enabled": False,
    "policy.megatron_cfg.peft.enabled": False,
    "policy.megatron_cfg.fp8_cfg.enabled": False,
    "policy.megatron_cfg.expert_model_parallel_size": 1,
    "policy.megatron_cfg.expert_tensor_parallel_size": 1,
    "policy.megatron_cfg.optimizer.fp16": False,
}


class SFTConfig(ConfigModel):
    """The `sft` section."""

    max_num_steps: int = Field(default=60, ge=1)
    """Optimizer steps of the run, unless `max_num_epochs` ends it earlier."""
    max_num_epochs: int = Field(default=1, ge=1)
    """Passes over the training rows."""
    val_period: int = Field(default=10, ge=0)
    """Validate every so many steps; 0 = not on a period. Needs `data.validation`, as do the next ones."""
    val_batches: int = Field(default=8, ge=0)
    """Batches of a validation; 0 = all rows."""
    val_global_batch_size: int = Field(default=32, ge=1)
    """Rows of a validation batch over all workers. The last batch may be smaller: every row counts once."""
    val_micro_batch_size: int = Field(default=1, ge=1)
    """Accepted; validation packs rows to the same token budget as training."""
    val_at_start: bool = True
    """Validate before the first step."""
    val_at_end: bool = False
    """Validate after the last step."""
    seed: int = Field(default=42, ge=0, lt=2**32)
    """Of the order of rows and of dropout."""
    only_unmask_final: bool = False
    """Train the last assistant turn of each row only."""


class MasterConfig(ConfigModel):
    """Standalone SFTv2 configuration."""

    policy: PolicyConfig
    data: DataConfig
    sft: SFTConfig
    data_plane: LocalDataPlaneConfig
    logger: LoggerConfig
    cluster: ClusterConfig
    checkpointing: CheckpointingConfig
    telemetry: TelemetryConfig | None = None


def read_sft_config(path: str | Path, overrides: Sequence[str] = ()) -> MasterConfig:
    """The checked config of `path` with `key=value` overrides. Recipe keys without effect are logged once.

    Raises:
        UserError: the file can't be read.
        ConfigError: unknown keys, wrong types, values out of range; all at once.
    """
    raw = load_config(path, list(overrides))
    refused = refused_recipe_values(raw, ONLY_VALUE)
    try:
        config, inert = validate_config(MasterConfig, raw)
    except ConfigError as error:
        raise ConfigError(error.problems + refused) from None
    if refused:
        raise ConfigError(refused)
    if inert:
        log.info("recipe keys without effect here: %s", ", ".join(inert))
    for note in config.data.energon.notes():
        log.info("%s", note)
    return config


def refused_recipe_values(raw: Mapping[str, Any], only_values: Mapping[str, Any]) -> list[str]:
    """One line per recipe key of `raw` that asks for something that would be trained differently here."""
    problems = []
    for name, only in only_values.items():
        value: Any = raw
        for part in name.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        if value is not None and value != only:
            problems.append(f"{name}: {value} is not supported; set it to {str(only).lower()}")
    return problems

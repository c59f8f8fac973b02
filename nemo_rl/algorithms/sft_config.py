"""The config of an SFT run. Reading it imports neither torch nor Ray's workers."""

from pydantic import Field

from nemo_rl.data.config import DataConfig
from nemo_rl.data_plane.interfaces import LocalDataPlaneConfig
from nemo_rl.distributed.config import ClusterConfig
from nemo_rl.models.config import PolicyConfig
from nemo_rl.telemetry.config import TelemetryConfig
from nemo_rl.utils.checkpoint import CheckpointingConfig
from nemo_rl.utils.config import ConfigModel
from nemo_rl.utils.logger import LoggerConfig


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
    seed: int = 42
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

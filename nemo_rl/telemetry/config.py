"""The telemetry section of a config, and the environment variables that win over it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import Field, ValidationError, field_validator

from nemo_rl.telemetry.span_groups import RLSpanGroup, enabled_groups
from nemo_rl.utils.config import ConfigModel
from nemo_rl.utils.config_problems import value_problems
from nemo_rl.utils.errors import ConfigError

ENV_PREFIX = "NEMO_RL_OTEL_"


class TelemetryConfig(ConfigModel):
    """What is exported, from where and how; an environment variable `NEMO_RL_OTEL_<FIELD>` wins over the field.

    The endpoint, headers and the like of `otlp` are read by OpenTelemetry itself from its `OTEL_EXPORTER_OTLP_*`
    variables.
    """

    enabled: bool = False
    service_name: str = "nemo-rl"
    span_groups: str = "default"
    """`default`, `all`, or names of `RLSpanGroup` with commas between them."""
    export_strategy: Literal["single_rank", "all_ranks", "sampled", "first_rank_per_node"] = "single_rank"
    """Which ranks of a worker group export; driver and controller always do."""
    export_rank: int = -1
    """Rank that exports under `single_rank`; negative numbers count from the last rank."""
    export_sample_rate: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of ranks that export under `sampled`, and of traces that are kept with `sampler_enabled`."""
    sampler_enabled: bool = False
    """Keep only a share of the traces."""
    traces_enabled: bool = True
    metrics_enabled: bool = True
    exporter: Literal["otlp", "console"] = "otlp"

    @field_validator("span_groups")
    @classmethod
    def _names_groups(cls, value: str) -> str:
        enabled_groups(value)
        return value

    def groups(self) -> frozenset[RLSpanGroup]:
        """The groups whose spans are recorded."""
        return enabled_groups(self.span_groups)

    def exports_from(self, rank: int, world_size: int, local_rank: int) -> bool:
        """True on the ranks of a worker group that export."""
        match self.export_strategy:
            case "all_ranks":
                return True
            case "first_rank_per_node":
                return local_rank == 0
            case "sampled":
                # Spread evenly: rank r exports when the whole count of exporting ranks grows from r to r + 1 ranks.
                return int((rank + 1) * self.export_sample_rate) > int(rank * self.export_sample_rate)
            case "single_rank":
                return rank == self.export_rank % world_size

    @classmethod
    def from_environment(cls, base: Self | None = None, environment: Mapping[str, str] = os.environ) -> TelemetryConfig:
        """`base`, or the defaults, with the fields that the environment sets.

        Raises:
            ConfigError: a variable with a value of the wrong type.
        """
        values = {} if base is None else base.model_dump()
        names = {name: f"{ENV_PREFIX}{name.upper()}" for name in cls.model_fields}
        values |= {name: environment[variable] for name, variable in names.items() if variable in environment}
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            lines = (line.partition(":") for line in value_problems(error, values, []))
            raise ConfigError([f"{ENV_PREFIX}{name.upper()}:{reason}" for name, _, reason in lines]) from error

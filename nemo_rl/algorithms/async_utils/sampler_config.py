"""The `async_rl.sampler` block: one of five rules, told apart by `name`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag

from nemo_rl.utils.config import ConfigModel


class InOrderConfig(ConfigModel):
    """Each step trains the samples that were ordered for it."""

    name: Literal["in_order"] = "in_order"
    """This rule."""
    max_lookahead_versions: int = Field(default=0, ge=0)
    """Steps whose samples may be ordered ahead of the one in training; 0 samples with the newest weights only."""


class WindowedConfig(ConfigModel):
    """Any sample that is not too old."""

    name: Literal["windowed"]
    """This rule."""
    max_staleness_versions: int = Field(default=1, ge=0)
    """Oldest weights, in versions behind the newest, whose samples are trained; older ones are dropped and counted."""
    sample_freshest_first: bool = False
    """Take the samples of the newest weights first."""


class ReadyFirstConfig(ConfigModel):
    """Whatever is ready, however old; needs importance sampling correction."""

    name: Literal["ready_first"]
    """This rule."""
    max_staleness_versions: int = Field(default=1, ge=0)
    """Steps that may be ordered ahead."""


class WeightFifoConfig(ConfigModel):
    """The oldest weights first, one version per step."""

    name: Literal["weight_fifo"]
    """This rule."""
    max_staleness_versions: int = Field(default=1, ge=0)
    """Steps that may be ordered ahead; older samples are dropped and counted."""


class CustomSamplerConfig(ConfigModel):
    """A class of the user; further keys go to its constructor."""

    model_config = ConfigDict(extra="allow")

    name: Literal["custom"]
    """This rule."""
    target: str
    """`module:Class` of a `PromptGroupSampler`."""

    def options(self) -> dict[str, Any]:
        """The constructor's arguments."""
        return dict(self.model_extra or {})


def _name(value: Any) -> str:
    return str(value.get("name", "in_order") if isinstance(value, dict | ConfigModel) else value)


# By a function, because a discriminator field may have no validator and every field of a config model has one.
SamplerConfig = Annotated[
    Annotated[InOrderConfig, Tag("in_order")]
    | Annotated[WindowedConfig, Tag("windowed")]
    | Annotated[ReadyFirstConfig, Tag("ready_first")]
    | Annotated[WeightFifoConfig, Tag("weight_fifo")]
    | Annotated[CustomSamplerConfig, Tag("custom")],
    Discriminator(
        _name,
        custom_error_type="sampler_name",
        custom_error_message="one of in_order, windowed, ready_first, weight_fifo, custom under `name`",
    ),
]

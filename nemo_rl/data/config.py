"""The `data` section of a recipe."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from nemo_rl.data.energon.config import EnergonLoaderConfig, EnergonSourceConfig
from nemo_rl.utils.config import ConfigModel


class DataConfig(ConfigModel):
    """What is trained and validated on, and how rows become tokens."""

    backend: str = "energon"
    """The loader library; `energon` is the only one."""
    train: EnergonSourceConfig
    """The training rows."""
    validation: EnergonSourceConfig | None = None
    """The validation rows; null = no validation."""
    energon: EnergonLoaderConfig = Field(default_factory=EnergonLoaderConfig)
    """How rows are drawn, cooked and encoded."""
    max_input_seq_length: int | None = Field(default=None, ge=2)
    """The longest row, in tokens; longer ones are treated as `overlong` says."""
    overlong: Literal["truncate", "drop", "split", "fail"] = "truncate"
    """Rows over `max_input_seq_length`: cut at the end, leave out and count, train in pieces that all go into the step
    of the row, or end the run naming the row. A row without a trained token after the cut is left out and counted."""
    shuffle: bool = True
    """Training rows come in a new order each pass."""
    add_bos: bool = False
    """Start a row with exactly one BOS token, also where the template does not write it."""
    add_eos: bool = False
    """End a row with the EOS token, where the template does not write it; trained after an assistant turn."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Extra variables for the chat template, such as `enable_thinking`."""

"""Config of a data source and of the Energon loader. Names follow the recipes of the original."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict, Field, model_validator

from nemo_rl.utils.config import ConfigModel

_UNUSED = (
    "model_family",
    "processor_adapter",
    "shuffle_buffer_size",
    "packing_buffer_size",
    "watchdog_timeout_seconds",
    "cache_pool_max_gbytes",
    "cache_pool_num_workers",
    "gc_collect_every_n_steps",
)


class EnergonSourceConfig(ConfigModel):
    """Where rows come from."""

    path: str = Field(min_length=1)
    """A `.jsonl` file, or a folder of `.tar` files; the latter is prepared on first use, or by `energon prepare`."""
    split: str = "train"
    """Split of a prepared folder. A `.jsonl` file has none and is used whole."""
    virtual_epoch_length: int | None = Field(default=0, ge=0)
    """Steps that count as one epoch; null or 0 = the steps of one pass over the rows."""
    limit: int | None = Field(default=None, ge=1)
    """Use the first rows only."""


class _Component(ConfigModel):
    """A named part of ours, or an object of a Python file of the user."""

    model_config = ConfigDict(populate_by_name=True)

    name: str | None = None
    """A registered name."""
    python_file: str | None = None
    """An absolute path of a `.py` file; give `object` with it."""
    object_name: str | None = Field(default=None, alias="object")
    """The name of the object in `python_file`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the component."""

    @model_validator(mode="before")
    @classmethod
    def _from_word(cls, value: Any) -> Any:
        if isinstance(value, str):
            return {"name": value}
        if isinstance(value, dict) and "object" in value and "object_name" in value:
            raise ValueError("has both spellings, `object` and `object_name`: keep one")
        return value

    @model_validator(mode="after")
    def _one_origin(self) -> _Component:
        if self.name is not None and self.python_file is not None:
            raise ValueError("has both `name` and `python_file`: keep one")
        if (self.python_file is None) != (self.object_name is None):
            raise ValueError("needs `python_file` and `object` together")
        return self


class EnergonTaskEncoderConfig(_Component):
    """What turns a conversation into tokens and a mask. A bare word means `name`; nothing means `generic_sft`."""


class EnergonCookerConfig(_Component):
    """What turns a raw row into a conversation. A bare word means `name`; nothing means `generic_conversation`."""

    has_subflavors: dict[str, Any] | None = None
    """Take only rows whose subflavors hold these values; null = any row."""


class EnergonLoaderConfig(ConfigModel):
    """How rows are drawn. Names that the recipes of the original hold and that have no effect here are accepted;
    `notes` says which of them a config sets."""

    num_workers: int = Field(default=0, ge=0)
    """0 = rows are cooked in the loader thread of the worker, 1 = in a process of its own. More is taken as 1."""
    prefetch_factor: int = Field(default=2, ge=1)
    """Batches kept ready ahead of the one that is trained."""
    topology_mapper: Literal["default", "elastic"] = "default"
    """`default` = one logical shard per replica; `elastic` = `logical_shards` in all, for any number of replicas."""
    logical_shards: int | None = Field(default=None, ge=1)
    """Shards under `topology_mapper: elastic`; the number of replicas must divide it."""
    task_encoder: EnergonTaskEncoderConfig = Field(default_factory=EnergonTaskEncoderConfig)
    """Conversation to tokens."""
    cookers: list[EnergonCookerConfig] = Field(default_factory=lambda: [EnergonCookerConfig()], min_length=1)
    """Raw row to conversation; the first whose filter fits is used, a cooker without a filter comes last."""
    seed_offset: int = 0
    """Added to the seed of the order of rows."""
    max_samples_per_sequence: int | None = Field(default=None, ge=1)
    """Rows read in file order before the reader jumps; null = a ten-thousandth of the rows, at least 1."""
    max_consecutive_bad_rows: int = Field(default=100, ge=1)
    """So many unusable rows in a row end the run."""
    checkpoint_every_sec: float = Field(default=60.0, gt=0)
    """With `num_workers: 1`: seconds between states of the loader process; a resume cooks the rows since again."""
    nvdataset_cache_dir: str | None = None
    """Folder of row indexes for data that lies on a read-only place; null = `~/.cache/onehop`. On several nodes it must
    be shared by them."""

    model_family: str | None = None
    """Without effect: the chat template of the tokenizer decides."""
    processor_adapter: str | None = None
    """Without effect: rows are text."""
    shuffle_buffer_size: int | None = Field(default=None, ge=0)
    """Without effect: rows come from random slices, so that each row is drawn once a pass."""
    packing_buffer_size: int | None = Field(default=None, ge=0)
    """Without effect: the engine packs rows to its token budget."""
    batch_grouping: str = "auto"
    """Without effect."""
    watchdog_timeout_seconds: float | None = None
    """Without effect: every wait of a run has its own limit."""
    cache_pool_max_gbytes: float | None = None
    """Without effect."""
    cache_pool_num_workers: int | None = None
    """Without effect."""
    gc_collect_every_n_steps: int | None = None
    """Without effect."""

    @model_validator(mode="after")
    def _shards_fit_the_mapper(self) -> EnergonLoaderConfig:
        if self.topology_mapper == "elastic" and self.logical_shards is None:
            raise ValueError("topology_mapper: elastic needs logical_shards, the fixed number of data shards")
        if self.topology_mapper == "default" and self.logical_shards is not None:
            raise ValueError(
                f"logical_shards: {self.logical_shards} needs topology_mapper: elastic; `default` takes one per replica"
            )
        return self

    @property
    def loader_processes(self) -> int:
        """0 or 1. With more, Energon swaps batches on a resume in mid-pass as soon as the rows end."""
        return min(self.num_workers, 1)

    def notes(self) -> list[str]:
        """One line for each value that is set but not taken as given, to be said once."""
        lines = []
        if self.num_workers > 1:
            lines.append(f"data.energon.num_workers: {self.num_workers} is taken as 1")
        lines += [f"data.energon.{key}: {self[key]} has no effect" for key in _UNUSED if self[key] is not None]
        if self.batch_grouping != "auto":
            lines.append(f"data.energon.batch_grouping: {self.batch_grouping} has no effect")
        return lines

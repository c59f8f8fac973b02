"""The records of the SFT row path, in order: `EncodedRow`, `ShardBatch`, `LoadedBatch`, `StepEnvelope`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    from nemo_rl.data.config import DataConfig
    from nemo_rl.data.energon.sources import PreparedSource
    from nemo_rl.data_plane.interfaces import KVBatchMeta


@dataclass(frozen=True, kw_only=True)
class LoaderSettings:
    """What the leaders need to build their loaders; the same for all replicas.

    Attributes:
        data_config: the `data` section.
        train: the indexed training source.
        validation: the indexed validation source, or None.
        num_logical_shards: slices of the data over all replicas.
        rows_per_shard: training rows of one shard in one step.
        val_rows_per_shard: validation rows of one shard in one batch.
        max_val_batches: batches of a validation pass; None takes all rows.
        max_sequence_length: longest row in tokens.
        only_unmask_final: train the last assistant turn only.
        seed: of the order of rows.
    """

    data_config: DataConfig
    train: PreparedSource
    validation: PreparedSource | None
    num_logical_shards: int
    rows_per_shard: int
    val_rows_per_shard: int
    max_val_batches: int | None
    max_sequence_length: int
    only_unmask_final: bool
    seed: int


@dataclass(frozen=True, eq=False)
class EncodedRow:
    """One tokenized row, a piece of a row that was split, or a filler that completes the last batch of a pass.

    Example: `EncodedRow("chat.jsonl:7", 0, input_ids=[259, 117, 260, 98], token_mask=[0, 0, 0, 1], weight=1.0)`.
    """

    source_id: str
    """The row's own `id` as text, else `<file>:<0-based line>`, with `[2/3]` behind it for the second of three pieces;
    empty for a filler."""
    shard: int
    """The logical shard it was drawn from."""
    input_ids: np.ndarray
    """`[S]`, int64."""
    token_mask: np.ndarray
    """`[S]`, uint8; 1 = the prediction of this token is trained. Column 0 is 0."""
    weight: float = 1.0
    """0.0 = a filler: it counts nowhere."""


@dataclass(frozen=True, eq=False)
class ShardBatch:
    """The rows of one shard for one step."""

    rows: tuple[EncodedRow, ...]
    """As many as the batch size; more where rows were split, whose pieces stay together."""
    epoch: int
    """0-based pass over the rows."""
    dropped: Mapping[str, int]
    """Rows that were drawn for this batch and could not be used, by reason."""


@dataclass(frozen=True, eq=False)
class LoadedBatch:
    """The rows of one replica for one step: those of its first shard, then of its second, and so on."""

    rows: tuple[EncodedRow, ...]
    epoch: int
    states: Mapping[int, dict[str, Any]]
    """Shard to JSON state *after* this batch, for the checkpoint once the batch is trained. Empty in validation."""
    dropped: Mapping[str, int]
    load_seconds: float


@dataclass(frozen=True)
class StepEnvelope:
    """What the controller hears of a loaded batch: never tensors. Sequences have one entry per row."""

    meta: KVBatchMeta
    logical_rank: int
    logical_world_size: int
    source_ids: tuple[str, ...]
    """Empty text for a filler."""
    field_names: tuple[str, ...]
    """The columns that were published."""
    sequence_lengths: tuple[int, ...]
    """Tokens."""
    load_seconds: float
    """Seconds to draw, cook, encode and batch the rows; without the write to the data plane."""
    valid_tokens: int
    """Trained tokens of the rows that count."""
    dropped: Mapping[str, int]
    shards: tuple[int, ...]
    epoch: int

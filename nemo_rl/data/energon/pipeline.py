"""One raw row to one encoded row: parse, cook, tokenize, fit. A row that fails comes out as a `DroppedRow`.

It never raises for a row: Energon would print a traceback and draw again by itself, and the count would be lost.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from nemo_rl.data.energon.index import parse_row
from nemo_rl.data.energon.multimodal.types import Cook, DroppedRow, Encode, RowRefusedError
from nemo_rl.data.energon.sft_types import EncodedRow
from nemo_rl.data.tokenize import DropReason
from nemo_rl.utils.errors import UserError

JSON_MEMBERS = ("json", "data", "metadata")
"""Members of a sample that may hold the row, in order of preference."""


@dataclass(frozen=True)
class RowPipeline:
    """The way of a row of one shard."""

    shard: int
    cook: Cook
    encode: Encode

    def __call__(self, raw: Any) -> EncodedRow | DroppedRow:
        """`raw` is Energon's `RawSampleData` around the dict of one of our readers."""
        sample: Mapping[str, Any] = raw.data[0]
        where: str = sample["where"]
        try:
            row = _parse(sample)
        except ValueError as error:
            return DroppedRow(DropReason.BAD_LINE, where, str(error))
        try:
            conversation = self.cook(row)
        except Exception as error:  # noqa: BLE001 - a cooker is user code over data of any shape
            return DroppedRow(DropReason.COOK_ERROR, where, _said(error))
        try:
            pieces = self.encode(conversation)
        except RowRefusedError as error:
            return DroppedRow(DropReason.OVERLONG, where, str(error), fatal=True)
        except Exception as error:  # noqa: BLE001 - chat templates raise whatever they like
            return DroppedRow(DropReason.ENCODE_ERROR, where, _said(error))
        if isinstance(pieces, str):
            return DroppedRow(pieces, where, pieces.replace("_", " "))
        (piece,) = pieces
        return EncodedRow(
            source_id=_source_id(row, where),
            shard=self.shard,
            input_ids=np.asarray(piece.input_ids, dtype=np.int64),
            token_mask=np.asarray(piece.token_mask, dtype=np.uint8),
        )


def _parse(sample: Mapping[str, Any]) -> dict[str, Any]:
    """The row of a sample. Raises `ValueError` where there is none."""
    for member in JSON_MEMBERS:
        if member in sample:
            return parse_row(sample[member])
    raise ValueError(f"no member {', '.join(JSON_MEMBERS)} in the sample")


def _source_id(row: Mapping[str, Any], where: str) -> str:
    own = row.get("id")
    return where if own in (None, "") else str(own)


def _said(error: Exception) -> str:
    return str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"

"""One raw row to its encoded row, or rows where it was split: parse, cook, tokenize, fit.

A row that fails comes out as a `DroppedRow`.

It never raises for a row: Energon would print a traceback and draw again by itself, and the count would be lost.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from nemo_rl.data.energon.index import parse_row, source_id
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

    def __call__(self, raw: Any) -> tuple[EncodedRow, ...] | DroppedRow:
        """`raw` is Energon's `RawSampleData` around the dict of one of our readers.

        The pieces of a row that was split are named `<id>[1/3]`, `<id>[2/3]` and so on.
        """
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
        name = source_id(row, where)
        return tuple(
            EncodedRow(
                source_id=name if len(pieces) == 1 else f"{name}[{number}/{len(pieces)}]",
                shard=self.shard,
                input_ids=np.asarray(piece.input_ids, dtype=np.int64),
                token_mask=np.asarray(piece.token_mask, dtype=np.uint8),
            )
            for number, piece in enumerate(pieces, start=1)
        )


def _parse(sample: Mapping[str, Any]) -> dict[str, Any]:
    """The row of a sample. Raises `ValueError` where there is none."""
    for member in JSON_MEMBERS:
        if member in sample:
            return parse_row(sample[member])
    raise ValueError(f"no member {', '.join(JSON_MEMBERS)} in the sample")


def _said(error: Exception) -> str:
    return str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"

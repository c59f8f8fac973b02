"""Rows -> the padded `[B, S]` batch of the public surface."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from nemo_rl.data.tokenize import tokenize_conversation
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.utils.errors import UserError

logger = logging.getLogger(__name__)

BATCH_COLUMNS = ("input_ids", "input_lengths", "token_mask", "sample_mask")


class Row(Protocol):
    """One tokenized row: ids [S], mask of trained tokens [S], loss weight, the id it has in its data set."""

    @property
    def input_ids(self) -> Sequence[int] | np.ndarray: ...
    @property
    def token_mask(self) -> Sequence[int] | np.ndarray: ...
    @property
    def weight(self) -> float: ...
    @property
    def source_id(self) -> str: ...


def batch_rows(rows: Sequence[Row], pad_id: int, multiple: int = 1) -> BatchedDataDict:
    """Right-pad rows to one width S, the longest length rounded up to `multiple`.

    Padding is decided by position: a genuine token whose id equals `pad_id` keeps its mark.

    Returns:
        `input_ids` int64 [B, S]; `input_lengths` int64 [B], true lengths; `token_mask` float32 [B, S], 1 for trained
        tokens, 0 in column 0 and in the padding; `sample_mask` float32 [B], the row weights.
    """
    lengths = [len(row.input_ids) for row in rows]
    width = -(-max(lengths, default=0) // multiple) * multiple
    input_ids = np.full((len(rows), width), pad_id, dtype=np.int64)
    token_mask = np.zeros((len(rows), width), dtype=np.float32)
    for index, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        input_ids[index, :length] = row.input_ids
        token_mask[index, :length] = row.token_mask
    token_mask[:, :1] = 0
    return BatchedDataDict(
        {
            "input_ids": torch.from_numpy(input_ids),
            "input_lengths": torch.tensor(lengths, dtype=torch.int64),
            "token_mask": torch.from_numpy(token_mask),
            "sample_mask": torch.tensor([row.weight for row in rows], dtype=torch.float32),
        }
    )


def prepare_sft_batch(
    batch: Mapping[str, Any],
    *,
    tokenizer: PreTrainedTokenizerBase,
    only_unmask_final: bool,
    make_sequence_length_divisible_by: int,
) -> BatchedDataDict:
    """A batch with the columns of `batch_rows`, from conversations or from columns that are there already.

    - Conversations: `message_log`, a list of turns per row, and `loss_multiplier` [B]. Turns that bring `token_ids`
      are joined as they are; other rows go through `tokenize_conversation`. Assistant turns are trained, or the last
      one only. With `loss_mask_mode` "precomputed" (for the batch, or one entry per row) each turn brings its own
      `token_loss_mask` of zeros and ones beside its `token_ids`.
    - Prepared columns are checked and passed on unchanged, other columns too.
    - An active row without a trained token is warned about and gets `sample_mask` 0.

    Raises:
        UserError: a column or turn is missing or doesn't fit; names it, the row and the sizes.
        TypeError: a prepared column isn't a tensor.
    """
    if "message_log" in batch:
        prepared = _from_conversations(batch, tokenizer, only_unmask_final, make_sequence_length_divisible_by)
    else:
        prepared = _checked(batch)
    trained = prepared["token_mask"][:, 1:].any(dim=1)
    idle = (prepared["sample_mask"] != 0) & ~trained
    if idle.any():
        logger.warning("%d of %d rows have no trained token and are left out of the loss", int(idle.sum()), len(idle))
        prepared["sample_mask"] = torch.where(idle, torch.zeros_like(prepared["sample_mask"]), prepared["sample_mask"])
    return prepared


@dataclass(frozen=True)
class _LoggedRow:
    input_ids: list[int]
    token_mask: list[int]
    weight: float
    source_id: str


def _from_conversations(
    batch: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, only_unmask_final: bool, multiple: int
) -> BatchedDataDict:
    logs = batch["message_log"]
    weights = _column(batch, "loss_multiplier", len(logs))
    source_ids = _column(batch, "source_ids", len(logs)) if "source_ids" in batch else None
    modes = batch.get("loss_mask_mode")
    modes = (
        [modes] * len(logs) if modes is None or isinstance(modes, str) else _column(batch, "loss_mask_mode", len(logs))
    )
    rows = []
    for index, (log, mode, weight) in enumerate(zip(logs, modes, weights, strict=True)):
        try:
            ids, mask = _encode_log(log, mode, tokenizer, only_unmask_final)
        except UserError as error:
            raise UserError(f"message_log row {index}: {error}") from error
        rows.append(_LoggedRow(ids, mask, float(weight), str(source_ids[index]) if source_ids is not None else ""))
    prepared = batch_rows(rows, _pad_id(tokenizer), multiple)
    if source_ids is not None:
        prepared["source_ids"] = [row.source_id for row in rows]
    return prepared


def _encode_log(
    log: Sequence[Mapping[str, Any]], mode: str | None, tokenizer: PreTrainedTokenizerBase, only_unmask_final: bool
) -> tuple[list[int], list[int]]:
    if mode not in (None, "precomputed"):
        raise UserError(f"loss_mask_mode is {mode!r}, null or 'precomputed' is possible")
    if mode == "precomputed" and only_unmask_final:
        raise UserError("loss_mask_mode 'precomputed' brings its own masks, so sft.only_unmask_final must be false")
    with_ids = ["token_ids" in turn for turn in log]
    if not any(with_ids) and mode is None:
        row = tokenize_conversation(tokenizer, log, only_unmask_final=only_unmask_final)
        return row.input_ids, row.token_mask
    if not all(with_ids):
        raise UserError(f"turn {with_ids.index(False)} has no token_ids")
    final = max((index for index, turn in enumerate(log) if turn["role"] == "assistant"), default=-1)
    ids: list[int] = []
    mask: list[int] = []
    for index, turn in enumerate(log):
        turn_ids = _numbers(turn["token_ids"])
        trained = turn["role"] == "assistant" and (index == final or not only_unmask_final)
        ids += turn_ids
        mask += _given_mask(turn, index, len(turn_ids)) if mode else [int(trained)] * len(turn_ids)
    return ids, mask


def _given_mask(turn: Mapping[str, Any], index: int, length: int) -> list[int]:
    if "token_loss_mask" not in turn:
        raise UserError(f"turn {index} has no token_loss_mask")
    mask = _numbers(turn["token_loss_mask"])
    if len(mask) != length:
        raise UserError(f"token_loss_mask of turn {index} has {len(mask)} entries for {length} tokens")
    if any(value not in (0, 1) for value in mask):
        raise UserError(f"token_loss_mask of turn {index} holds values other than 0 and 1")
    return [int(value) for value in mask]


def _checked(batch: Mapping[str, Any]) -> BatchedDataDict:
    missing = [name for name in BATCH_COLUMNS if name not in batch]
    if missing:
        raise UserError(
            f"batch has neither message_log nor {', '.join(missing)}; it has {', '.join(batch) or 'nothing'}"
        )
    for name in BATCH_COLUMNS:
        if not isinstance(batch[name], torch.Tensor):
            raise TypeError(f"batch column {name} is {type(batch[name]).__name__}, a tensor is needed")
    shape = tuple(batch["input_ids"].shape)
    if len(shape) != 2:
        raise UserError(f"batch column input_ids has shape {list(shape)}, [B, S] is needed")
    for name, wanted in (("token_mask", shape), ("input_lengths", shape[:1]), ("sample_mask", shape[:1])):
        if tuple(batch[name].shape) != wanted:
            raise UserError(f"batch column {name} has shape {list(batch[name].shape)}, {list(wanted)} is needed")
    lengths = batch["input_lengths"]
    if ((lengths < 0) | (lengths > shape[1])).any():
        raise UserError(f"batch column input_lengths holds lengths outside 0..{shape[1]}, the width of input_ids")
    for name, column in batch.items():
        if isinstance(column, torch.Tensor) and not column.ndim:
            raise UserError(f"batch column {name} is a single number, one entry per row is needed")
        if isinstance(column, torch.Tensor | list) and len(column) != shape[0]:
            raise UserError(f"batch column {name} has {len(column)} rows, input_ids has {shape[0]}")
    return BatchedDataDict(dict(batch))


def _column(batch: Mapping[str, Any], name: str, num_rows: int) -> Sequence[Any]:
    if name not in batch:
        raise UserError(f"batch has message_log but no {name}")
    column = _numbers(batch[name])
    if len(column) != num_rows:
        raise UserError(f"batch column {name} has {len(column)} rows, message_log has {num_rows}")
    return column


def _numbers(values: torch.Tensor | Sequence[Any]) -> list[Any]:
    return values.tolist() if isinstance(values, torch.Tensor) else list(values)


def _pad_id(tokenizer: PreTrainedTokenizerBase) -> int:
    if not isinstance(tokenizer.pad_token_id, int):
        raise UserError(f"tokenizer {tokenizer.name_or_path!r} has no pad token; load it with get_tokenizer")
    return tokenizer.pad_token_id

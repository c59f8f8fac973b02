"""Reading and writing the columns of a meta's rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from nemo_rl.data_plane.codec import materialize, pack_jagged_fields, to_tensordict
from nemo_rl.data_plane.interfaces import DataPlaneClient, KVBatchMeta
from nemo_rl.data_plane.preshard import round_up
from nemo_rl.data_plane.schema import GLOBAL_FORWARD_PAD_SEQLEN, INPUT_LENGTHS, PAD_TO_MULTIPLE, TOKEN_ALIGNED_FIELDS
from nemo_rl.distributed.batched_data_dict import BatchedDataDict

__all__ = ["TOKEN_ALIGNED_FIELDS", "kv_first_write", "read_columns", "round_up", "write_columns"]


def read_columns(
    client: DataPlaneClient,
    meta: KVBatchMeta,
    *,
    select_fields: Sequence[str] | None = None,
    pad_value_dict: Mapping[str, float] | None = None,
) -> BatchedDataDict:
    """The rows of `meta` as a padded batch: columns `select_fields`, else `meta.fields`.

    Per-token columns are `[N, S]`, `S` being the width stamped on the meta, or the longest row where that is more.
    Columns of a process-local plane are shared with it: do not write to them.

    Raises:
        ValueError, KeyError: see `DataPlaneClient.get_data`.
    """
    rows = client.get_data(meta, select_fields)
    width = int(meta.extra_info.get(GLOBAL_FORWARD_PAD_SEQLEN, 0))
    return materialize(rows, pad_value_dict=pad_value_dict, pad_to_seqlen=width)


def write_columns(client: DataPlaneClient, meta: KVBatchMeta, *, fields: Mapping[str, Any]) -> None:
    """Adds columns to the rows of `meta`; per-token ones `[N, S]` are stored without their padding.

    Does nothing when there are no rows or no columns.

    Raises:
        ValueError: the meta has no lengths, or a column does not fit its rows.
    """
    if not meta.sample_ids or not fields:
        return
    if meta.sequence_lengths is None:
        raise ValueError(f"partition {meta.partition_id!r}: columns {sorted(fields)} need sequence_lengths in the meta")
    columns = _stored_columns(client, fields, torch.tensor(meta.sequence_lengths))
    client.put_samples(meta.sample_ids, meta.partition_id, fields=columns)


def kv_first_write(
    final_batch_cpu: Mapping[str, Any],
    *,
    sample_ids: Sequence[str],
    dp_client: DataPlaneClient,
    partition_id: str,
    extra_info: Mapping[str, Any] | None = None,
    task_name: str = "train",
    pad_to_multiple: int = 1,
    tags: Sequence[Mapping[str, Any]] | None = None,
) -> KVBatchMeta:
    """Writes new rows and returns the meta that a consumer of `task_name` can be given.

    Args:
        final_batch_cpu: columns `[N, ...]` on the CPU, `input_lengths` among them.
        extra_info: facts about the batch to put on the meta.
        pad_to_multiple: put on the meta when above 1: readers pad to a multiple of it.
        tags: one per row.

    Raises:
        ValueError: no `input_lengths`, or a count that differs from the number of ids.
        TypeError: a column that is no tensor, list or object array.
    """
    if INPUT_LENGTHS not in final_batch_cpu:
        raise ValueError(f"partition {partition_id!r}: the first write of rows needs the column {INPUT_LENGTHS!r}")
    lengths: Tensor = final_batch_cpu[INPUT_LENGTHS]
    if lengths.numel() != len(sample_ids):
        raise ValueError(f"partition {partition_id!r}: {lengths.numel()} rows for {len(sample_ids)} sample ids")
    columns = _stored_columns(dp_client, final_batch_cpu, lengths)
    written = dp_client.put_samples(sample_ids, partition_id, fields=columns, tags=tags)
    return replace(
        written,
        task_name=task_name,
        sequence_lengths=lengths.tolist(),
        extra_info={
            **(extra_info or {}),
            **written.extra_info,
            **({PAD_TO_MULTIPLE: pad_to_multiple} if pad_to_multiple > 1 else {}),
        },
    )


def _stored_columns(client: DataPlaneClient, fields: Mapping[str, Any], lengths: Tensor) -> TensorDict:
    if client.process_local:
        return to_tensordict(fields, batch_size=lengths.numel())
    return pack_jagged_fields(fields, lengths=lengths)

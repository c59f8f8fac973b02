"""Rows of a shared plane as files: tensors as safetensors, everything else as JSON, so that reading runs no code."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tensordict import TensorDict
from torch import Tensor
from torch.nested import nested_tensor_from_jagged

from nemo_rl.data_plane.codec import column_names, row_lengths, to_tensordict
from nemo_rl.data_plane.interfaces import DataPlaneClient, KVBatchMeta
from nemo_rl.utils.errors import UserError

TENSORS_FILE = "rows.safetensors"
ROWS_FILE = "rows.json"
_FORMAT = 1


def export_rows(client: DataPlaneClient, sample_ids: Sequence[str], partition_id: str, path: str | Path) -> KVBatchMeta:
    """Writes rows to the folder `path`, which is made: their ids, tags, and the columns that all of them have.

    `rows.json` is written last, so a folder without it is an unfinished one. Returns the meta of the rows.

    Raises:
        KeyError: a row is not there.
        NotImplementedError: the plane does not describe rows: one inside a process, which reads them again.
    """
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    meta = client.get_meta(sample_ids, partition_id)
    names = meta.fields or []
    rows = client.get_samples(sample_ids, partition_id, names) if sample_ids and names else None
    tensors, columns = _split(rows) if rows is not None else ({}, {})
    save_file(tensors, folder / TENSORS_FILE)
    described = {
        "format": _FORMAT,
        "partition_id": partition_id,
        "sample_ids": list(sample_ids),
        "tags": meta.tags,
        "columns": columns,
    }
    written = folder / f"{ROWS_FILE}.tmp"
    written.write_text(json.dumps(described))
    os.replace(written, folder / ROWS_FILE)  # noqa: PTH105  the one call that replaces a file on every system
    return meta


def import_rows(client: DataPlaneClient, path: str | Path, *, partition_id: str | None = None) -> KVBatchMeta:
    """Writes the rows of `export_rows` to the plane again, into their own partition or another; returns their meta.

    Raises:
        UserError: the folder holds no rows, or some in a format of another version.
    """
    folder = Path(path)
    if not (folder / ROWS_FILE).is_file():
        raise UserError(f"{folder}: no {ROWS_FILE} there, so these are no rows, or they were not completely written")
    described = json.loads((folder / ROWS_FILE).read_text())
    if described.get("format") != _FORMAT:
        raise UserError(f"{folder / ROWS_FILE}: format {described.get('format')!r}, this version reads {_FORMAT}")
    target = partition_id or described["partition_id"]
    sample_ids = described["sample_ids"]
    if not sample_ids:
        return KVBatchMeta(target, None, [], fields=[], tags=[])
    tensors = load_file(folder / TENSORS_FILE)
    columns = {name: _joined(name, column, tensors) for name, column in described["columns"].items()}
    fields = to_tensordict(columns, batch_size=len(sample_ids)) if columns else None
    return client.put_samples(sample_ids, target, fields, described["tags"])


def _split(rows: TensorDict) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors to store, and for each column how it is made of them."""
    tensors: dict[str, Tensor] = {}
    columns: dict[str, Any] = {}
    for name in column_names(rows):
        value: Any = rows.get(name)
        if not isinstance(value, Tensor):
            columns[name] = {"kind": "objects", "rows": value.tolist()}
        elif value.is_nested:
            columns[name] = {"kind": "jagged", "lengths": row_lengths(value).tolist()}
            tensors[name] = value.values().contiguous()
        else:
            columns[name] = {"kind": "dense"}
            tensors[name] = value.contiguous()
    return tensors, columns


def _joined(name: str, column: dict[str, Any], tensors: dict[str, Tensor]) -> Any:
    if column["kind"] == "objects":
        return column["rows"]
    if column["kind"] == "dense":
        return tensors[name]
    offsets = torch.zeros(len(column["lengths"]) + 1, dtype=torch.int64)
    torch.cumsum(torch.tensor(column["lengths"], dtype=torch.int64), 0, out=offsets[1:])
    return nested_tensor_from_jagged(tensors[name], offsets)

"""Rows of a batch that change ranks, directly from the one that has them to the one that computes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_rl.distributed.batched_data_dict import BatchedDataDict


class Move(Protocol):
    """Row `row` of rank `source` goes to rank `target`; ranks are counted inside the group."""

    @property
    def source(self) -> int: ...
    @property
    def row(self) -> int: ...
    @property
    def target(self) -> int: ...


def exchange_rows(batch: BatchedDataDict, moves: Sequence[Move], group: dist.ProcessGroup) -> BatchedDataDict:
    """The rows that this rank has after `moves`: those it keeps in their order, then those it gets, by their old ranks.

    Rows arrive bit-equal. One message goes between two ranks that have something for each other, and none else. Every
    rank of the group must call it with the same moves.

    Args:
        batch: tensors `[B, ...]` on the CPU, with the same names, types and widths on all ranks.

    Raises:
        TypeError: a column is no tensor.
    """
    for name, column in batch.items():
        if not isinstance(column, Tensor):
            raise TypeError(f"column {name!r} is a {type(column).__name__}: its rows can't change ranks")
    me = dist.get_rank(group)
    leaving = [move for move in moves if move.source == me]
    coming = [move for move in moves if move.target == me]
    if not leaving and not coming:
        return batch
    row_bytes = sum(_bytes_of(column[:1]).numel() for column in batch.values())
    waits, received = [], {}
    for source in sorted({move.source for move in coming}):
        count = sum(move.source == source for move in coming)
        received[source] = torch.empty(count, row_bytes, dtype=torch.uint8)
        waits.append(dist.irecv(received[source], src=dist.get_global_rank(group, source), group=group))
    for target in sorted({move.target for move in leaving}):
        rows = [move.row for move in leaving if move.target == target]
        message = torch.cat([_bytes_of(column[rows]) for column in batch.values()], dim=1)
        waits.append(dist.isend(message, dst=dist.get_global_rank(group, target), group=group))
    for wait in waits:
        if wait is not None:
            wait.wait()
    gone = {move.row for move in leaving}
    kept = [row for row in range(batch.size) if row not in gone]
    parts = [received[source] for source in sorted(received)]
    columns, at = {}, 0
    for name, column in batch.items():
        width = _bytes_of(column[:1]).numel()
        new = [_rows_of(part[:, at : at + width], column) for part in parts]
        columns[name] = torch.cat([column[kept], *new])
        at += width
    return BatchedDataDict(columns)


def _bytes_of(rows: Tensor) -> Tensor:
    """uint8 `[n, bytes of a row]`."""
    return rows.contiguous().view(rows.size(0), -1).view(torch.uint8)


def _rows_of(received: Tensor, like: Tensor) -> Tensor:
    """`_bytes_of` undone: rows of the type and shape of those of `like`."""
    # Cloned, so that they start at an address at which any type can.
    return received.flatten().clone().view(like.dtype).view(-1, *like.shape[1:])

"""Rows to packs: which rows share a forward pass, where their documents lie, which positions need the head.

Only positions whose next token is predicted go through the head. Its outputs come back as one value per target and
are laid out as `[n, S]` rows again only for the loss, which is small next to the hidden states.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor

from nemo_rl.models.engine.attention import DocumentGroup, Documents

# What lengths of packs and numbers of head positions are rounded up to where every new shape costs a kernel.
SHAPE_MULTIPLE = 64


@dataclass(frozen=True)
class Pack:
    """Some rows of a microbatch, end to end, without padding.

    Attributes:
        rows: indices of the rows in the microbatch, int64 `[n]`.
        input_ids: int64 `[1, T]`; behind the last document may be positions that belong to none.
        position_ids: int64 `[1, T]`; each document starts at 0.
        documents: their borders.
        head_positions: int64 `[at least K]`, positions of the pack whose next token is a target, in order; any further
            ones repeat position 0.
        targets: int64 `[K]`, the token after each of them.
        target_rows: int64 `[K]`, row of each target, counted inside the pack.
        target_columns: int64 `[K]`, column of each target in its row, 1 to S-1.
        is_filler: takes part in collectives, weighs nothing.
    """

    rows: Tensor
    input_ids: Tensor
    position_ids: Tensor
    documents: Documents
    head_positions: Tensor
    targets: Tensor
    target_rows: Tensor
    target_columns: Tensor
    is_filler: bool = False

    def to(self, device: torch.device) -> "Pack":
        """The same pack with its tensors on `device`."""
        if self.input_ids.device == device:
            return self
        tensors = {f.name: v for f in fields(self) if isinstance(v := getattr(self, f.name), Tensor)}
        return replace(self, **{name: tensor.to(device) for name, tensor in tensors.items()})

    def to_rows(self, values: Tensor, width: int) -> Tensor:
        """One value per target, `[K]`, to `[n, width]` by row and column; 0 where there is no target."""
        return values.new_zeros(len(self.rows), width).index_put((self.target_rows, self.target_columns), values)


def plan_packs(lengths: list[int], budget: int) -> list[list[int]]:
    """Groups indices of `lengths` so that no group holds more than `budget` tokens, unless one row alone does.

    Rows are taken in order of length (ties by index), so that documents of equal length stand side by side and run as
    one batch.
    """
    groups: list[list[int]] = []
    used = 0
    for i in sorted(range(len(lengths)), key=lambda i: (lengths[i], i)):
        if not groups or used + lengths[i] > budget:
            groups.append([])
            used = 0
        groups[-1].append(i)
        used += lengths[i]
    return groups


def build_pack(batch: Mapping[str, Tensor], rows: list[int], target_mask: Tensor, multiple: int = 1) -> Pack:
    """Lays `rows` of a padded batch end to end.

    Args:
        batch: `input_ids [B, S]`, `input_lengths [B]`.
        rows: indices into the batch; equal lengths side by side.
        target_mask: bool `[B, S]`; True in column t where token t is a target. Column 0 must be False.
        multiple: the pack's length and its number of head positions are rounded up to this.
    """
    lengths = [int(n) for n in batch["input_lengths"][rows]]
    index = torch.as_tensor(rows)
    width = batch["input_ids"].size(1)
    columns = torch.arange(width)
    inside = columns[None, :] < torch.as_tensor(lengths)[:, None]  # [n, S]
    input_ids = batch["input_ids"][index][inside]
    position_ids = columns.expand(len(rows), width)[inside]
    wanted = target_mask[index] & inside
    target_rows, target_columns = wanted.nonzero(as_tuple=True)
    starts = torch.as_tensor([0, *lengths]).cumsum(0)[:-1]
    head_positions = starts[target_rows] + target_columns - 1
    groups, at = [], 0
    for length, same in groupby(lengths):
        count = len(list(same))
        groups.append(DocumentGroup(at, at + count * length, count))
        at += count * length
    return Pack(
        rows=index,
        input_ids=_fill(input_ids, multiple)[None],
        position_ids=_fill(position_ids, multiple)[None],
        documents=Documents(tuple(groups)),
        head_positions=_fill(head_positions, multiple),
        targets=input_ids[head_positions + 1],
        target_rows=target_rows,
        target_columns=target_columns,
    )


def _fill(values: Tensor, multiple: int) -> Tensor:
    return F.pad(values, (0, -len(values) % multiple))


def filler_pack() -> Pack:
    """Two tokens and one target of weight zero: a forward and backward that changes nothing.

    Ranks whose collectives run inside forward and backward must all make the same number of passes.
    """
    zero = torch.zeros(1, dtype=torch.int64)
    return Pack(
        rows=zero,
        input_ids=torch.zeros(1, 2, dtype=torch.int64),
        position_ids=torch.tensor([[0, 1]]),
        documents=Documents((DocumentGroup(0, 2, 1),)),
        head_positions=zero,
        targets=zero,
        target_rows=zero,
        target_columns=zero + 1,
        is_filler=True,
    )

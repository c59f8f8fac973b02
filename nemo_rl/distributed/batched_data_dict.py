"""A batch as named columns, and the ways to cut and join it."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

import torch

from nemo_rl.distributed.batch_sharding import Shard, dynamic_shards, even_shards, packed_shards


class BatchedDataDict(UserDict[str, Any]):
    """Columns of one batch: tensors `[B, ...]` or lists of length B.

    Cuts of contiguous rows (`slice`, `chunk`, `get_batch`, the iterators) share memory with the batch; selections copy.

    Attributes:
        micro_batch_indices: per chunk, `[start, end)` of each microbatch in the chunk; None when nothing planned them.
        micro_batch_lengths: per chunk, the length of each microbatch in tokens.
        elem_counts_per_gb: per chunk, its number of rows.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.micro_batch_indices: list[list[list[int]]] | None = None
        self.micro_batch_lengths: list[list[int]] | None = None
        self.elem_counts_per_gb: list[int] | None = None

    @property
    def size(self) -> int:
        """B, the number of rows; 0 without columns."""
        return next((len(column) for column in self.data.values()), 0)

    @classmethod
    def from_batches(
        cls, batches: Sequence[Mapping[str, Any]], pad_value_dict: Mapping[str, float] | None = None
    ) -> Self:
        """The rows of all batches, in order; tensors of unequal width are right-padded to the widest.

        Args:
            pad_value_dict: column name to the value that fills its padding; 0 where none is given.

        Raises:
            ValueError: batches with different columns.
        """
        if not batches:
            return cls()
        names = list(batches[0])
        for i, batch in enumerate(batches):
            if set(batch) != set(names):
                raise ValueError(f"batch {i} has the columns {sorted(batch)}, batch 0 has {sorted(names)}")
        fill = pad_value_dict or {}
        return cls({name: _join([batch[name] for batch in batches], fill.get(name, 0)) for name in names})

    def shard_by_batch_size(
        self,
        shards: int,
        batch_size: int | None = None,
        allow_uneven_shards: bool = False,
        dynamic_batching_args: Mapping[str, Any] | None = None,
        sequence_packing_args: Mapping[str, Any] | None = None,
    ) -> list[SlicedDataDict] | tuple[list[SlicedDataDict], list[int]]:
        """The rows dealt to `shards` shards, chunk by chunk of `batch_size` rows; each shard copies its rows.

        Plain: shard i is the i-th contiguous part of every chunk. With one of the two argument dicts, rows are ordered
        by length or packed, every shard gets as many microbatches as the others, and the three plan attributes are set;
        the second result then is the original row at each position of the shards laid end to end, which
        `reorder_data` undoes. Both dicts name the column of row lengths as `input_lengths_key`; for the rest see
        `batch_sharding`.

        Args:
            shards: number of shards.
            batch_size: rows per chunk, that is per optimizer step over all shards; None takes all rows as one chunk.
            allow_uneven_shards: let shard sizes differ, by 1 at most in the plain case.

        Raises:
            AssertionError: columns of unequal length, rows that don't divide by `batch_size`, a `batch_size` that
                doesn't divide by `shards`, or one given together with `allow_uneven_shards`.
            ValueError: both dicts, or a row longer than a microbatch may be.
        """
        if dynamic_batching_args is not None and sequence_packing_args is not None:
            raise ValueError("dynamic batching and sequence packing exclude each other")
        total = self.size
        lengths = {name: len(column) for name, column in self.data.items()}
        assert len(set(lengths.values())) <= 1, f"columns have different numbers of rows: {lengths}"
        assert batch_size is None or not allow_uneven_shards, "batch_size and allow_uneven_shards exclude each other"
        chunk = total if batch_size is None else batch_size
        assert chunk > 0, f"{total} rows in chunks of {chunk}"
        assert total % chunk == 0, f"{total} rows do not divide into chunks of batch_size={chunk}"
        assert allow_uneven_shards or chunk % shards == 0, f"chunks of {chunk} rows do not divide over {shards} shards"
        if dynamic_batching_args is not None:
            assert not allow_uneven_shards, "dynamic batching gives every shard the same shapes, so shards must be even"
            rows = self._row_lengths(dynamic_batching_args["input_lengths_key"])
            plan = dynamic_shards(rows, shards, chunk, dynamic_batching_args)
        elif sequence_packing_args is not None:
            rows = self._row_lengths(sequence_packing_args["input_lengths_key"])
            plan = packed_shards(rows, shards, chunk, sequence_packing_args)
        else:
            return [SlicedDataDict(self._select(shard.rows)) for shard in even_shards(total, shards, chunk)]
        return [self._planned(shard) for shard in plan], [row for shard in plan for row in shard.rows]

    def reorder_data(self, indices: Sequence[int]) -> None:
        """Put row `i` at position `indices[i]`, in place: undoes the order of `shard_by_batch_size`."""
        positions = [0] * len(indices)
        for i, position in enumerate(indices):
            positions[position] = i
        self.data = self._select(positions)

    def select_indices(self, indices: Sequence[int] | torch.Tensor) -> Self:
        """A copy of the rows at `indices`, in that order."""
        rows = indices.tolist() if isinstance(indices, torch.Tensor) else list(indices)
        return type(self)(self._select(rows))

    def slice(self, start: int, end: int) -> SlicedDataDict:
        """The rows `[start, end)`, sharing memory."""
        return SlicedDataDict({name: column[start:end] for name, column in self.data.items()})

    def chunk(self, rank: int, chunks: int) -> SlicedDataDict:
        """The `rank`-th of `chunks` equal, contiguous parts; `ValueError` when the rows don't divide."""
        if self.size % chunks != 0:
            raise ValueError(f"{self.size} rows do not divide into {chunks} parts")
        width = self.size // chunks
        return self.slice(rank * width, (rank + 1) * width)

    def get_batch(self, batch_idx: int, batch_size: int | None = None) -> SlicedDataDict:
        """The `batch_idx`-th chunk: as planned where there is a plan, which goes with it, else of `batch_size` rows."""
        if self.elem_counts_per_gb is None:
            if batch_size is None:
                raise ValueError("batch_size is needed: these rows carry no plan")
            return self.slice(batch_idx * batch_size, (batch_idx + 1) * batch_size)
        start = sum(self.elem_counts_per_gb[:batch_idx])
        count = self.elem_counts_per_gb[batch_idx]
        batch = self.slice(start, start + count)
        batch.elem_counts_per_gb = [count]
        if self.micro_batch_indices is not None and self.micro_batch_lengths is not None:
            batch.micro_batch_indices = [self.micro_batch_indices[batch_idx]]
            batch.micro_batch_lengths = [self.micro_batch_lengths[batch_idx]]
        return batch

    def repeat_interleave(self, num_repeats: int) -> Self:
        """Each row `num_repeats` times in a row, as a copy; list items are the same objects."""
        return self.select_indices([row for row in range(self.size) for _ in range(num_repeats)])

    def truncate_tensors(self, dim: int, length: int) -> None:
        """Cut every tensor that has the dimension `dim` to at most `length` along it, in place, sharing memory."""
        for name, column in self.data.items():
            if isinstance(column, torch.Tensor) and column.ndim > dim and column.shape[dim] > length:
                self.data[name] = column.narrow(dim, 0, length)

    def make_microbatch_iterator(self, microbatch_size: int) -> Iterator[SlicedDataDict]:
        """Contiguous microbatches of `microbatch_size` rows; `ValueError` when the rows don't divide."""
        if self.size % microbatch_size != 0:
            raise ValueError(f"{self.size} rows do not divide into microbatches of {microbatch_size}")
        return (self.slice(i, i + microbatch_size) for i in range(0, self.size, microbatch_size))

    def make_microbatch_iterator_with_dynamic_shapes(self) -> Iterator[SlicedDataDict]:
        """The planned microbatches of a single chunk, tensors cut to the microbatch's width along dimension 1."""
        for (start, end), width in zip(*self._only_chunk(), strict=True):
            microbatch = self.slice(start, end)
            microbatch.truncate_tensors(1, width)
            yield microbatch

    def make_microbatch_iterator_for_packable_sequences(self) -> Iterator[SlicedDataDict]:
        """The planned microbatches of a single chunk, as padded rows that fit one pack."""
        return (self.slice(start, end) for start, end in self._only_chunk()[0])

    def to(self, device: torch.device | str) -> Self:
        """Move every tensor to `device`, in place; the batch itself."""
        for name, column in self.data.items():
            if isinstance(column, torch.Tensor):
                self.data[name] = column.to(device)
        return self

    def get_dict(self) -> dict[str, Any]:
        """The columns as a plain dict; the values are not copied."""
        return dict(self.data)

    def _select(self, rows: list[int]) -> dict[str, Any]:
        index = torch.tensor(rows, dtype=torch.int64)
        return {
            name: column[index.to(column.device)] if isinstance(column, torch.Tensor) else [column[row] for row in rows]
            for name, column in self.data.items()
        }

    def _planned(self, shard: Shard) -> SlicedDataDict:
        part = SlicedDataDict(self._select(shard.rows))
        part.micro_batch_indices = shard.micro_batch_indices
        part.micro_batch_lengths = shard.micro_batch_lengths
        part.elem_counts_per_gb = shard.elem_counts_per_gb
        return part

    def _row_lengths(self, key: str) -> list[int]:
        column = self.data[key]
        return column.tolist() if isinstance(column, torch.Tensor) else list(column)

    def _only_chunk(self) -> tuple[list[list[int]], list[int]]:
        if self.micro_batch_indices is None or self.micro_batch_lengths is None:
            raise ValueError("no microbatches are planned for these rows; shard_by_batch_size plans them")
        if len(self.micro_batch_indices) != 1:
            raise ValueError(f"{len(self.micro_batch_indices)} chunks; take one with get_batch first")
        return self.micro_batch_indices[0], self.micro_batch_lengths[0]


class SlicedDataDict(BatchedDataDict):
    """A part of a batch: a shard, a chunk or a microbatch."""


def _join(columns: Sequence[Any], fill: float) -> Any:
    if not isinstance(columns[0], torch.Tensor):
        return [item for column in columns for item in column]
    widths = [max(sizes) for sizes in zip(*(column.shape[1:] for column in columns), strict=True)]
    return torch.cat([_pad(column, widths, fill) for column in columns])


def _pad(column: torch.Tensor, widths: Sequence[int], fill: float) -> torch.Tensor:
    missing = [width - size for width, size in zip(widths, column.shape[1:], strict=True)]
    if not any(missing):
        return column
    # torch wants (left, right) per dimension, the last dimension first.
    pads = [amount for right in reversed(missing) for amount in (0, right)]
    return torch.nn.functional.pad(column, pads, value=fill)

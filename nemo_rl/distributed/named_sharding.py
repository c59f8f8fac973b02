"""Which worker sits at which coordinates of the named mesh axes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

REPLICATED_AXES: tuple[str, ...] = ("tensor_parallel", "context_parallel", "pipeline_parallel")
"""The axes along which workers hold parts of one model copy; the worker at 0 on all of them is the replica's leader."""


class NamedSharding:
    """An n-dimensional grid of worker ranks whose axes have names. Immutable.

    Args:
        layout: nested sequence or array of distinct integer ranks; its shape is the mesh shape.
        names: one name per axis, in the order of the layout's dimensions.

    Raises:
        ValueError: ranks that are not integers, a ragged layout, duplicate ranks, names that repeat or don't match
            the number of dimensions.

    Example:
        `NamedSharding([[0, 1], [2, 3]], ["data_parallel", "tensor_parallel"])`: rank 2 is data 1, tensor 0.
    """

    def __init__(self, layout: Sequence[object] | np.ndarray, names: Sequence[str]):
        try:
            grid = np.array(layout)
        except ValueError as error:
            raise ValueError(f"layout is ragged: {error}") from None
        if grid.dtype.kind not in "iu":
            raise ValueError(
                f"layout must hold integer ranks and have equally long rows, got values of type {grid.dtype}"
            )
        if grid.ndim != len(names):
            raise ValueError(f"layout has {grid.ndim} dimensions and {len(names)} names: {list(names)}")
        if len(set(names)) != len(names):
            raise ValueError(f"axis names repeat: {list(names)}")
        if np.unique(grid).size != grid.size:
            raise ValueError(f"layout holds a rank twice: {grid.tolist()}")
        self._layout = grid.astype(np.int64)
        self._names = tuple(names)
        self._coords = {int(rank): index for index, rank in np.ndenumerate(self._layout)}

    @property
    def shape(self) -> dict[str, int]:
        """Axis name to axis size, in layout order."""
        return dict(zip(self._names, self._layout.shape, strict=True))

    @property
    def names(self) -> list[str]:
        """A copy of the axis names, in layout order."""
        return list(self._names)

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return self._layout.ndim

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self._layout.size

    @property
    def layout(self) -> np.ndarray:
        """A copy of the grid of ranks, int64."""
        return self._layout.copy()

    def get_worker_coords(self, worker_id: int) -> dict[str, int]:
        """The coordinate of `worker_id` on every axis; `ValueError` when the rank is not in the layout."""
        if worker_id not in self._coords:
            raise ValueError(f"rank {worker_id} is not in the layout, which holds {sorted(self._coords)}")
        return dict(zip(self._names, self._coords[worker_id], strict=True))

    @staticmethod
    def is_axis_zero(coords: Mapping[str, int], axes: Sequence[str]) -> bool:
        """Whether the coordinate is 0 on all `axes`; an axis that `coords` lacks counts as 0."""
        return all(coords.get(axis, 0) == 0 for axis in axes)

    def get_ranks_by_coord(self, **coords: int) -> list[int]:
        """The sorted ranks at the given coordinates; `[]` when one is out of range, `ValueError` on an unknown axis."""
        wanted = {self.get_axis_index(name): index for name, index in coords.items()}
        return sorted(
            rank for rank, at in self._coords.items() if all(at[axis] == index for axis, index in wanted.items())
        )

    def get_ranks(self, **coords: int) -> NamedSharding | int:
        """The sub-grid at the given coordinates, or the one rank when every axis is given.

        Raises:
            ValueError: unknown axis.
            IndexError: a coordinate out of range.
        """
        index: list[int | slice] = [slice(None)] * self.ndim
        for name, at in coords.items():
            axis = self.get_axis_index(name)
            if not 0 <= at < self._layout.shape[axis]:
                raise IndexError(f"{name}={at} is out of range for an axis of size {self._layout.shape[axis]}")
            index[axis] = at
        part = self._layout[tuple(index)]
        if len(coords) == self.ndim:
            return int(part)
        return NamedSharding(part, [name for name in self._names if name not in coords])

    def get_axis_index(self, name: str) -> int:
        """The position of the axis in the layout; `ValueError` on an unknown name."""
        if name not in self._names:
            raise ValueError(f"unknown axis {name!r}; the axes are {list(self._names)}")
        return self._names.index(name)

    def get_axis_size(self, name: str) -> int:
        """The size of the axis; `KeyError` on an unknown name."""
        return self.shape[name]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, NamedSharding):
            return NotImplemented
        return self._names == other._names and np.array_equal(self._layout, other._layout)

    def __hash__(self) -> int:
        return hash((self._names, self._layout.shape, self._layout.tobytes()))

    def __repr__(self) -> str:
        return f"NamedSharding({', '.join(f'{name}={size}' for name, size in self.shape.items())})"

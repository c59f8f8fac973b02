"""Weights on their way through the object store, as who carries them sees them. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ray import ObjectRef


@dataclass(frozen=True)
class WeightEntry:
    """One tensor of a bucket: `shape` and `dtype` (torch's name) of the bytes from `start` to `end`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True)
class WeightBucket:
    """Some tensors, end to end in one array of bytes. Who carries a bucket carries no tensor, only the reference.

    Attributes:
        data: to a uint8 array in the object store.
    """

    data: ObjectRef
    entries: tuple[WeightEntry, ...]

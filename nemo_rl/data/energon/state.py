"""Energon's loader state as JSON.

It is nested dicts of plain values with three exceptions: bytes (random generators), the positions of open
slices, and the outermost records, which depend on whether a loader process is used. `inner_to_json` drops that last
difference, so that a resume may change the number of loader processes.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

from megatron.energon.flavors.webdataset.sample_loader import SliceState
from megatron.energon.savable_loader import SavableDataLoaderState, SavableDatasetCheckpoint, SavableDatasetState
from megatron.energon.state import FlexState

_BYTES, _SLICE = "$bytes", "$slice"
_IN_PROCESS = "SimpleSavableDatasetWrapper"


def inner_to_json(state: SavableDataLoaderState) -> dict[str, Any]:
    """Energon's state of one rank: that of its dataset, the draws it stands for, and the draws to skip after it."""
    (worker,) = state.worker_states
    if isinstance(worker, SavableDatasetCheckpoint):
        if worker.state is None:
            return {"draws": 0, "skip": worker.offset, "dataset": None}
        return {
            "draws": worker.state.sample_index,
            "skip": worker.offset,
            "dataset": _encode(worker.state.dataset_state),
        }
    return {"draws": worker["_sample_index"], "skip": 0, "dataset": _encode(worker["datasets"][0])}


def inner_from_json(value: Mapping[str, Any], *, loader_processes: int) -> tuple[SavableDataLoaderState | None, int]:
    """What to restore (None = a fresh loader) and how many draws to skip by hand after that."""
    if loader_processes:
        dataset = None
        if value["dataset"] is not None:
            # Energon seeds the generators afresh for a null; nothing here draws from them.
            rng: Any = None
            dataset = SavableDatasetState(rng=rng, dataset_state=_decode(value["dataset"]), sample_index=value["draws"])
        worker: Any = SavableDatasetCheckpoint(state=dataset, offset=value["skip"])
        return SavableDataLoaderState(worker_states=[worker], next_worker_id=0, micro_batch_size=None), 0
    if value["dataset"] is None:
        return None, value["skip"]
    worker = FlexState(__class__=_IN_PROCESS, _sample_index=value["draws"], datasets=[_decode(value["dataset"])])
    return SavableDataLoaderState(worker_states=[worker], next_worker_id=0, micro_batch_size=None), value["skip"]


def _encode(value: Any) -> Any:
    if isinstance(value, bytes):
        return {_BYTES: base64.b64encode(value).decode()}
    if isinstance(value, SliceState):
        return {_SLICE: [value.index, value.current]}
    if isinstance(value, dict):
        return {key: _encode(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        # A list of thousands of slice numbers is the bulk of a state.
        return [item if type(item) is int else _encode(item) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"Energon's state holds a {type(value).__name__}, which has no JSON form here")


def _decode(value: Any) -> Any:
    if isinstance(value, dict):
        if _BYTES in value:
            return base64.b64decode(value[_BYTES])
        if _SLICE in value:
            index, current = value[_SLICE]
            return SliceState(index=index, current=current)
        return FlexState({key: _decode(item) for key, item in value.items()})
    if isinstance(value, list):
        return [_decode(item) for item in value]
    return value

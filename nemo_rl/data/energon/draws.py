"""The draws of one shard for one pass: an Energon loader without batches, repetition or shuffle buffer.

Rows are read in slices, the slices in random order, each row once. Batches, passes and fillers are made on top: with
`repeat` or a shuffle buffer Energon draws rows twice before others come once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from megatron.energon import WorkerConfig, get_savable_loader
from megatron.energon.errors import reraise_exception
from megatron.energon.flavors.webdataset.sample_loader import WebdatasetSampleLoaderDataset
from megatron.energon.flavors.webdataset.sharder import Sharder
from megatron.energon.flavors.webdataset.structs import DatasetSubset
from megatron.energon.savable_loader import SavableDataLoader
from megatron.energon.wrappers import MapDataset

from nemo_rl.data.energon.sources import PreparedSource, open_reader
from nemo_rl.data.energon.state import inner_from_json, inner_to_json
from nemo_rl.utils.errors import RunError

PARALLEL_SLICES = 16
"""Slices that are open at once when the order is random; rows are taken from them at random."""


class PassDraws:
    """An iterator over one pass of one shard. For one thread only: Energon keeps a process-wide active config."""

    def __init__(
        self,
        prepared: PreparedSource,
        *,
        shard: int,
        num_shards: int,
        transform: Callable[[Any], Any],
        shuffle: bool,
        seed: int,
        slice_rows: int,
        loader_processes: int,
        checkpoint_every_sec: float,
        prefetch: int,
        restore: Mapping[str, Any] | None,
    ):
        """`seed` decides the order; `prefetch` is the number of draws a loader process may be ahead; `restore` is a
        value that `state` returned."""
        self._path = prepared.path
        self._shard = shard
        self._reader = open_reader(prepared)
        worker_config = WorkerConfig(
            rank=shard,
            world_size=num_shards,
            num_workers=loader_processes,
            seed_offset=seed,
            global_error_handler=reraise_exception,
        )
        offsets = Sharder.slice_workers(
            len(self._reader),
            worker_config,
            max_samples_per_sequence=slice_rows,
            subset=DatasetSubset(absolute_range=(0, prepared.rows)),
        )
        raw = WebdatasetSampleLoaderDataset(
            join_readers=[self._reader],
            workers_sample_slice_offsets=offsets,
            worker_config=worker_config,
            shuffle_over_epochs=1 if shuffle else None,
            parallel_slice_iters=PARALLEL_SLICES if shuffle else 1,
        )
        self._loader: SavableDataLoader[Any] = get_savable_loader(
            MapDataset(raw, transform, worker_config=worker_config, stateless_map_fn=True),
            checkpoint_every_sec=checkpoint_every_sec,
            gc_collect_every_n_steps=0,
            prefetch_factor=prefetch,
            watchdog_timeout_seconds=None,
        )
        # Rows are numpy records, nothing to pin; and the default generator belongs to the training code.
        self._loader.pin_memory = False
        self._loader.generator = torch.Generator()
        skip = 0
        if restore is not None:
            state, skip = inner_from_json(restore, loader_processes=loader_processes)
            self._loader.restore_state_rank(state)
        self._iterator: Iterator[Any] = iter(self._loader)
        for _ in range(skip):
            next(self._iterator)

    def __iter__(self) -> PassDraws:
        return self

    def __next__(self) -> Any:
        """The next row. Raises `StopIteration` at the end and `RunError` where the data can't be read any more."""
        try:
            return next(self._iterator)
        except StopIteration:
            raise
        # A reader fails in many ways, and in a loader process with a whole traceback as its message.
        except Exception as error:
            kind = type(error)
            reason = str(error).strip().rpartition("\n")[2]
            reason = reason.removeprefix(f"{kind.__module__}.").removeprefix(f"{kind.__qualname__}: ")
            if isinstance(error, RunError):
                raise RunError(reason) from error
            raise RunError(f"{self._path}: reading shard {self._shard} failed: {kind.__name__}: {reason}") from error

    def state(self) -> dict[str, Any]:
        """The JSON state after the last draw. Only after a draw, and in the thread that made it."""
        state = self._loader.save_state_rank()
        assert state is not None, "a loader without a draw has no state"
        return inner_to_json(state)

    def close(self) -> None:
        """Close the data and end the loader process, if there is one."""
        workers: Any = self._loader._iterator
        if workers is not None:
            workers._shutdown_workers()
        self._reader.close()

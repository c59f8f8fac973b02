"""All loaders of one replica: the training shards it owns and the validation shards of the same numbers."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from nemo_rl.data.config import DataConfig
from nemo_rl.data.energon.sft_dataloader import EnergonSFTDataLoader, build_energon_sft_loader
from nemo_rl.data.energon.sft_types import LoadedBatch, ShardBatch
from nemo_rl.data.energon.sources import PreparedSource
from nemo_rl.utils.errors import UserError


class ReplicaLoaders:
    """The batches of a replica: those of its shards joined in shard order. All calls must come from one thread."""

    def __init__(
        self,
        train: Sequence[EnergonSFTDataLoader],
        validation: Sequence[EnergonSFTDataLoader],
        shards: tuple[int, ...],
    ):
        self._train = [iter(loader) for loader in train]
        self._validation = list(validation)
        self._in_validation = False
        self.shards = shards

    @property
    def has_validation(self) -> bool:
        """Whether there is a validation set."""
        return bool(self._validation)

    def next_train(self) -> LoadedBatch:
        """The next training batch with the states after it."""
        started = time.perf_counter()
        batches, states = [], {}
        for shard, loader in zip(self.shards, self._train, strict=True):
            batches.append(next(loader))
            states[shard] = loader.state_dict()
        return _join(batches, states, time.perf_counter() - started)

    def next_validation(self) -> LoadedBatch | None:
        """The next validation batch; None ends the pass, and the call after that starts it again."""
        started = time.perf_counter()
        if not self._in_validation:
            for loader in self._validation:
                iter(loader)
            self._in_validation = True
        batches = [batch for loader in self._validation if (batch := next(loader, None)) is not None]
        if not batches:
            self._in_validation = False
            return None
        return _join(batches, {}, time.perf_counter() - started)

    def close(self) -> None:
        """Close all data and end the loader processes."""
        for loader in (*self._train, *self._validation):
            loader.close()


def build_replica_loaders(
    *,
    data_config: DataConfig,
    tokenizer: Any,
    prepared_train: PreparedSource,
    prepared_validation: PreparedSource | None,
    shards: tuple[int, ...],
    num_logical_shards: int,
    rows_per_shard: int,
    val_rows_per_shard: int,
    max_sequence_length: int,
    only_unmask_final: bool,
    seed: int,
    restored_states: Mapping[int, Mapping[str, Any]] | None = None,
    max_validation_batches: int | None = None,
) -> ReplicaLoaders:
    """The loaders of the replica that owns `shards`, the training ones restored. For the thread that will use them.

    Args:
        rows_per_shard: training rows of one shard in one batch; the replica takes `len(shards)` times as many.
        val_rows_per_shard: the same for validation.
        max_sequence_length: tokens.
        restored_states: shard to the state of a `LoadedBatch`; shards of other replicas are ignored.
        max_validation_batches: a validation pass ends after so many batches; null = all rows.

    Raises:
        UserError: a shard without a state, a state made for other data or settings, or states of different steps.
    """

    def loader(
        shard: int, role: Literal["train", "validation"], prepared: PreparedSource, batch_size: int
    ) -> EnergonSFTDataLoader:
        return build_energon_sft_loader(
            data_config=data_config,
            prepared=prepared,
            tokenizer=tokenizer,
            batch_size=batch_size,
            max_sequence_length=max_sequence_length,
            split_role=role,
            shard=shard,
            num_logical_shards=num_logical_shards,
            only_unmask_final=only_unmask_final,
            seed=seed,
            max_batches=max_validation_batches,
        )

    train = [loader(shard, "train", prepared_train, rows_per_shard) for shard in shards]
    if restored_states is not None:
        _restore(train, shards, restored_states)
    validation = []
    if prepared_validation is not None:
        validation = [loader(shard, "validation", prepared_validation, val_rows_per_shard) for shard in shards]
    return ReplicaLoaders(train, validation, shards)


def _restore(
    loaders: Sequence[EnergonSFTDataLoader], shards: tuple[int, ...], states: Mapping[int, Mapping[str, Any]]
) -> None:
    missing = [shard for shard in shards if shard not in states]
    if missing:
        raise UserError(f"the checkpoint has no loader state for shard {missing[0]}, only for {sorted(states)}")
    for shard, loader in zip(shards, loaders, strict=True):
        loader.load_state_dict(states[shard])
    steps = {(states[shard]["pass"], states[shard]["batches"]) for shard in shards}
    if len(steps) > 1:
        raise UserError(
            f"the loader states of shards {list(shards)} are of different steps: (pass, batch) {sorted(steps)}"
        )


def _join(batches: Sequence[ShardBatch], states: dict[int, dict[str, Any]], load_seconds: float) -> LoadedBatch:
    dropped: Counter[str] = Counter()
    for batch in batches:
        dropped.update(batch.dropped)
    rows = tuple(row for batch in batches for row in batch.rows)
    return LoadedBatch(rows, batches[0].epoch, states, dict(dropped), load_seconds)

"""The loader of one logical shard: passes of equally many batches, each row once a pass, and a state after each batch.

    source rows -> draws (Energon) -> batches of `batch_size` rows -> pass 0, pass 1, ...

A pass has `batches_per_pass` batches. A row that can't be used is counted and replaced by the next one of its shard;
when the rows of the shard are used up early, fillers complete the pass, so that all shards take equally many steps.

A batch counts rows of the source. With `data.overlong: split` the pieces of a row all go into the batch of the row: so
the number of batches of a pass is known before anything is tokenized, and no piece waits over a saved state.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import numpy as np

from nemo_rl.data.config import DataConfig
from nemo_rl.data.energon.draws import PassDraws
from nemo_rl.data.energon.identity import differences, loader_identity
from nemo_rl.data.energon.multimodal.cookers import select_cooker
from nemo_rl.data.energon.multimodal.registry import TASK_ENCODER_REGISTRY
from nemo_rl.data.energon.multimodal.types import DroppedRow, EncoderSettings
from nemo_rl.data.energon.pipeline import RowPipeline
from nemo_rl.data.energon.sft_types import EncodedRow, ShardBatch
from nemo_rl.data.energon.sources import PreparedSource, batches_per_pass, rows_per_shard
from nemo_rl.utils.errors import UserError

STATE_VERSION = 1
FILLER_TOKENS = 2
FEW_ROWS = 8
"""One of several shards with fewer rows may be all bad by chance; any other pass without a usable row ends the run."""


class EnergonSFTDataLoader:
    """One logical shard of one source. All calls must come from one thread.

    Training (`endless`) goes from pass to pass in new orders. Validation ends after one pass; a new `iter` starts over.
    """

    def __init__(
        self,
        prepared: PreparedSource,
        pipeline: RowPipeline,
        *,
        num_shards: int,
        batch_size: int,
        shuffle: bool,
        endless: bool,
        seed: int,
        data_config: DataConfig,
        identity: dict[str, Any],
        filler_id: int = 0,
        max_batches: int | None = None,
    ):
        """`identity` is what a saved state must agree with; `filler_id` is the token of fillers; `max_batches` ends a
        validation pass early."""
        self._prepared = prepared
        self._pipeline = pipeline
        self._shard = pipeline.shard
        self._num_shards = num_shards
        self._batch_size = batch_size
        self._shuffle = shuffle
        self._endless = endless
        self._seed = seed
        self._config = data_config.energon
        self._identity = identity
        self._filler_id = filler_id
        self._shard_rows = rows_per_shard(prepared.rows, num_shards)[self._shard]
        few = num_shards > 1 and self._shard_rows < FEW_ROWS
        self._bad_limit = self._config.max_consecutive_bad_rows
        if not few:
            self._bad_limit = min(self._bad_limit, self._shard_rows)
        batches = batches_per_pass(prepared, num_shards, batch_size)
        self._pass_batches = min(batches, max_batches or batches)
        self._pass = 0
        self._batches = 0
        self._drawn = 0
        self._consecutive_bad = 0
        self._draws: PassDraws | None = None
        self._restored_inner: Mapping[str, Any] | None = None
        self._started = False

    def __len__(self) -> int:
        """Batches of a pass."""
        return self._pass_batches

    def __iter__(self) -> EnergonSFTDataLoader:
        if not self._endless:
            self._start_pass(self._pass)
        return self

    def __next__(self) -> ShardBatch:
        """The next batch of `batch_size` rows; a row that was split counts as one and brings all its pieces.

        Raises:
            StopIteration: the validation pass is over.
            UserError: too many unusable rows in a row, or a row that `data.overlong: fail` refuses.
        """
        if self._batches == self._pass_batches:
            raise StopIteration
        self._started = True
        epoch = self._pass
        dropped: Counter[str] = Counter()
        drawn = list(self._draw_rows(dropped))
        rows = [row for pieces in drawn for row in pieces]
        rows += [self._filler()] * (self._batch_size - len(drawn))
        self._batches += 1
        if self._batches == self._pass_batches and self._endless:
            self._start_pass(self._pass + 1)
        return ShardBatch(tuple(rows), epoch, dict(dropped))

    def state_dict(self) -> dict[str, Any]:
        """What continues after the last batch, as JSON values. Call it in the thread of `next`, right after it.

        Between two passes there is no inner state: the next pass starts from its number alone.
        """
        return {
            "version": STATE_VERSION,
            "shard": self._shard,
            "pass": self._pass,
            "batches": self._batches,
            "drawn": self._drawn,
            "inner": self._inner_state(),
            "identity": self._identity,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after the batch that `state` was taken after.

        Raises:
            RuntimeError: a batch was taken already.
            UserError: the state has another form, or was made for other data, settings or another shard; the message
                lists `key old -> new`.
        """
        if self._started:
            raise RuntimeError("the loader state must be restored before the first batch")
        if state.get("version") != STATE_VERSION:
            raise UserError(
                f"loader state of shard {self._shard} has version {state.get('version')!r}, not {STATE_VERSION}"
            )
        changed = list(differences(state["identity"], self._identity))
        if changed:
            raise UserError(
                f"the data loader of shard {self._shard} can't resume, this differs from the checkpoint: "
                f"{'; '.join(changed)}. Restore the old values, or start afresh in another checkpoint_dir"
            )
        self._pass, self._batches, self._drawn = state["pass"], state["batches"], state["drawn"]
        self._restored_inner = state["inner"]

    def close(self) -> None:
        """Close the data and end the loader process."""
        if self._draws is not None:
            self._draws.close()
            self._draws = None

    def _start_pass(self, number: int) -> None:
        self.close()
        self._pass, self._batches, self._drawn, self._restored_inner = number, 0, 0, None
        self._consecutive_bad = 0

    def _draw_rows(self, dropped: Counter[str]) -> Iterator[tuple[EncodedRow, ...]]:
        """Up to `batch_size` usable rows, each with its pieces; fewer when the rows of the shard end."""
        for _ in range(self._batch_size):
            pieces = self._draw_usable(dropped)
            if pieces is None:
                return
            yield pieces

    def _draw_usable(self, dropped: Counter[str]) -> tuple[EncodedRow, ...] | None:
        while self._drawn < self._shard_rows:
            if self._draws is None:
                self._draws = self._open_draws()
            drawn = next(self._draws, None)
            if drawn is None:
                # Rows that the split of a folder excludes are counted in the shard but never drawn.
                self._drawn = self._shard_rows
                return None
            self._drawn += 1
            if isinstance(drawn, DroppedRow):
                self._count(drawn, dropped)
                continue
            self._consecutive_bad = 0
            return drawn
        return None

    def _count(self, row: DroppedRow, dropped: Counter[str]) -> None:
        place = f"row {row.where} of {self._prepared.path}"
        if row.fatal:
            raise UserError(f"{place}: {row.detail}")
        # Plain text: the enum would make the controller import the tokenizer's module.
        dropped[f"{row.reason}"] += 1
        self._consecutive_bad += 1
        if self._consecutive_bad >= self._bad_limit:
            raise UserError(
                f"{place} is the last of {self._consecutive_bad} unusable rows in a row: {row.reason}: {row.detail}; "
                f"fix the rows or data.energon.cookers (limit: a whole pass, or data.energon.max_consecutive_bad_rows)"
            )

    def _inner_state(self) -> Mapping[str, Any] | None:
        if self._drawn in (0, self._shard_rows):
            return None
        return self._restored_inner if self._draws is None else self._draws.state()

    def _open_draws(self) -> PassDraws:
        restore, self._restored_inner = self._restored_inner, None
        assert restore is not None or self._drawn == 0, "the loader is closed"
        return PassDraws(
            self._prepared,
            shard=self._shard,
            num_shards=self._num_shards,
            transform=self._pipeline,
            shuffle=self._shuffle,
            # Far apart, so that pass 1 of a seed is not pass 0 of the next seed.
            seed=((self._seed + self._config.seed_offset) << 32) + self._pass,
            slice_rows=self._prepared.slice_rows(self._config.max_samples_per_sequence),
            loader_processes=self._config.loader_processes,
            checkpoint_every_sec=self._config.checkpoint_every_sec,
            prefetch=self._config.prefetch_factor * self._batch_size,
            restore=restore,
        )

    def _filler(self) -> EncodedRow:
        return EncodedRow(
            source_id="",
            shard=self._shard,
            input_ids=np.full(FILLER_TOKENS, self._filler_id, dtype=np.int64),
            token_mask=np.zeros(FILLER_TOKENS, dtype=np.uint8),
            weight=0.0,
        )


def build_energon_sft_loader(
    *,
    data_config: DataConfig,
    prepared: PreparedSource,
    tokenizer: Any,
    batch_size: int,
    max_sequence_length: int,
    split_role: Literal["train", "validation"],
    shard: int,
    num_logical_shards: int,
    only_unmask_final: bool,
    seed: int,
    max_batches: int | None = None,
) -> EnergonSFTDataLoader:
    """The loader of one shard; nothing is read before the first batch.

    Args:
        batch_size: rows of this shard in one batch.
        max_sequence_length: tokens.
        seed: of the order of training rows; `data.energon.seed_offset` is added.
        max_batches: a validation pass ends after so many; null = all rows.

    Raises:
        UserError: a shard that does not exist, a component that can't be found, or options it refuses.
    """
    if not 0 <= shard < num_logical_shards:
        raise UserError(f"shard {shard} is not one of the {num_logical_shards} logical shards")
    if batch_size < 1:
        raise UserError(f"{batch_size} rows per shard: at least one is needed")
    energon = data_config.energon
    training = split_role == "train"
    settings = EncoderSettings(
        tokenizer=tokenizer,
        max_sequence_length=max_sequence_length,
        only_unmask_final=only_unmask_final,
        overlong=data_config.overlong,
        add_bos=data_config.add_bos,
        add_eos=data_config.add_eos,
        chat_template_kwargs=data_config.chat_template_kwargs,
    )
    pipeline = RowPipeline(
        shard=shard,
        cook=select_cooker(energon.cookers, prepared.subflavors),
        encode=TASK_ENCODER_REGISTRY.build(energon.task_encoder, settings),
    )
    # Validation starts over each time, so it has no state to compare.
    identity: dict[str, Any] = {}
    if training:
        identity = loader_identity(
            data_config,
            prepared,
            tokenizer,
            shard=shard,
            num_shards=num_logical_shards,
            batch_size=batch_size,
            max_sequence_length=max_sequence_length,
            only_unmask_final=only_unmask_final,
            seed=seed,
        )
    return EnergonSFTDataLoader(
        prepared,
        pipeline,
        num_shards=num_logical_shards,
        batch_size=batch_size,
        shuffle=training and data_config.shuffle,
        endless=training,
        seed=seed,
        data_config=data_config,
        identity=identity,
        filler_id=tokenizer.pad_token_id or 0,
        max_batches=None if training else max_batches,
    )

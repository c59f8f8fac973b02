"""The SFT worker: a model worker that also owns the loaders of its replica and publishes their batches.

Rows go from the loader thread into the data plane of this process; the controller gets an envelope without tensors and
sends the meta back as a train call. A few rows of a step may then be computed by another replica, see
`data_plane/leveling`.
"""

import logging
from collections.abc import Mapping
from typing import Any

from nemo_rl.data.energon.prefetch import LoaderThread
from nemo_rl.data.energon.replica import build_replica_loaders
from nemo_rl.data.energon.sft_types import LoadedBatch, LoaderSettings, StepEnvelope
from nemo_rl.data.sft_batch import batch_rows
from nemo_rl.data_plane.column_io import kv_first_write
from nemo_rl.models.engine.config import DATA
from nemo_rl.models.worker import ModelWorker
from nemo_rl.utils.phases import phase

log = logging.getLogger(__name__)

LOAD_TIMEOUT_S = 600.0
"""Longest wait for one batch, in seconds."""


class SFTPolicyWorker(ModelWorker):
    """A `ModelWorker` with the loaders of its replica beside it. Only replica leaders get loader calls."""

    _loader: LoaderThread | None = None
    _batch: LoadedBatch | None = None
    _partition: str | None = None
    _states: Mapping[int, Mapping[str, Any]] | None = None
    _num_batches = 0

    def setup_sft_dataloader(
        self,
        *,
        settings: LoaderSettings,
        shards: tuple[int, ...],
        restored_states: Mapping[int, Mapping[str, Any]] | None = None,
    ) -> bool:
        """Starts the loader thread of this replica's `shards`, continuing from `restored_states` (by shard).

        Returns:
            False on ranks that do not lead their replica, where nothing is started.

        Raises:
            RuntimeError: called twice.
            UserError: the states belong to other data or settings.
        """
        if not self._is_replica_leader():
            return False
        if self._loader is not None:
            raise RuntimeError("the loader of this worker is set up already")

        def build() -> Any:
            return build_replica_loaders(
                data_config=settings.data_config,
                tokenizer=self.tokenizer,
                prepared_train=settings.train,
                prepared_validation=settings.validation,
                shards=shards,
                num_logical_shards=settings.num_logical_shards,
                rows_per_shard=settings.rows_per_shard,
                val_rows_per_shard=settings.val_rows_per_shard,
                max_validation_batches=settings.max_val_batches,
                max_sequence_length=settings.max_sequence_length,
                only_unmask_final=settings.only_unmask_final,
                seed=settings.seed,
                restored_states=restored_states,
            )

        self._loader = LoaderThread(build, depth=settings.data_config.energon.prefetch_factor)
        self._states = dict(restored_states) if restored_states is not None else None
        self._loader.wait_ready(LOAD_TIMEOUT_S)
        return True

    def load_next_sft_batch(self, *, make_sequence_length_divisible_by: int = 1) -> StepEnvelope:
        """Publishes the next training batch, or again the one whose step was aborted.

        Raises:
            RuntimeError: no loader, or a batch is active.
        """
        loader = self._require_loader()
        self._require_no_active_batch()
        with phase("load"):
            if self._batch is None:
                self._batch = loader.next_train(LOAD_TIMEOUT_S)
            return self._publish(self._batch, make_sequence_length_divisible_by)

    def commit_sft_batch(self) -> None:
        """Forgets the active batch: its step is done, and its loader states are the ones to save.

        Raises:
            RuntimeError: no batch is active.
        """
        self._clear_active_batch()
        assert self._batch is not None
        self._states = self._batch.states
        self._batch = None

    def abort_sft_batch(self) -> None:
        """Takes the active batch back, so that the next load gives the same rows; a no-op without one."""
        if self._partition is not None:
            self._clear_active_batch()

    def load_next_validation_batch(self, *, make_sequence_length_divisible_by: int = 1) -> StepEnvelope | None:
        """Publishes the next validation batch; None ends the pass, and the next call starts another.

        Raises:
            RuntimeError: no loader, or a batch is active.
        """
        loader = self._require_loader()
        self._require_no_active_batch()
        batch = loader.next_validation(LOAD_TIMEOUT_S)
        return None if batch is None else self._publish(batch, make_sequence_length_divisible_by)

    def clear_validation_batch(self) -> None:
        """Forgets the active validation batch."""
        self._clear_active_batch()

    def sft_dataloader_state_dict(self) -> dict[int, Mapping[str, Any]]:
        """Loader state by shard, after the last committed batch; JSON values only.

        Raises:
            RuntimeError: a batch is active, or none was ever committed.
        """
        self._require_no_active_batch()
        if self._states is None:
            raise RuntimeError("no batch has been committed yet")
        return dict(self._states)

    def close_sft_dataloader(self) -> None:
        """Ends the loader thread and drops what it holds. May be called twice."""
        self.abort_sft_batch()
        self._batch = None
        if self._loader is not None:
            self._loader.close()
            self._loader = None

    def shutdown(self) -> None:
        """Ends the loader, then leaves the process group."""
        self.close_sft_dataloader()
        super().shutdown()

    def _publish(self, batch: LoadedBatch, multiple: int) -> StepEnvelope:
        logical_rank = self.mesh.coords[DATA]
        partition = f"sft_v2_dp{logical_rank}_batch{self._num_batches}"
        self._num_batches += 1
        columns = batch_rows(batch.rows, self.tokenizer.pad_token_id, multiple)
        lengths = columns["input_lengths"].tolist()
        client = self._require_dp_client()
        client.register_partition(partition, list(columns), len(batch.rows), consumer_tasks=["train"])
        self._partition = partition
        meta = kv_first_write(
            columns,
            sample_ids=[f"{partition}_row{i}" for i in range(len(batch.rows))],
            dp_client=client,
            partition_id=partition,
            task_name="train",
            pad_to_multiple=multiple,
            tags=[{"source_id": row.source_id, "shard": row.shard} for row in batch.rows],
        )
        return StepEnvelope(
            meta=meta,
            logical_rank=logical_rank,
            logical_world_size=self.mesh.size(DATA),
            source_ids=tuple(row.source_id for row in batch.rows),
            field_names=tuple(columns),
            sequence_lengths=tuple(lengths),
            load_seconds=batch.load_seconds,
            valid_tokens=sum(int(row.token_mask[1:].sum()) for row in batch.rows if row.weight),
            dropped=dict(batch.dropped),
            shards=tuple(row.shard for row in batch.rows),
            epoch=batch.epoch,
        )

    def _clear_active_batch(self) -> None:
        if self._partition is None:
            raise RuntimeError("no batch is active")
        self._require_dp_client().clear_samples(None, self._partition)
        self._partition = None

    def _require_loader(self) -> LoaderThread:
        if self._loader is None:
            raise RuntimeError("this worker has no loader; call setup_sft_dataloader first")
        return self._loader

    def _require_no_active_batch(self) -> None:
        if self._partition is not None:
            raise RuntimeError(f"batch {self._partition} is active; commit or abort it first")


SFTMegatronPolicyWorker = SFTPolicyWorker
"""The name under which recipes know the class."""

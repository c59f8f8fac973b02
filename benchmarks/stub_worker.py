"""A worker of an SFT run without a model: it answers the controller's calls with what a real one would send back.

It loads no tensor library, so that many of them start on one machine.
"""

import os
from typing import Any

from nemo_rl.data.energon.sft_types import StepEnvelope
from nemo_rl.data_plane.interfaces import KVBatchMeta

FIELDS = ("input_ids", "input_lengths", "token_mask", "sample_mask")


class StubWorker:
    """Rank and world size come from the environment unless given."""

    def __init__(self, rows: int, rank: int | None = None, world_size: int | None = None):
        self.rows = rows
        self.rank = int(os.environ["RANK"]) if rank is None else rank
        self.world_size = int(os.environ["WORLD_SIZE"]) if world_size is None else world_size

    def load_next_sft_batch(self, make_sequence_length_divisible_by: int = 1) -> StepEnvelope:
        lengths = tuple(64 + (7 * i + self.rank) % 192 for i in range(self.rows))
        partition = f"dp{self.rank}"
        sources = tuple(f"{self.rank}:{i}" for i in range(self.rows))
        meta = KVBatchMeta(
            partition_id=partition,
            task_name="train",
            sample_ids=[f"{partition}_row{i}" for i in range(self.rows)],
            fields=list(FIELDS),
            sequence_lengths=list(lengths),
            extra_info={},
            tags=[{"source_id": source, "shard": self.rank} for source in sources],
        )
        return StepEnvelope(
            meta=meta,
            logical_rank=self.rank,
            logical_world_size=self.world_size,
            source_ids=sources,
            field_names=FIELDS,
            sequence_lengths=lengths,
            load_seconds=0.001,
            valid_tokens=sum(lengths) // 2,
            dropped={},
            shards=(self.rank,) * self.rows,
            epoch=0,
        )

    def commit_sft_batch(self) -> None: ...

    def begin_train_step_presharded(self, **kwargs: Any) -> None: ...

    def train_microbatch_presharded(self, meta: KVBatchMeta) -> None: ...

    def finish_train_step_presharded(self) -> dict[str, Any]:
        metrics = {"num_unmasked_tokens": [100.0] * 4, "num_valid_samples": [8.0] * 4, "lr": [1e-4] * 4}
        return {
            "global_loss": [1.0],
            "grad_norm": 1.0,
            "all_mb_metrics": metrics,
            "skipped": None,
            "rank": self.rank,
            "is_replica_leader": True,
        }

"""The advantage stage: a worker beside the controller that reads rewards and values and writes advantages.

It is a process of its own, so that the controller's holds no tensor. It also keeps the rows of rollouts that wait
when a checkpoint is saved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_rl.algorithms.advantage_estimator import build_advantage_estimator, whiten
from nemo_rl.algorithms.single_controller_utils.requests import (
    AdvantageOutcome,
    AdvantageRequest,
    AdvantageStageConfig,
)
from nemo_rl.data_plane.column_io import read_columns, write_columns
from nemo_rl.data_plane.factory import build_data_plane_client
from nemo_rl.data_plane.interfaces import DataPlaneClient, DataPlaneRuntimeConfig, KVBatchMeta
from nemo_rl.data_plane.row_files import export_rows, import_rows
from nemo_rl.data_plane.schema import (
    ADVANTAGES,
    GENERATION_LOGPROBS,
    MASK_SAMPLE,
    PREV_LOGPROBS,
    PROMPT_IDS_FOR_ADV,
    REFERENCE_POLICY_LOGPROBS,
    RETURNS,
    SAMPLE_MASK,
    TOKEN_MASK,
    TOTAL_REWARD,
    TRUNCATED,
    VALUES,
)
from nemo_rl.distributed.batched_data_dict import BatchedDataDict


@dataclass
class _Chunk:
    meta: KVBatchMeta
    advantages: Tensor
    mask: Tensor
    rewards: Tensor
    errors: Tensor  # |trainer - sampler| per trained token


class AdvantageComputer:
    """Advantages and returns of a step, chunk by chunk, whitened once over all of it."""

    def __init__(self, client: DataPlaneClient, config: AdvantageStageConfig):
        self._client = client
        self._config = config
        self._estimator = build_advantage_estimator(config.estimator_config, config.loss_config)
        self._chunks: list[_Chunk] = []

    def run(self, request: AdvantageRequest) -> AdvantageOutcome:
        """Writes `returns` (where there is a critic) and, at once or with the last chunk, `advantages`.

        `sample_mask` is rewritten where rows are left out.
        """
        config, meta = self._config, request.meta
        # Padded by no token, or a prompt and the same one with an id 0 more would share a baseline.
        rows = read_columns(
            self._client, meta, select_fields=config.input_fields(), pad_value_dict={PROMPT_IDS_FOR_ADV: -1}
        )
        keep, filtered = self._kept(rows)
        # Column 0 has no prediction, so it is never trained.
        mask = (rows[TOKEN_MASK] * keep[:, None]).float()
        mask[:, 0] = 0.0
        advantages, returns = self._estimator.compute_raw(
            rows[PROMPT_IDS_FOR_ADV],
            rows[TOTAL_REWARD].float().reshape(-1),
            mask,
            rows.get(VALUES),
            logprobs_policy=rows.get(PREV_LOGPROBS),
            logprobs_reference=rows.get(REFERENCE_POLICY_LOGPROBS),
            truncated=rows[TRUNCATED].reshape(-1),
        )
        columns: dict[str, Tensor] = {} if returns is None else {RETURNS: returns}
        if filtered:
            columns[SAMPLE_MASK] = keep
        if not self._estimator.normalize_advantages:
            columns[ADVANTAGES] = advantages
        write_columns(self._client, meta, fields=columns)
        errors = torch.zeros(0)
        if config.has_prev_logprobs:
            errors = (rows[PREV_LOGPROBS] - rows[GENERATION_LOGPROBS])[mask != 0].abs()
        self._chunks.append(_Chunk(meta, advantages, mask, rows[TOTAL_REWARD].float().reshape(-1), errors))
        metrics = self.finish() if request.is_last else {}
        return AdvantageOutcome(
            meta=meta.with_fields([ADVANTAGES, *columns]),
            has_valid_training_tokens=bool(mask.any()),
            num_mask_sample_filtered=filtered,
            metrics=metrics,
        )

    def _kept(self, rows: BatchedDataDict) -> tuple[Tensor, dict[str, int]]:
        """The weight of each row after filtering, float32 `[N]`, and how many rows each filter took out."""
        keep = rows[SAMPLE_MASK].float().reshape(-1)
        filters = {"mask_sample": rows[MASK_SAMPLE].reshape(-1).bool()}
        if self._config.overlong_filtering:
            filters["overlong"] = rows[TRUNCATED].reshape(-1).bool()
        if self._config.max_logprob_error is not None:
            mask = rows[TOKEN_MASK].float()
            error = ((rows[PREV_LOGPROBS] - rows[GENERATION_LOGPROBS]).abs().where(mask != 0, 0.0)).sum(1)
            # As "not below", so that NaN is out too.
            filters["logprob_error"] = ~(error / mask.sum(1).clamp(min=1) <= self._config.max_logprob_error)
        counts: dict[str, int] = {}
        for reason, is_out in filters.items():
            count = int((is_out & (keep != 0)).sum())
            if count:
                counts[reason] = count
            keep = keep.where(~is_out, 0.0)
        return keep, counts

    def finish(self) -> dict[str, float]:
        """Whitens the step, writes its advantages and returns its metrics; for a step whose last chunk never came."""
        chunks, self._chunks = self._chunks, []
        kept = torch.cat([chunk.advantages[chunk.mask != 0] for chunk in chunks])
        rewards = torch.cat([chunk.rewards for chunk in chunks])
        # What isn't finite belongs to rows that are left out, or the estimator would have refused it.
        metrics = _moments("advantage", kept) | _moments("reward", rewards[rewards.isfinite()])
        errors = torch.cat([chunk.errors for chunk in chunks])
        if len(errors):
            metrics |= {"logprob_error_mean": float(errors.mean()), "logprob_error_max": float(errors.max())}
        if self._estimator.normalize_advantages:
            white = whiten(kept[None], torch.ones_like(kept)[None])[0].split([int((c.mask != 0).sum()) for c in chunks])
            for chunk, values in zip(chunks, white, strict=True):
                advantages = torch.zeros_like(chunk.advantages)
                advantages[chunk.mask != 0] = values
                write_columns(self._client, chunk.meta, fields={ADVANTAGES: advantages})
        return metrics


class StageWorker:
    """The process of the stage: `AdvantageComputer`, and the rows of rollouts that wait at a save."""

    def __init__(self, config: AdvantageStageConfig, data_plane: DataPlaneRuntimeConfig):
        torch.set_num_threads(1)
        self._client = build_data_plane_client(data_plane, bootstrap=False)
        self._computer = AdvantageComputer(self._client, config)

    def run_advantages(self, request: AdvantageRequest) -> AdvantageOutcome:
        """See `AdvantageComputer.run`."""
        return self._computer.run(request)

    def finish(self) -> dict[str, float]:
        """See `AdvantageComputer.finish`."""
        return self._computer.finish()

    def save_rows(self, sample_ids: Sequence[str], partition_id: str, path: str) -> int:
        """Writes rows to the folder `path`; their number."""
        export_rows(self._client, sample_ids, partition_id, path)
        return len(sample_ids)

    def load_rows(self, path: str) -> int:
        """Puts the rows of `save_rows` into the plane again; their number."""
        return len(import_rows(self._client, path).sample_ids)

    def shutdown(self) -> None:
        """Leaves the plane."""
        self._client.close()


def _moments(name: str, values: Tensor) -> dict[str, float]:
    """Mean, population standard deviation, least and greatest; `{}` of nothing."""
    if not len(values):
        return {}
    wide = values.double()
    return {
        f"{name}_mean": float(wide.mean()),
        f"{name}_std": float(wide.std(correction=0)),
        f"{name}_min": float(wide.min()),
        f"{name}_max": float(wide.max()),
    }

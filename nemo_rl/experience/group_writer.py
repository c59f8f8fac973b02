"""Finished groups -> rows in the data plane and results for the controller."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from nemo_rl.data_plane.codec import nest
from nemo_rl.data_plane.column_io import kv_first_write
from nemo_rl.data_plane.interfaces import DataPlaneClient, KVBatchMeta
from nemo_rl.data_plane.schema import (
    GENERATION_LOGPROBS,
    INPUT_IDS,
    INPUT_LENGTHS,
    MASK_SAMPLE,
    PROMPT_IDS_FOR_ADV,
    SAMPLE_MASK,
    TOKEN_MASK,
    TOTAL_REWARD,
    TRUNCATED,
)
from nemo_rl.experience.episode import Episode, Group
from nemo_rl.experience.interfaces import GroupResult


def write_groups(client: DataPlaneClient, partition_id: str, groups: Sequence[Group]) -> list[GroupResult]:
    """Writes the rows of all groups that are not dropped, with one put, and returns the results in the given order.

    Row `i` of a group is `<group_id>_g<i>`; its tags are `weight_version` (of its first token), `input_lengths`,
    `source_id`, `total_reward`, `response_tokens`, `turns` and `truncated`. When the put fails, no row is left behind
    and the error is passed on.
    """
    ready = [group for group in groups if group.failure is None]
    metas = iter(_write(client, partition_id, ready)) if ready else iter(())
    return [_result(group, None if group.failure is not None else next(metas)) for group in groups]


def rows_to_columns(episodes: Sequence[Episode]) -> dict[str, torch.Tensor]:
    """The columns that a rollout writes, see `schema`; per-token ones and the prompts are jagged."""

    def per_token(row: Callable[[Episode], Sequence[Any]], dtype: torch.dtype) -> torch.Tensor:
        return nest([torch.tensor(row(episode), dtype=dtype) for episode in episodes])

    def per_row(value: Callable[[Episode], Any], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor([value(episode) for episode in episodes], dtype=dtype)

    return {
        INPUT_IDS: per_token(lambda ep: ep.context, torch.int64),
        TOKEN_MASK: per_token(lambda ep: ep.drawn, torch.float32),
        GENERATION_LOGPROBS: per_token(lambda ep: ep.logprobs, torch.float32),
        PROMPT_IDS_FOR_ADV: per_token(lambda ep: ep.prompt.prompt_ids, torch.int64),
        INPUT_LENGTHS: per_row(lambda ep: len(ep.context), torch.int64),
        SAMPLE_MASK: torch.ones(len(episodes)),
        TOTAL_REWARD: per_row(lambda ep: ep.reward, torch.float32),
        TRUNCATED: per_row(lambda ep: ep.truncated, torch.bool),
        MASK_SAMPLE: per_row(lambda ep: ep.response_tokens == 0, torch.bool),
    }


def row_ids(group: Group) -> list[str]:
    """The ids of a group's rows, in the order of its samples."""
    return [f"{group.order.group_id}_g{episode.index}" for episode in group.episodes]


def clear_groups(client: DataPlaneClient, partition_id: str, group_ids: Sequence[str]) -> None:
    """Removes all rows of the groups, however many they have; none is no error."""
    wanted = set(group_ids)
    rows = [row for row in client.list_sample_ids(partition_id) if row.rpartition("_g")[0] in wanted]
    if rows:
        client.clear_samples(rows, partition_id)


def _write(client: DataPlaneClient, partition_id: str, groups: Sequence[Group]) -> list[KVBatchMeta]:
    episodes = [episode for group in groups for episode in group.episodes]
    ids = [row_id for group in groups for row_id in row_ids(group)]
    tags = [
        {
            "weight_version": episode.start_version,
            INPUT_LENGTHS: len(episode.context),
            "source_id": episode.prompt.source_id,
            TOTAL_REWARD: episode.reward,
            "response_tokens": episode.response_tokens,
            "turns": episode.turns,
            TRUNCATED: episode.truncated,
        }
        for episode in episodes
    ]
    try:
        meta = kv_first_write(
            rows_to_columns(episodes), sample_ids=ids, dp_client=client, partition_id=partition_id, tags=tags
        )
    except BaseException:
        client.clear_samples(ids, partition_id)
        raise
    metas, start = [], 0
    for group in groups:
        metas.append(meta.slice(start, start + len(group.episodes)))
        start += len(group.episodes)
    return metas


def _result(group: Group, meta: KVBatchMeta | None) -> GroupResult:
    ready = meta is not None
    return GroupResult(
        group_id=group.order.group_id,
        target_step=group.order.target_step,
        status="ready" if ready else "dropped",
        reason=None if group.failure is None else group.failure.name,
        meta=meta,
        start_version=min(episode.start_version for episode in group.episodes) if ready else -1,
        end_version=max(episode.end_version for episode in group.episodes) if ready else -1,
        samples=tuple(episode.stats() for episode in group.episodes) if ready else (),
        attempts=group.attempts,
        detail=None if group.failure is None else group.failure.detail,
    )

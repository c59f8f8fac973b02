"""What passes between the controller and the rollout workers: orders in, results out. Scalars, ids and metas only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from nemo_rl.data_plane.interfaces import KVBatchMeta


@dataclass(frozen=True)
class GroupOrder:
    """Samples wanted of one prompt.

    Example: `GroupOrder("s000003_p0007", prompt_index=812, num_generations=16, weight_version=3, target_step=3,
    seed=42)`.

    Attributes:
        group_id: names the group and, as `<group_id>_g<i>`, its rows; unique in the run.
        prompt_index: which prompt of the dataset.
        num_generations: samples of the prompt.
        weight_version: version of the weights when the order was given.
        target_step: the step that will train them; None where any may.
        seed: of this group alone; those of its samples, turns and attempts follow from it and from nothing else.
    """

    group_id: str
    prompt_index: int
    num_generations: int
    weight_version: int
    target_step: int | None
    seed: int


@dataclass(frozen=True)
class SampleStats:
    """What the log needs of one sample.

    Attributes:
        reward: sum over its turns.
        response_tokens: drawn tokens, which are the trained ones.
        total_tokens: length of the row: prompt, responses, observations.
        turns: responses.
        truncated: cut at a length limit; an episode that used all its turns is not.
        finish_reason: of the last response.
        env: the environment's metrics, added over the turns.
    """

    reward: float
    response_tokens: int
    total_tokens: int
    turns: int
    truncated: bool
    finish_reason: str
    env: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class GroupResult:
    """What became of an order.

    Attributes:
        status: `ready`: the rows are in the data plane; `dropped`: there are none.
        reason: why it was dropped, by name, see `SampleFailure`.
        meta: the rows, in the order of the samples; None when dropped.
        start_version: oldest weights that drew a first token; -1 when dropped.
        end_version: newest weights that drew a last token; -1 when dropped.
        samples: one per row; empty when dropped.
        attempts: most attempts that one sample took; 1 = nothing failed.
        detail: what happened when it was dropped, one line.
    """

    group_id: str
    target_step: int | None
    status: Literal["ready", "dropped"]
    reason: str | None
    meta: KVBatchMeta | None
    start_version: int
    end_version: int
    samples: tuple[SampleStats, ...]
    attempts: int
    detail: str | None = None


@dataclass(frozen=True)
class SampledAnswer:
    """A sample as a person reads it."""

    prompt: str
    response: str
    reward: float


@dataclass(frozen=True)
class RolloutStatus:
    """How a rollout worker is doing.

    Attributes:
        in_flight: groups in work.
        finished: groups that wait to be collected.
        idle_s: seconds since anything advanced; 0 when nothing is in work.
        version: version of the weights; -1 before the first ones.
        counts: failures since the start by name, `retried_samples` and `dropped_groups`.
    """

    in_flight: int
    finished: int
    idle_s: float
    version: int
    counts: Mapping[str, int]


@dataclass(frozen=True)
class RolloutWorkerInfo:
    """What `initialize` found.

    Attributes:
        train_prompts: usable prompts; `GroupOrder.prompt_index` is below it.
        validation_prompts: the same; 0 without validation data.
        left_out: rows that cannot be used, by reason, of both files.
        train_digest: of the bytes of the training file.
    """

    train_prompts: int
    validation_prompts: int
    left_out: Mapping[str, int]
    train_digest: str

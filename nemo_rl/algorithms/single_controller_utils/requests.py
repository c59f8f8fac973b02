"""What the controller and the advantage stage say to each other. Numbers and metas only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from nemo_rl.data_plane.interfaces import KVBatchMeta
from nemo_rl.data_plane.schema import (
    GENERATION_LOGPROBS,
    MASK_SAMPLE,
    PREV_LOGPROBS,
    PROMPT_IDS_FOR_ADV,
    REFERENCE_POLICY_LOGPROBS,
    SAMPLE_MASK,
    TOKEN_MASK,
    TOTAL_REWARD,
    TRUNCATED,
    VALUES,
)


@dataclass(frozen=True)
class AdvantageStageConfig:
    """What the stage does.

    Attributes:
        estimator_config, loss_config: of `build_advantage_estimator`.
        has_values: there is a critic.
        has_prev_logprobs: the policy's own log-probabilities are there.
        has_reference: those of the reference policy are there.
        overlong_filtering: leave cut samples out.
        max_logprob_error: leave samples out whose mean log-probability error (nats per token) is above this.
    """

    estimator_config: Any
    loss_config: Any
    has_values: bool
    has_prev_logprobs: bool
    has_reference: bool
    overlong_filtering: bool = False
    max_logprob_error: float | None = None

    def input_fields(self) -> list[str]:
        """The columns that the stage reads."""
        fields = [PROMPT_IDS_FOR_ADV, TOTAL_REWARD, TOKEN_MASK, SAMPLE_MASK, MASK_SAMPLE, TRUNCATED]
        wanted = {
            VALUES: self.has_values,
            GENERATION_LOGPROBS: self.has_prev_logprobs,
            PREV_LOGPROBS: self.has_prev_logprobs,
            REFERENCE_POLICY_LOGPROBS: self.has_reference,
        }
        return fields + [name for name, is_wanted in wanted.items() if is_wanted]


@dataclass(frozen=True)
class AdvantageRequest:
    """The rows of a chunk; `is_last` closes the step, whose advantages are whitened together then."""

    meta: KVBatchMeta
    is_last: bool = True


@dataclass(frozen=True)
class AdvantageOutcome:
    """What the stage did, as numbers.

    Attributes:
        meta: the rows with the columns that are there now.
        has_valid_training_tokens: any row of the chunk is trained.
        num_mask_sample_filtered: rows of the chunk that were taken out of training, by reason.
        metrics: of the whole step, on its last chunk.
    """

    meta: KVBatchMeta
    has_valid_training_tokens: bool
    num_mask_sample_filtered: dict[str, int]
    metrics: dict[str, float] = field(default_factory=dict)

"""Names of the columns, and the sets of them that each stage reads.

Every column has exactly one writer, named here; the advantage stage alone rewrites one, `sample_mask`, where it leaves
rows out. Shapes are those of one row; `[T]` means one entry per token of the
row, so that `N` rows read together are `[N, S]`, padded on the right to the width `S`.
"""

from collections.abc import Collection
from typing import Literal

Layout = Literal["padded", "jagged"]

# Written where the row is made: the loader beside the worker (SFT) or the rollout (PPO).
INPUT_IDS = "input_ids"  # int64 [T]
INPUT_LENGTHS = "input_lengths"  # int64 []: T
TOKEN_MASK = "token_mask"  # float32 [T]: 1 where the token may be trained
SAMPLE_MASK = "sample_mask"  # float32 []: weight of the row, 0 for a filler

# Written by the rollout.
GENERATION_LOGPROBS = "generation_logprobs"  # float32 [T]
PROMPT_IDS_FOR_ADV = "prompt_ids_for_adv"  # int64 [prompt length]: rows with the same prompt share a baseline
TOTAL_REWARD = "total_reward"  # float32 []: reward of the whole row
TRUNCATED = "truncated"  # bool []: the response was cut at its limit
MASK_SAMPLE = "mask_sample"  # bool []: leave the row out of training

# Written by the policy: `get_logprobs_from_meta`, `get_reference_policy_logprobs_from_meta`.
PREV_LOGPROBS = "prev_logprobs"  # float32 [T], column 0 is 0
REFERENCE_POLICY_LOGPROBS = "reference_policy_logprobs"  # float32 [T], column 0 is 0

# Written by the critic: `get_values_from_meta`.
VALUES = "values"  # float32 [T]: the estimate before token t, column 0 is 0

# Written by the advantage stage.
ADVANTAGES = "advantages"  # float32 [T]
RETURNS = "returns"  # float32 [T]

LP_SEED_FIELDS = (INPUT_IDS, INPUT_LENGTHS, TOKEN_MASK, SAMPLE_MASK)
VALUE_SEED_FIELDS = LP_SEED_FIELDS
DP_TRAIN_FIELDS = (
    INPUT_IDS,
    INPUT_LENGTHS,
    GENERATION_LOGPROBS,
    PREV_LOGPROBS,
    REFERENCE_POLICY_LOGPROBS,
    ADVANTAGES,
    TOKEN_MASK,
    SAMPLE_MASK,
)
PPO_VALUE_FIELDS = (VALUES, RETURNS)
ROLLOUT_FIELDS = (
    INPUT_IDS,
    INPUT_LENGTHS,
    TOKEN_MASK,
    SAMPLE_MASK,
    GENERATION_LOGPROBS,
    TOTAL_REWARD,
    TRUNCATED,
    MASK_SAMPLE,
    PROMPT_IDS_FOR_ADV,
)
SC_ROLLOUT_SCHEMA_FIELDS = tuple(dict.fromkeys((*ROLLOUT_FIELDS, *DP_TRAIN_FIELDS, *PPO_VALUE_FIELDS)))
DP_VALUE_TRAIN_FIELDS = (*VALUE_SEED_FIELDS, *PPO_VALUE_FIELDS)

# One entry per token: sent without padding and widened together to the width of a step.
TOKEN_ALIGNED_FIELDS: Collection[str] = frozenset(
    {
        INPUT_IDS,
        TOKEN_MASK,
        GENERATION_LOGPROBS,
        PREV_LOGPROBS,
        REFERENCE_POLICY_LOGPROBS,
        VALUES,
        ADVANTAGES,
        RETURNS,
    }
)

# Keys of `KVBatchMeta.extra_info`.
GLOBAL_FORWARD_PAD_SEQLEN = "global_forward_pad_seqlen"  # int, tokens: the width that all ranks pad to
PAD_TO_MULTIPLE = "pad_to_multiple"  # int, tokens: that width is a multiple of this
LOCAL_PARTITION_GENERATION = "local_partition_generation"  # int: which life of a partition name the rows belong to
ROW_MOVES = "row_moves"  # [RowMove, ...]: rows that another replica computes
MICRO_BATCH_INDICES = "micro_batch_indices"  # [[[start, end], ...], ...]: rows of each microbatch, per global batch
MICRO_BATCH_LENGTHS = "micro_batch_lengths"  # [[tokens, ...], ...]: width of each microbatch, per global batch
ELEM_COUNTS_PER_GB = "elem_counts_per_gb"  # [rows, ...]: rows of this rank, per global batch
PACKING_KEYS = (MICRO_BATCH_INDICES, MICRO_BATCH_LENGTHS, ELEM_COUNTS_PER_GB)

"""The advantage stage over an in-process plane, against loops over tokens: chunks, filters, groups, slots that are NaN.

Not covered: KL in the reward, other lambdas and truncation (`test_advantage_estimator.py`), and the stage as a process.
"""

import math
import statistics
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from nemo_rl.algorithms.advantage_config import GAEConfig, GRPOAdvantageConfig
from nemo_rl.algorithms.loss.config import ClippedPGLossConfig
from nemo_rl.algorithms.single_controller_utils.requests import (
    AdvantageOutcome,
    AdvantageRequest,
    AdvantageStageConfig,
)
from nemo_rl.algorithms.single_controller_utils.stages import AdvantageComputer
from nemo_rl.data_plane.adapters.noop import NoOpDataPlaneClient
from nemo_rl.data_plane.codec import nest
from nemo_rl.data_plane.column_io import kv_first_write, read_columns
from nemo_rl.data_plane.interfaces import KVBatchMeta
from nemo_rl.data_plane.schema import SC_ROLLOUT_SCHEMA_FIELDS
from nemo_rl.utils.errors import UserError

PARTITION = "rollouts"
GAMMA, LAMBDA = 0.97, 0.9
NAN = math.nan


class Step:
    """Random rows of uneven length in groups of `size`, with gaps in the mask and NaN wherever nothing is trained.

    Rows 2 and 5 are out (`mask_sample`), rows 3 and 5 truncated, and the sampler's log-probs of row 6 are far off.
    """

    def __init__(self, rows: int = 16, size: int = 4, seed: int = 0):
        generator = torch.Generator().manual_seed(seed)

        def rand(count: int) -> Tensor:
            return torch.randn(count, generator=generator)

        lengths = torch.randint(4, 12, (rows,), generator=generator).tolist()
        self.lengths: list[int] = lengths
        self.masks = [(torch.rand(n, generator=generator) < 0.6).float() for n in lengths]
        for mask in self.masks:
            mask[0] = 1.0  # a column without prediction, whatever the mask says
            mask[2] = 1.0
        self.values = [rand(n) for n in lengths]
        self.prev = [-rand(n).abs() for n in lengths]
        self.generation = [prev + 0.01 * rand(n) for prev, n in zip(self.prev, lengths, strict=True)]
        if rows > 6:
            self.generation[6] = self.prev[6] + 3
        for columns in (self.values, self.prev, self.generation):
            for column, mask in zip(columns, self.masks, strict=True):
                column[mask == 0] = NAN
                column[0] = 0.0
        self.rewards = rand(rows)
        self.sample_mask = torch.ones(rows)
        self.mask_sample = torch.tensor([row in (2, 5) for row in range(rows)])
        self.truncated = torch.tensor([row in (3, 5) for row in range(rows)])
        self.prompts = [torch.tensor([7, row // size]) for row in range(rows)]
        self.client = NoOpDataPlaneClient()

    @property
    def size(self) -> int:
        return len(self.lengths)

    def write(self, **columns: Any) -> KVBatchMeta:
        """The rows in the plane, and their meta."""
        self.client.register_partition(PARTITION, SC_ROLLOUT_SCHEMA_FIELDS, self.size, ["train"])
        lengths = torch.tensor(self.lengths)
        fields = {
            "input_ids": nest([torch.zeros(n, dtype=torch.int64) for n in self.lengths]),
            "input_lengths": lengths,
            "token_mask": nest(self.masks),
            "sample_mask": self.sample_mask,
            "generation_logprobs": nest(self.generation),
            "total_reward": self.rewards,
            "truncated": self.truncated,
            "mask_sample": self.mask_sample,
            "prompt_ids_for_adv": nest(self.prompts),
            "values": nest(self.values),
            "prev_logprobs": nest(self.prev),
            **columns,
        }
        ids = [f"g{row:03d}_g0" for row in range(self.size)]
        return kv_first_write(fields, sample_ids=ids, dp_client=self.client, partition_id=PARTITION)

    def read(self, meta: KVBatchMeta, name: str) -> Tensor:
        return read_columns(self.client, meta, select_fields=[name])[name]


def stage(step: Step, estimator: Any = None, **more: Any) -> AdvantageComputer:
    config = AdvantageStageConfig(
        estimator_config=estimator or GAEConfig(gae_gamma=GAMMA, gae_lambda=LAMBDA),
        loss_config=ClippedPGLossConfig(reference_policy_kl_penalty=0.0),
        has_values=not isinstance(estimator, GRPOAdvantageConfig),
        has_prev_logprobs=True,
        has_reference=False,
    )
    return AdvantageComputer(step.client, replace(config, **more))


def run(computer: AdvantageComputer, meta: KVBatchMeta, sizes: list[int]) -> list[AdvantageOutcome]:
    """The step in chunks of `sizes` rows."""
    outcomes, start = [], 0
    for size in sizes:
        chunk = meta.slice(start, start + size)
        start += size
        outcomes.append(computer.run(AdvantageRequest(chunk, is_last=start == meta.size)))
    assert start == meta.size
    return outcomes


def trained(step: Step, out: set[int]) -> list[list[int]]:
    """Per row, the columns that are trained."""
    return [
        [] if row in out else [t for t in range(1, step.lengths[row]) if step.masks[row][t] == 1]
        for row in range(step.size)
    ]


def slow_gae(step: Step, out: set[int]) -> tuple[dict[tuple[int, int], float], dict[tuple[int, int], float]]:
    advantages, returns = {}, {}
    for row, columns in enumerate(trained(step, out)):
        advantage, next_value = 0.0, 0.0
        for t in reversed(columns):
            reward = float(step.rewards[row]) if t == columns[-1] else 0.0
            value = float(step.values[row][t])
            advantage = reward + GAMMA * next_value - value + GAMMA * LAMBDA * advantage
            advantages[row, t], returns[row, t] = advantage, advantage + value
            next_value = value
    return advantages, returns


def slow_white(advantages: dict[tuple[int, int], float]) -> dict[tuple[int, int], float]:
    mean, std = statistics.fmean(advantages.values()), statistics.pstdev(advantages.values())
    return {at: (value - mean) / std for at, value in advantages.items()}


def assert_column(column: Tensor, expected: dict[tuple[int, int], float], tolerance: float = 1e-5) -> None:
    """The expected numbers where they are given, 0 everywhere else."""
    dense = torch.zeros(column.shape)
    for (row, t), value in expected.items():
        dense[row, t] = value
    assert column.dtype == torch.float32
    torch.testing.assert_close(column, dense, atol=tolerance, rtol=0)


@pytest.mark.parametrize("sizes", [[16], [4, 4, 4, 4], [12, 4], [1, 15], [1] * 16])
@pytest.mark.parametrize("seed", range(3))
def test_chunks_against_a_loop(sizes: list[int], seed: int) -> None:
    step = Step(seed=seed)
    meta = step.write()
    outcomes = run(stage(step), meta, sizes)
    advantages, returns = slow_gae(step, out={2, 5})
    assert_column(step.read(meta, "returns"), returns)
    assert_column(step.read(meta, "advantages"), slow_white(advantages))
    assert [outcome.metrics for outcome in outcomes[:-1]] == [{}] * (len(sizes) - 1)
    assert {"advantages", "returns"} <= set(outcomes[0].meta.fields or ())
    assert [outcome.meta.size for outcome in outcomes] == sizes


@pytest.mark.parametrize("normalize", [True, False])
def test_one_chunk_is_four_chunks(normalize: bool) -> None:
    columns, metrics = [], []
    for sizes in ([16], [4, 4, 4, 4]):
        step = Step()
        meta = step.write()
        config = GAEConfig(gae_gamma=GAMMA, gae_lambda=LAMBDA, normalize_advantages=normalize)
        outcomes = run(stage(step, config, overlong_filtering=True, max_logprob_error=1.0), meta, sizes)
        columns.append([step.read(meta, name) for name in ("advantages", "returns", "sample_mask")])
        metrics.append(outcomes[-1].metrics)
        if not normalize:
            assert_column(columns[-1][0], slow_gae(step, out={2, 3, 5, 6})[0])
    for one, four in zip(*columns, strict=True):
        torch.testing.assert_close(one, four, atol=1e-6, rtol=0)
    assert metrics[0] == pytest.approx(metrics[1], abs=1e-6)


def test_without_whitening_each_chunk_has_its_advantages_at_once() -> None:
    step = Step()
    meta = step.write()
    computer = stage(step, GAEConfig(normalize_advantages=False))
    computer.run(AdvantageRequest(meta.slice(0, 4), is_last=False))
    assert step.read(meta.slice(0, 4), "advantages").abs().sum() > 0
    with_whitening = Step()
    meta = with_whitening.write()
    stage(with_whitening).run(AdvantageRequest(meta.slice(0, 4), is_last=False))
    assert with_whitening.read(meta.slice(0, 4), "returns").abs().sum() > 0
    with pytest.raises(KeyError):
        with_whitening.read(meta.slice(0, 4), "advantages")


def test_a_step_whose_last_chunk_never_comes_is_closed() -> None:
    step = Step()
    meta = step.write()
    computer = stage(step)
    for start in (0, 4):
        computer.run(AdvantageRequest(meta.slice(start, start + 4), is_last=False))
    metrics = computer.finish()
    advantages, _ = slow_gae(step, out={2, 5})
    kept = {at: value for at, value in advantages.items() if at[0] < 8}
    assert_column(step.read(meta.slice(0, 8), "advantages"), slow_white(kept))
    assert metrics["advantage_mean"] == pytest.approx(statistics.fmean(kept.values()), abs=1e-6)


def test_steps_do_not_mix() -> None:
    first, computer = Step(), None
    meta = first.write()
    computer = stage(first)
    computer.run(AdvantageRequest(meta.slice(0, 8), is_last=False))
    computer.finish()
    run(computer, meta, [16])
    expected = first.read(meta, "advantages")
    run(computer, meta, [8, 8])  # the step before left nothing behind
    torch.testing.assert_close(first.read(meta, "advantages"), expected)
    assert_column(expected, slow_white(slow_gae(first, out={2, 5})[0]))


# -- filters ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "out", "counts"),
    [
        ({}, {2, 5}, {"mask_sample": 2}),
        ({"overlong_filtering": True}, {2, 3, 5}, {"mask_sample": 2, "overlong": 1}),
        ({"max_logprob_error": 1.0}, {2, 5, 6}, {"mask_sample": 2, "logprob_error": 1}),
        (
            {"overlong_filtering": True, "max_logprob_error": 1.0},
            {2, 3, 5, 6},
            {"mask_sample": 2, "overlong": 1, "logprob_error": 1},
        ),
    ],
)
def test_filters_rewrite_the_weight_of_rows_and_count_each_row_once(
    options: dict[str, Any], out: set[int], counts: dict[str, int]
) -> None:
    step = Step()
    meta = step.write()
    outcomes = run(stage(step, **options), meta, [16])
    assert outcomes[0].num_mask_sample_filtered == counts
    assert step.read(meta, "sample_mask").tolist() == [float(row not in out) for row in range(16)]
    advantages, returns = slow_gae(step, out)
    assert_column(step.read(meta, "advantages"), slow_white(advantages))
    assert_column(step.read(meta, "returns"), returns)


def test_the_weight_of_rows_is_not_written_where_nothing_is_filtered() -> None:
    step = Step()
    step.mask_sample[:] = False
    meta = step.write()
    [outcome] = run(stage(step, max_logprob_error=100.0), meta, [16])
    assert outcome.num_mask_sample_filtered == {}
    assert "sample_mask" not in (outcome.meta.fields or [])[len(meta.fields or []) :]


def test_rows_that_are_out_already_are_not_counted_again() -> None:
    step = Step()
    step.sample_mask[2] = 0.0
    [outcome] = run(stage(step), step.write(), [16])
    assert outcome.num_mask_sample_filtered == {"mask_sample": 1}


def test_the_error_of_a_row_is_the_mean_over_its_trained_tokens() -> None:
    """At the threshold a row stays, above it the row goes, and so it does when the trainer's log-probs are NaN."""
    step = Step(rows=4)
    step.masks = [torch.tensor([0.0, 1, 1, 0, 1])] * 4
    step.lengths = [5] * 4
    step.mask_sample[:] = False
    step.values = [torch.zeros(5)] * 4
    step.prev = [torch.tensor([0.0, -1.0, -1.0, NAN, -1.0]) for _ in range(4)]
    step.generation = [prev.clone() for prev in step.prev]
    step.generation[0][1] += 1.5  # mean 0.5
    step.generation[1][1] -= 1.75
    step.prev[2][4] = NAN
    meta = step.write()
    [outcome] = run(stage(step, max_logprob_error=0.5), meta, [4])
    assert outcome.num_mask_sample_filtered == {"logprob_error": 2}
    assert step.read(meta, "sample_mask").tolist() == [1.0, 0.0, 0.0, 1.0]
    assert step.read(meta, "advantages").isfinite().all()


# -- nothing to train, nothing finite ---------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [[16], [4, 12]])
@pytest.mark.parametrize("estimator", [GAEConfig(), GRPOAdvantageConfig()], ids=["gae", "grpo"])
def test_a_step_without_trained_tokens(sizes: list[int], estimator: Any) -> None:
    step = Step()
    step.mask_sample[:] = True
    step.rewards[:] = NAN  # as no row counts, none of them matters
    meta = step.write()
    outcomes = run(stage(step, estimator), meta, sizes)
    assert not any(outcome.has_valid_training_tokens for outcome in outcomes)
    assert step.read(meta, "advantages").count_nonzero() == 0
    assert step.read(meta, "sample_mask").count_nonzero() == 0
    assert outcomes[-1].metrics == {}


def test_a_chunk_without_trained_tokens_between_others() -> None:
    step = Step()
    step.mask_sample[4:8] = True
    meta = step.write()
    outcomes = run(stage(step), meta, [4, 4, 8])
    assert [outcome.has_valid_training_tokens for outcome in outcomes] == [True, False, True]
    assert_column(step.read(meta, "advantages"), slow_white(slow_gae(step, out={2, 4, 5, 6, 7})[0]))


def test_a_mask_of_column_0_alone_trains_nothing() -> None:
    step = Step(rows=4)
    for mask in step.masks:
        mask[1:] = 0.0
    [outcome] = run(stage(step), step.write(), [4])
    assert not outcome.has_valid_training_tokens


@pytest.mark.parametrize("value", [NAN, math.inf, -math.inf])
def test_what_stands_in_masked_slots_is_nothing(value: float) -> None:
    clean, dirty = Step(), Step()
    for row in range(16):
        for column in ("values", "prev", "generation"):
            getattr(clean, column)[row].nan_to_num_(0.0)
            slots = getattr(dirty, column)[row]
            slots[slots.isnan()] = value
    dirty.values[2][:] = value  # a row that is out
    dirty.rewards[2] = value
    results = []
    for step in (clean, dirty):
        meta = step.write()
        outcomes = run(stage(step, max_logprob_error=1.0), meta, [8, 8])
        results.append(([step.read(meta, name) for name in ("advantages", "returns", "sample_mask")], outcomes[-1]))
    for one, other in zip(results[0][0], results[1][0], strict=True):
        assert torch.equal(one, other)
    metrics = results[1][1].metrics
    assert all(math.isfinite(number) for number in metrics.values())
    for name in ("advantage_mean", "advantage_std", "logprob_error_mean", "logprob_error_max"):
        assert metrics[name] == results[0][1].metrics[name]


def test_a_reward_that_is_not_finite_is_refused_where_it_counts() -> None:
    step = Step()
    step.rewards[1] = NAN
    with pytest.raises(UserError, match="row 1 has nan"):
        run(stage(step), step.write(), [16])


# -- groups -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [[16], [4, 4, 4, 4], [8, 8]])
@pytest.mark.parametrize("leave_one_out", [True, False])
@pytest.mark.parametrize("divide", [True, False])
def test_groups_against_a_loop(sizes: list[int], leave_one_out: bool, divide: bool) -> None:
    """Rows that are out are no part of their group: its baseline is that of the rows that stay."""
    step = Step()
    meta = step.write()
    config = GRPOAdvantageConfig(normalize_rewards=divide, use_leave_one_out_baseline=leave_one_out)
    outcomes = run(stage(step, config, overlong_filtering=True), meta, sizes)
    out = {2, 3, 5}
    expected = {}
    for row, columns in enumerate(trained(step, out)):
        group = [float(step.rewards[i]) for i in range(row - row % 4, row - row % 4 + 4) if i not in out]
        reward = float(step.rewards[row])
        others = list(group)
        if row not in out:
            others.remove(reward)
        advantage = reward - statistics.fmean(others if leave_one_out else group)
        if divide:
            advantage /= statistics.stdev(group) + 1e-6
        expected |= {(row, t): advantage for t in columns}
    assert_column(step.read(meta, "advantages"), expected)
    assert "returns" not in (outcomes[0].meta.fields or ())
    with pytest.raises(KeyError):
        step.read(meta, "returns")


def test_a_prompt_and_the_same_one_with_a_token_0_more_are_two_groups() -> None:
    step = Step(rows=4, size=2)
    step.mask_sample[:] = False
    step.prompts = [torch.tensor(ids) for ids in ([5, 6], [5, 6], [5, 6, 0], [5, 6, 0])]
    step.rewards = torch.tensor([0.0, 1.0, 10.0, 12.0])
    meta = step.write()
    run(stage(step, GRPOAdvantageConfig(normalize_rewards=False)), meta, [4])
    assert step.read(meta, "advantages")[:, 2].tolist() == [-1.0, 1.0, -2.0, 2.0]


# -- metrics ----------------------------------------------------------------------------------------------------------


def test_the_metrics_of_a_step_are_those_of_all_its_chunks() -> None:
    """Rewards are those of all samples; a filter would else make them look better."""
    step = Step()
    meta = step.write()
    metrics = run(stage(step, overlong_filtering=True), meta, [4, 8, 4])[-1].metrics
    out = {2, 3, 5}
    advantages = list(slow_gae(step, out)[0].values())
    rewards = step.rewards.tolist()
    errors = [
        abs(float(step.prev[row][t] - step.generation[row][t]))
        for row, columns in enumerate(trained(step, out))
        for t in columns
    ]
    expected = {"logprob_error_mean": statistics.fmean(errors), "logprob_error_max": max(errors)}
    for name, numbers in (("advantage", advantages), ("reward", rewards)):
        expected |= {
            f"{name}_mean": statistics.fmean(numbers),
            f"{name}_std": statistics.pstdev(numbers),
            f"{name}_min": min(numbers),
            f"{name}_max": max(numbers),
        }
    assert metrics == pytest.approx(expected, abs=1e-5)


def test_the_stage_reads_what_it_needs_and_no_more() -> None:
    """Neither ids nor, without a critic, values."""
    step = Step()
    meta = step.write()
    read: list[list[str]] = []
    inner = step.client.get_samples

    def get_samples(sample_ids: Any, partition_id: str, select_fields: Any) -> Any:
        read.append(list(select_fields))
        return inner(sample_ids, partition_id, select_fields)

    step.client.get_samples = get_samples  # type: ignore[method-assign]
    run(stage(step, GRPOAdvantageConfig(), has_prev_logprobs=False), meta, [16])
    assert len(read) == 1
    assert set(read[0]) == {
        "prompt_ids_for_adv",
        "total_reward",
        "token_mask",
        "sample_mask",
        "mask_sample",
        "truncated",
    }

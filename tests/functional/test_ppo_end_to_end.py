"""PPO and GRPO through the real parts: TransferQueue, two models, a sampler, one controller.

A step's numbers do not depend on its chunks or on the number of workers, and a resumed run goes on as if it had not
been cut. Not covered: learning (`make demo`, docs/ppo.md), vLLM, kills in the middle of a step, several nodes.
"""

import shutil

import pytest
import torch
from rl_runs import (
    PROMPTS,
    SAMPLES,
    FinishedRun,
    Inputs,
    assert_same_metrics,
    assert_same_weights,
    make_inputs,
    run_rl,
    write_config,
)
from sft_runs import read_lines


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    return make_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def straight(inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    """Four steps on one worker, one chunk each, saved after the second and the fourth."""
    return run_rl(write_config(tmp_path_factory.mktemp("straight"), inputs, logger__profile_steps=[3]))


@pytest.fixture(scope="module")
def chunked(inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    """The same on two workers, each step in four chunks."""
    config = write_config(
        tmp_path_factory.mktemp("chunked"),
        inputs,
        cluster__gpus_per_node=2,
        async_rl__min_groups_for_streaming_train=PROMPTS // 4,
    )
    return run_rl(config)


def test_the_run_trained_policy_and_critic(straight: FinishedRun, inputs: Inputs) -> None:
    summary, metrics = straight.summary, straight.metrics
    assert summary["steps"] == 4 and summary["policy_updates"] == 8
    assert summary["consumed_samples"] == 4 * SAMPLES and summary["dropped"] == {}
    assert [line["step"] for line in metrics] == [1, 2, 3, 4]
    for role in ("policy", "value"):
        before, after = straight.weights(2, role), straight.weights(4, role)
        assert all(not torch.equal(before[name], after[name]) for name in before)


def test_no_column_went_through_the_controller(straight: FinishedRun) -> None:
    assert straight.summary["controller_column_bytes"] == 0


def test_the_sampler_draws_with_the_trainer_s_weights(straight: FinishedRun) -> None:
    """Every step's samples are drawn after a hand-over: the two sides' log-probabilities agree."""
    for line in straight.metrics:
        assert line["logprob_error_max"] < 1e-3
        assert line["staleness_max"] == 0


def test_no_row_is_left_in_the_plane_after_a_step(straight: FinishedRun, chunked: FinishedRun) -> None:
    for run in (straight, chunked):
        assert [line["rows_in_plane"] for line in run.metrics] == [0, 0, 0, 0]


def test_a_profiled_step_says_where_the_time_of_both_models_went(straight: FinishedRun) -> None:
    lines = read_lines(straight.config.parent / "logs" / "profile.jsonl")
    assert [(line["step"], line["role"]) for line in lines] == [(3, "policy"), (3, "value")]
    took = straight.metrics[2]["total_step_time"]
    for line in lines:
        (seconds,) = line["ranks"]
        assert {"fetch", "inference", "write back", "forward layers", "backward", "optimizer"} <= seconds.keys()
        assert took < sum(seconds.values()) < took + 5, "the step, and what was written and drawn around it"


def test_weights_carry_a_version_that_rises_by_one(straight: FinishedRun) -> None:
    versions = [(line["step"], line["version"]) for line in straight.rollouts]
    assert all(step == version for step, version in versions)
    assert {version for _, version in versions} == {0, 1, 2, 3}


def test_chunks_and_workers_change_nothing(straight: FinishedRun, chunked: FinishedRun) -> None:
    assert_same_metrics(chunked.metrics, straight.metrics, rel=1e-4)
    assert [line["response"] for line in chunked.rollouts] == [line["response"] for line in straight.rollouts]
    for role in ("policy", "value"):
        assert_same_weights(chunked.weights(2, role), straight.weights(2, role), atol=1e-5)


def test_a_resumed_run_goes_on_as_if_it_had_not_been_cut(straight: FinishedRun, inputs: Inputs, tmp_path) -> None:
    config = write_config(tmp_path, inputs)
    saved = straight.config.parent / "checkpoints" / "step_2"
    shutil.copytree(saved, tmp_path / "checkpoints" / "step_2")
    resumed = run_rl(config)
    assert_same_metrics(resumed.metrics, straight.metrics[2:], rel=1e-5)
    for name in ("steps", "policy_updates", "consumed_samples"):
        assert resumed.summary[name] == straight.summary[name]
    assert [line["response"] for line in resumed.rollouts] == [
        line["response"] for line in straight.rollouts if line["step"] >= 2
    ]


@pytest.mark.slow
def test_grpo_runs_without_a_critic(inputs: Inputs, tmp_path) -> None:
    run = run_rl(write_config(tmp_path, inputs, algorithm="grpo", grpo__max_num_steps=2))
    assert run.summary["steps"] == 2 and run.summary["policy_updates"] == 4
    assert not any(name.startswith("critic/") for line in run.metrics for name in line)
    assert not (tmp_path / "checkpoints" / "step_2" / "value").exists()


@pytest.mark.slow
def test_the_policy_waits_while_the_critic_warms_up(inputs: Inputs, tmp_path) -> None:
    run = run_rl(
        write_config(tmp_path, inputs, ppo__max_num_steps=2, ppo__policy_training_start_step=1, ppo__ppo_epochs=1)
    )
    assert run.summary["policy_updates"] == 1
    first, second = run.metrics
    assert "loss" not in first and "loss" in second
    assert first["critic/loss"] > 0

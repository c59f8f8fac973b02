"""Configs of PPO and GRPO runs: defaults, what contradicts what, and how unknown names are told.

Not covered: the arguments of torch's classes, and what only files can tell (`tests/unit/cli/test_check_ppo.py`).
"""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from unit.algorithms.good_rl_config import change, checked, grpo_sections, ppo_config, ppo_sections

from nemo_rl.algorithms.grpo import GRPOConfig
from nemo_rl.algorithms.ppo import PPOConfig
from nemo_rl.algorithms.single_controller_utils.config import (
    AsyncRLConfig,
    algo_config,
    groups_per_chunk,
    is_ppo_run,
    needs_prev_logprobs,
    needs_reference,
    read_single_controller_config,
    validate_single_controller_config,
)
from nemo_rl.utils.errors import ConfigError

BOTH = pytest.mark.parametrize("sections", [ppo_sections, grpo_sections], ids=["ppo", "grpo"])


def problems_of(sections: dict[str, Any], *changes: tuple[str, Any]) -> list[str]:
    for key, value in changes:
        change(sections, key, value)
    return validate_single_controller_config(checked(sections))


def complaints(sections: dict[str, Any], *changes: tuple[str, Any]) -> list[str]:
    """What the models themselves refuse."""
    for key, value in changes:
        change(sections, key, value)
    with pytest.raises(ConfigError) as info:
        checked(sections)
    return info.value.problems


@BOTH
def test_good_configs_have_no_problem(sections: Any) -> None:
    assert problems_of(sections()) == []


def test_the_example_has_no_problem() -> None:
    path = Path(__file__).parents[3] / "examples/configs/ppo_sums.yaml"
    config = read_single_controller_config(path)
    assert is_ppo_run(config)
    assert needs_prev_logprobs(config)
    assert not needs_reference(config)


def test_the_example_without_a_critic_has_no_problem() -> None:
    path = Path(__file__).parents[3] / "examples/configs/grpo_sums.yaml"
    assert not is_ppo_run(read_single_controller_config(path))


def test_defaults() -> None:
    ppo, grpo, rl = PPOConfig(), GRPOConfig(), AsyncRLConfig()
    for one in (ppo, grpo):
        assert (one.num_prompts_per_step, one.num_generations_per_prompt) == (32, 16)
        assert (one.max_num_steps, one.max_num_epochs, one.max_rollout_turns, one.seed) == (100000, 100000, None, 42)
        assert (one.overlong_filtering, one.skip_reference_policy_logprobs_calculation) == (False, None)
        assert one.seq_logprob_error_threshold is None
        assert (one.val_batch_size, one.max_val_samples) == (256, 256)
    assert (ppo.ppo_epochs, ppo.critic_ppo_epochs, ppo.critic_epochs, ppo.policy_training_start_step) == (4, None, 4, 0)
    assert PPOConfig(ppo_epochs=2, critic_ppo_epochs=3).critic_epochs == 3
    assert (ppo.adv_estimator.name, ppo.adv_estimator.gae_lambda, ppo.adv_estimator.gae_gamma) == ("gae", 0.95, 1.0)
    assert (grpo.grpo_epochs, grpo.adv_estimator.name) == (1, "grpo")
    assert (rl.sampler.name, rl.sampler.get("max_lookahead_versions")) == ("in_order", 0)
    watchdog, rule = rl.stall_watchdog, rl.rollout_failure
    assert (watchdog.interval_s, watchdog.stall_timeout_s, watchdog.stall_action) == (30, 600, "abort")
    assert (rule.max_skipped_prompts, rule.min_step_batch_fraction, rule.on_dropped_prompt) == (0, 0.9, "shrink")
    assert (rl.min_groups_for_streaming_train, rl.max_inflight_prompts, rl.max_buffered_rollouts) == (None, None, None)


def test_what_a_config_says_about_its_run() -> None:
    ppo, grpo = checked(ppo_sections()), checked(grpo_sections())
    assert (is_ppo_run(ppo), is_ppo_run(grpo)) == (True, False)
    assert (algo_config(ppo), algo_config(grpo)) == (ppo.ppo, grpo.grpo)
    assert groups_per_chunk(ppo) == 4
    assert groups_per_chunk(ppo_config(async_rl__min_groups_for_streaming_train=3)) == 3
    assert needs_prev_logprobs(ppo)
    forced = ppo_config(loss_fn__force_on_policy_ratio=True)
    assert not needs_prev_logprobs(forced)
    assert needs_prev_logprobs(ppo_config(loss_fn__force_on_policy_ratio=True, ppo__seq_logprob_error_threshold=0.1))
    assert needs_reference(ppo_config(loss_fn__reference_policy_kl_penalty=0.1))
    # A penalty of 0 compares with nothing, in the reward as in the loss.
    assert not needs_reference(ppo_config(loss_fn__use_kl_in_reward=True))


# -- one algorithm ----------------------------------------------------------------------------------------------------


def test_there_is_one_algorithm_and_ppo_has_a_critic() -> None:
    both = ppo_sections() | {"grpo": {}}
    assert any("exactly one of the sections ppo and grpo" in line for line in complaints(both))
    neither = ppo_sections()
    del neither["ppo"]
    assert any("exactly one of the sections ppo and grpo" in line for line in complaints(neither))
    headless = ppo_sections()
    del headless["value"]
    assert any("ppo needs the section value" in line for line in complaints(headless))
    for name in ("value", "value_loss_fn"):
        assert any("grpo has no critic" in line for line in complaints(grpo_sections() | {name: ppo_sections()[name]}))


def test_the_loss_of_the_critic_has_a_default() -> None:
    sections = ppo_sections()
    del sections["value_loss_fn"]
    assert problems_of(sections) == []


# -- sections that contradict each other ------------------------------------------------------------------------------

# What is changed, and the beginning of the one line about it; `{}` stands for ppo or grpo.
CONTRADICTIONS: list[tuple[list[tuple[str, Any]], str]] = [
    ([("policy.train_global_batch_size", 6)], "policy.train_global_batch_size: 6 is not the 8 samples of a step"),
    ([("async_rl.min_groups_for_streaming_train", 5)], "async_rl.min_groups_for_streaming_train: 5 is above {}.num_pr"),
    (
        [("loss_fn.reference_policy_kl_penalty", 0.5), ("{}.skip_reference_policy_logprobs_calculation", True)],
        "loss_fn.reference_policy_kl_penalty: 0.5 needs reference",
    ),
    (
        [("loss_fn.force_on_policy_ratio", True), ("{0}.{0}_epochs", 2)],
        "loss_fn.force_on_policy_ratio: true is for one update per step, {0}.{0}_epochs is 2",
    ),
    ([("async_rl.sampler", {"name": "ready_first"})], "async_rl.sampler.name: ready_first trains old samples"),
    (
        [
            ("async_rl.sampler", {"name": "ready_first"}),
            ("loss_fn.use_importance_sampling_correction", True),
            ("loss_fn.force_on_policy_ratio", True),
            ("{0}.{0}_epochs", 1),
        ],
        "async_rl.sampler.name: ready_first trains old samples",
    ),
    (
        [("checkpointing.metric_name", "val:val_reward"), ("checkpointing.higher_is_better", True)],
        "checkpointing.metric_name: val:val_reward needs data.validation",
    ),
    ([("policy.generation.workers", 2)], "policy.generation.workers: 2 rollout workers share the places of 1 workers"),
    ([("policy.generation.max_new_tokens", 64)], "policy.generation.max_new_tokens: 64 leaves no room for a prompt"),
    ([("async_rl.max_buffered_rollouts", 3)], "async_rl.max_buffered_rollouts: 3 is below the 4 prompts that"),
    (
        [("async_rl.max_buffered_rollouts", 11), ("async_rl.sampler", {"max_lookahead_versions": 2})],
        "async_rl.max_buffered_rollouts: 11 is below the 12 prompts that the sampler in_order needs",
    ),
    (
        [
            ("async_rl.sampler", {"name": "windowed"}),
            ("async_rl.rollout_failure", {"max_skipped_prompts": 1}),
        ],
        "async_rl.rollout_failure.max_skipped_prompts: 1 makes steps smaller, and the sampler windowed orders for no",
    ),
    (
        [("async_rl.sampler", {"name": "custom", "target": "nowhere:It"})],
        "async_rl.sampler.target: nowhere:It can't be",
    ),
    ([("{}.val_period", 5)], "{}.val_period: 5 needs data.validation"),
    ([("{}.val_at_start", True)], "{}.val_at_start: True needs data.validation"),
    ([("{}.val_at_end", True)], "{}.val_at_end: True needs data.validation"),
]


@BOTH
@pytest.mark.parametrize(("changes", "line"), CONTRADICTIONS)
def test_contradictions_are_told_in_one_line_each(sections: Any, changes: list[tuple[str, Any]], line: str) -> None:
    good = sections()
    section = "ppo" if "ppo" in good else "grpo"
    [problem] = problems_of(good, *((key.format(section), value) for key, value in changes))
    assert problem.startswith(line.format(section))


def test_contradictions_of_ppo_alone() -> None:
    [line] = problems_of(ppo_sections(), ("value.train_global_batch_size", 4))
    assert line.startswith("value.train_global_batch_size: 4 is not the 8 samples")
    [line] = problems_of(ppo_sections(), ("value.max_total_sequence_length", 32))
    assert line.startswith("value.max_total_sequence_length: 32 is below that of the policy, 64")
    [line] = problems_of(ppo_sections(), ("ppo.adv_estimator", {"name": "raw_reward"}))
    assert line.startswith("ppo.adv_estimator.name: raw_reward gives no returns")


def test_contradictions_of_grpo_alone() -> None:
    changes = [
        ("loss_fn.use_kl_in_reward", True),
        ("loss_fn.reference_policy_kl_penalty", 0.1),
        ("grpo.skip_reference_policy_logprobs_calculation", False),
    ]
    [line] = problems_of(grpo_sections(), *changes)
    assert line.startswith("loss_fn.use_kl_in_reward: true needs token rewards")
    assert problems_of(grpo_sections(), changes[0]) == []


def test_all_contradictions_are_told_at_once() -> None:
    changes = [
        ("policy.train_global_batch_size", 6),
        ("value.train_global_batch_size", 7),
        ("async_rl.min_groups_for_streaming_train", 5),
        ("loss_fn.reference_policy_kl_penalty", 0.5),
        ("ppo.skip_reference_policy_logprobs_calculation", True),
        ("policy.generation.max_new_tokens", 100),
        ("ppo.val_period", 5),
    ]
    assert len(problems_of(ppo_sections(), *changes)) == 6


@BOTH
@pytest.mark.parametrize(
    "changes",
    [
        [("async_rl.min_groups_for_streaming_train", 1)],
        [("async_rl.sampler", {"name": "ready_first"}), ("loss_fn.use_importance_sampling_correction", True)],
        [("async_rl.sampler", {"name": "windowed", "max_staleness_versions": 3, "sample_freshest_first": True})],
        [("async_rl.sampler", {"name": "weight_fifo"}), ("async_rl.max_buffered_rollouts", 8)],
        [("async_rl.rollout_failure", {"max_skipped_prompts": 3})],
        [("async_rl.sampler", {"name": "windowed"}), ("async_rl.rollout_failure", {"on_dropped_prompt": "replace"})],
        [("data.validation", {"path": "v.jsonl", "template": "text"}), ("{}.val_period", 5), ("{}.val_at_end", True)],
        [("loss_fn.reference_policy_kl_penalty", 0.5), ("{}.skip_reference_policy_logprobs_calculation", False)],
        [("loss_fn.reference_policy_kl_penalty", 0.5)],
        [("checkpointing.metric_name", "train:reward_mean"), ("checkpointing.higher_is_better", True)],
        [("cluster", {"gpus_per_node": 2, "num_nodes": 2}), ("policy.generation.workers", 4)],
    ],
)
def test_what_fits_together_is_taken(sections: Any, changes: list[tuple[str, Any]]) -> None:
    good = sections()
    section = "ppo" if "ppo" in good else "grpo"
    assert problems_of(good, *((key.format(section), value) for key, value in changes)) == []


# -- names and values -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("ppo.ppo_epoch", "ppo_epochs"),
        ("ppo.num_prompt_per_step", "num_prompts_per_step"),
        ("ppo.adv_estimator.gae_lamda", "gae_lambda"),
        ("value.optimiser", "optimizer"),
        ("value_loss_fn.clip_range", "cliprange"),
        ("loss_fn.ratio_clip_mn", "ratio_clip_min"),
        ("async_rl.max_inflight_prompt", "max_inflight_prompts"),
        ("async_rl.sampler.max_lookahead_version", "unknown key"),
        ("async_rl.rollout_failure.max_skiped_prompts", "max_skipped_prompts"),
        ("async_rl.stall_watchdog.interval", "interval_s"),
        ("policy.generation.max_new_token", "max_new_tokens"),
        ("env.patern", "unknown key"),
        ("data.train.promt_field", "prompt_field"),
        ("data_plane.simple.storage_capasity", "storage_capacity"),
        ("critic", "unknown key"),
    ],
)
def test_an_unknown_key_is_told_with_the_nearest_name(key: str, nearest: str) -> None:
    lines = [line for line in complaints(ppo_sections(), (key, 1)) if re.match(rf"{re.escape(key)}\b", line)]
    assert len(lines) == 1
    assert nearest in lines[0]


@pytest.mark.parametrize("name", ["in_ordr", "fifo", "", 3])
def test_a_wrong_sampler_is_told_with_the_names_that_there_are(name: Any) -> None:
    [line] = complaints(ppo_sections(), ("async_rl.sampler", {"name": name}))
    assert line.startswith("async_rl.sampler")
    assert "in_order, windowed, ready_first, weight_fifo, custom" in line


def test_a_key_of_another_sampler_is_unknown() -> None:
    lines = complaints(ppo_sections(), ("async_rl.sampler", {"name": "windowed", "max_lookahead_versions": 1}))
    assert any("max_lookahead_versions" in line for line in lines)


def test_a_sampler_of_the_user_takes_any_keys() -> None:
    config = ppo_config(async_rl__sampler={"name": "custom", "target": "a.b:C", "depth": 3, "names": ["x"]})
    assert config.async_rl.sampler.name == "custom"
    assert config.async_rl.sampler.options() == {"depth": 3, "names": ["x"]}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("ppo.num_prompts_per_step", 0),
        ("ppo.num_generations_per_prompt", 0),
        ("ppo.ppo_epochs", 0),
        ("ppo.critic_ppo_epochs", 0),
        ("ppo.policy_training_start_step", -1),
        ("ppo.max_num_steps", 0),
        ("ppo.max_num_epochs", 0),
        ("ppo.seed", 2**32),
        ("ppo.seed", -1),
        ("ppo.seq_logprob_error_threshold", 0.0),
        ("ppo.ppo_epochs", 1.5),
        ("ppo.ppo_epochs", True),
        ("ppo.adv_estimator.gae_lambda", 1.01),
        ("ppo.adv_estimator.name", "gaa"),
        ("value_loss_fn.scale", 0.0),
        ("async_rl.sampler.max_lookahead_versions", -1),
        ("async_rl.min_groups_for_streaming_train", 0),
        ("async_rl.max_inflight_prompts", 0),
        ("async_rl.stall_watchdog.interval_s", 0),
        ("async_rl.stall_watchdog.stall_action", "panic"),
        ("async_rl.rollout_failure.min_step_batch_fraction", 0.0),
        ("async_rl.rollout_failure.min_step_batch_fraction", 1.1),
        ("async_rl.rollout_failure.on_dropped_prompt", "retry"),
        ("policy.generation.backend", "tgi"),
        ("policy.generation.temperature", -0.1),
        ("policy.generation.top_p", 0.0),
        ("data_plane.impl", "local"),
        ("data_plane.backend", "redis"),
        ("checkpointing.save_period", 0),
        ("value.value_head_init", "one"),
    ],
)
def test_a_value_out_of_range_is_told_with_its_key(key: str, value: Any) -> None:
    lines = complaints(ppo_sections(), (key, value))
    assert any(line.startswith(key) for line in lines), lines


def test_a_watchdog_that_looks_too_seldom_is_refused() -> None:
    lines = complaints(ppo_sections(), ("async_rl.stall_watchdog", {"interval_s": 60, "stall_timeout_s": 60}))
    assert any("stall_timeout_s must be above interval_s" in line for line in lines)


def test_replacing_without_a_reserve_is_refused() -> None:
    rule = {"on_dropped_prompt": "replace", "max_replacement_attempts": 0}
    lines = complaints(ppo_sections(), ("async_rl.rollout_failure", rule))
    assert any("max_replacement_attempts" in line for line in lines)


def test_a_file_with_overrides_is_read_and_checked_as_a_whole(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(ppo_sections()))
    config = read_single_controller_config(file, ["ppo.ppo_epochs=3", "async_rl.sampler.max_lookahead_versions=1"])
    assert config.ppo is not None
    assert (config.ppo.ppo_epochs, config.async_rl.sampler.get("max_lookahead_versions")) == (3, 1)
    with pytest.raises(ConfigError) as info:
        read_single_controller_config(file, ["ppo.num_prompts_per_step=3", "ppo.val_period=2"])
    assert [line.split(":")[0] for line in info.value.problems] == [
        "policy.train_global_batch_size",
        "value.train_global_batch_size",
        "ppo.val_period",
    ]

"""`onehop check` on PPO and GRPO configs: what would run, and every problem in one line, with nothing started.

Not covered: contradictions inside a config (`tests/unit/algorithms/test_ppo_config.py`), and resuming.
"""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import ray
import yaml
from tiny import make_model_dir
from unit.algorithms.good_rl_config import change, grpo_sections, ppo_sections

from nemo_rl.cli.main import EXIT_BAD_INPUT, main


@pytest.fixture(autouse=True)
def _nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*_: object, **__: object) -> None:
        raise AssertionError("a run is about to start")

    monkeypatch.setattr("nemo_rl.algorithms.drive.init_ray", start)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def write_prompts(path: Path, count: int, *, first: int = 0, **more: Any) -> Path:
    rows = [{"prompt": f"{n}+{n}=", "answer": str(2 * n), **more} for n in range(first, first + count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    work = tmp_path_factory.mktemp("inputs")
    return {
        "model": str(make_model_dir(work / "model")),
        "prompts": str(write_prompts(work / "prompts.jsonl", 13)),
    }


def check(
    sections: dict[str, Any], folder: Path, capfd: pytest.CaptureFixture[str], *overrides: str
) -> tuple[int, dict[str, str], list[str]]:
    """Exit code, facts and error lines of `check`; refuses a config exactly as `ppo` does."""
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(sections))
    code = main(["check", str(file), *overrides])
    out, err = capfd.readouterr()
    assert not ray.is_initialized()
    assert "Traceback" not in err
    errors = [line.removeprefix("error: ") for line in err.splitlines() if line.startswith("error: ")]
    if code == EXIT_BAD_INPUT:
        assert out == ""
        assert main(["ppo", "--config", str(file), *overrides]) == EXIT_BAD_INPUT
        again = capfd.readouterr().err
        assert [line.removeprefix("error: ") for line in again.splitlines() if line.startswith("error: ")] == errors
    facts: dict[str, str] = {}
    name = ""
    for line in out.splitlines():
        # A long value goes on in the next line, under itself.
        label, rest = (line[:14].strip(), line.strip()) if line.startswith(" " * 14) else ("", line.strip())
        if not label:
            parts = rest.split("  ", 1)
            if len(parts) == 2:
                name, rest = parts[0], parts[1].strip()
                facts[name] = rest
                continue
        facts[name] = f"{facts.get(name, '')} {rest}".strip()
    return code, facts, errors


def test_what_a_ppo_run_would_do(
    inputs: dict[str, str], tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    validation = write_prompts(tmp_path / "val.jsonl", 5, first=50)
    sections = ppo_sections(**inputs, out=str(tmp_path / "out"))
    change(sections, "data.validation", {"path": str(validation), "template": "text"})
    change(sections, "ppo.max_num_epochs", 2)
    change(sections, "async_rl.min_groups_for_streaming_train", 3)
    code, facts, errors = check(sections, tmp_path, capfd)
    assert (code, errors) == (0, [])
    assert facts["algorithm"] == "PPO with a critic"
    assert facts["policy"] == f"{inputs['model']}, precision float32"
    assert facts["critic"] == f"{inputs['model']}, precision float32"
    assert facts["training"] == f"13 prompts of {inputs['prompts']}"
    assert facts["validation"] == f"5 prompts of {validation}"
    # 26 prompts in two passes, 4 a step, in chunks of 3 and 1
    assert facts["steps"] == "6 of 4 prompts x 2 samples, in 2 chunk(s)"
    assert facts["samples"] == "up to 8 tokens by 1 hf worker(s)"
    assert facts["reward"] == "exact_match"
    assert facts["checkpoints"] == f"none in {tmp_path}/out/checkpoints yet"
    assert not (tmp_path / "out").exists()


def test_what_a_grpo_run_would_do(inputs: dict[str, str], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    sections = grpo_sections(**inputs, out=str(tmp_path / "out"))
    code, facts, errors = check(sections, tmp_path, capfd, "checkpointing.enabled=false", "grpo.max_num_steps=2")
    assert (code, errors) == (0, [])
    assert facts["algorithm"] == "GRPO"
    assert facts["steps"].startswith("2 of 4 prompts x 2 samples, in 1 chunk(s)")
    assert not {"critic", "validation", "checkpoints"} & set(facts)


def test_prompts_that_are_left_out_are_counted(
    inputs: dict[str, str], tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    prompts = write_prompts(tmp_path / "prompts.jsonl", 6)
    with prompts.open("a") as file:
        file.write('{"prompt": "no answer"}\n{"prompt": "' + 100 * "x" + '", "answer": "1"}\nnot json\n')
    sections = ppo_sections(inputs["model"], str(prompts), str(tmp_path / "out"))
    code, facts, errors = check(sections, tmp_path, capfd)
    assert (code, errors) == (0, [])
    assert facts["training"] == f"6 prompts of {prompts}; left out: 1 bad_line, 1 no_gold, 1 overlong"


@pytest.mark.parametrize(
    ("key", "value", "line"),
    [
        ("policy.model_name", "no/such/model", "policy.model_name"),
        ("value.model_name", "no/such/model", "value.model_name"),
        ("policy.optimizer.name", "torch.optim.Adamw", "policy.optimizer.name"),
        ("value.optimizer.kwargs.lr", -1.0, "value.optimizer.kwargs"),
        ("value.hf_config_overrides", {"attention_dropout": "much"}, "value.hf_config_overrides"),
        ("data.train.path", "nowhere.jsonl", "data.train.path: nowhere.jsonl does not exist"),
        ("data.validation", {"path": "nowhere.jsonl", "template": "text"}, "data.validation.path: nowhere.jsonl"),
        ("ppo.num_prompts_per_step", 14, None),
        ("env", {"name": "python", "function": "nowhere.reward"}, "env.function"),
        ("env", {"name": "exact_match", "pattern": "("}, "env.pattern"),
        ("ppo.ppo_epoch", 2, "ppo.ppo_epoch: unknown key, did you mean ppo.ppo_epochs?"),
        ("async_rl.sampler", {"name": "in_ordr"}, "async_rl.sampler"),
        ("async_rl.max_buffered_rollouts", 2, "async_rl.max_buffered_rollouts: 2 is below the 4 prompts"),
        ("cluster.num_nodes", 2, "cluster."),
        ("checkpointing.metric_name", "reward", "checkpointing.metric_name"),
    ],
)
def test_a_problem_is_told_with_its_key(
    inputs: dict[str, str], tmp_path: Path, capfd: pytest.CaptureFixture[str], key: str, value: Any, line: str | None
) -> None:
    sections = change(ppo_sections(**inputs, out=str(tmp_path / "out")), key, value)
    if line is None:  # batch sizes that fit, and fewer prompts than a step wants
        for name in ("policy", "value"):
            change(sections, f"{name}.train_global_batch_size", 28)
        change(sections, "ppo.max_num_epochs", 1)
        line = "data.train.path: 13 prompts are fewer than the 14 of a step"
    code, _, errors = check(sections, tmp_path, capfd)
    assert code == EXIT_BAD_INPUT
    assert len(errors) == 1, errors
    assert errors[0].startswith(line)
    assert not (tmp_path / "out").exists()


def test_problems_of_models_prompts_and_reward_are_told_together(
    inputs: dict[str, str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    sections = ppo_sections(**inputs, out=str(tmp_path / "out"))
    change(sections, "value.model_name", "no/such/model")
    change(sections, "data.train.path", "nowhere.jsonl")
    change(sections, "value.optimizer.kwargs.lr", -1.0)
    code, _, errors = check(sections, tmp_path, capfd)
    assert code == EXIT_BAD_INPUT
    assert len(errors) == 3
    for start in ("value.model_name", "data.train.path", "value.optimizer.kwargs"):
        assert any(line.startswith(start) for line in errors)


def test_a_checkpoint_that_is_none_is_told(
    inputs: dict[str, str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    sections = ppo_sections(**inputs, out=str(tmp_path / "out"))
    step = tmp_path / "out/checkpoints/step_3"
    step.mkdir(parents=True)
    (step / "training_info.json").write_text(json.dumps({"total_steps": 3}))
    code, _, errors = check(sections, tmp_path, capfd)
    assert code == EXIT_BAD_INPUT
    assert len(errors) == 1
    assert "step_3" in errors[0]
    code, facts, errors = check(sections, tmp_path, capfd, "checkpointing.start_fresh=true")
    assert (code, errors) == (0, [])
    assert facts["checkpoints"].startswith("starts at step 0")
    assert step.exists()


def test_a_schedule_of_the_critic_has_as_many_ticks_as_its_updates(
    inputs: dict[str, str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A decay over the run must be longer than its warm-up: 10 steps of 2 critic epochs are 20 updates."""
    sections = ppo_sections(**inputs, out=str(tmp_path / "out"))
    change(sections, "ppo.critic_ppo_epochs", 2)
    change(sections, "ppo.ppo_epochs", 5)
    change(sections, "ppo.policy_training_start_step", 6)
    for name, warmup in (("policy", 19), ("value", 19)):
        megatron = {
            "enabled": True,
            "optimizer": {"lr": 0.001},
            "scheduler": {"lr_decay_style": "linear", "lr_warmup_iters": warmup},
        }
        change(sections, f"{name}.megatron_cfg", megatron)
    assert check(copy.deepcopy(sections), tmp_path, capfd)[::2] == (0, [])
    for name in ("policy", "value"):  # 4 trained steps of 5 policy epochs are 20 updates too
        changed = change(copy.deepcopy(sections), f"{name}.megatron_cfg.scheduler.lr_warmup_iters", 20)
        code, _, errors = check(changed, tmp_path, capfd)
        assert code == EXIT_BAD_INPUT
        assert len(errors) == 1
        assert errors[0].startswith(f"{name}.megatron_cfg.scheduler.lr_decay_iters")


def test_a_config_of_neither_kind_is_an_sft_config(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("policy: {}\n")
    assert main(["check", str(file)]) == EXIT_BAD_INPUT
    assert "sft: missing" in capfd.readouterr().err

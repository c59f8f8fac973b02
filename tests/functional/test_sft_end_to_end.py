"""One run from its YAML file to a model that transformers loads: what it learns, logs and saves.

Not covered here: bf16 and GPUs; numbers against other layouts (`test_sft_same_numbers`).
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from plain_sft import plain_loss, read_rows
from safetensors.torch import load_file
from sft_runs import (
    GLOBAL_BATCH,
    LEARNING_RATE,
    STEPS,
    STEPS_PER_PASS,
    TRAIN_ROWS,
    VALIDATION_ROWS,
    WEIGHT_DECAY,
    FinishedRun,
    Inputs,
    losses,
    metrics_by_step,
    read_lines,
    run_cli,
    run_sft,
    trained_rows,
)
from transformers import AutoModelForCausalLM, AutoTokenizer

SAVED = [5, 10, 15, 20, 24]


@pytest.fixture(scope="module")
def exported(straight_run: FinishedRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The last checkpoint as a directory for transformers."""
    out = tmp_path_factory.mktemp("export") / "model"
    run_cli("export", straight_run.checkpoints, out, "--dtype", "float32")
    return out


def test_the_loss_falls_to_less_than_half(straight_run: FinishedRun) -> None:
    found = losses(straight_run.logs)
    assert len(found) == STEPS
    assert found[0] == pytest.approx(5.58, abs=0.3), "random weights know nothing: ln 266"
    assert found[-1] < found[0] / 2


def test_each_row_is_trained_once_per_pass_in_a_new_order(straight_run: FinishedRun) -> None:
    steps = trained_rows(straight_run.logs)
    passes = [steps[start : start + STEPS_PER_PASS] for start in range(0, STEPS, STEPS_PER_PASS)]
    flat = [[source for step in rows for _, source in step] for rows in passes]
    for order in flat:
        assert Counter(order) == Counter(str(row) for row in range(TRAIN_ROWS))
    assert len({tuple(order) for order in flat}) == len(flat)
    assert all(len(step) == GLOBAL_BATCH for step in steps)
    assert all([shard for shard, _ in step] == [0, 0, 1, 1] for step in steps), "equal parts, in shard order"


def test_every_step_has_its_metrics(straight_run: FinishedRun, inputs: Inputs) -> None:
    metrics = metrics_by_step(straight_run.logs)
    rows = read_rows(inputs.train)
    for step, sources in enumerate(trained_rows(straight_run.logs), start=1):
        line = metrics[step]
        ids = [rows[source][0] for _, source in sources]
        trained = sum(sum(rows[source][1]) for _, source in sources)
        assert line["tokens"] == sum(map(len, ids))
        assert line["valid_tokens"] == line["global_valid_toks"] == line["num_unmasked_tokens"] == trained
        assert line["source_samples"] == line["num_valid_samples"] == line["global_valid_seqs"] == GLOBAL_BATCH
        assert line["consumed_samples"] == step * GLOBAL_BATCH
        assert line["epoch"] == (step - 1) // STEPS_PER_PASS
        assert line["dropped_samples"] == line["skipped_steps"] == 0
        assert line["lr"] == LEARNING_RATE and line["wd"] == WEIGHT_DECAY and line["grad_norm"] > 0
        assert line["loader_latency_max"] >= line["loader_latency_mean"] > 0
        assert line["total_step_time"] > line["policy_time"] > 0
        assert line["valid_tokens_per_second"] == pytest.approx(trained / line["total_step_time"])


def test_a_profile_tells_each_second_of_a_step_on_each_rank(straight_run: FinishedRun) -> None:
    """The batch that is loaded in a step is the next one's, which nobody asks for before a validation."""
    lines = read_lines(straight_run.logs / "profile.jsonl")
    metrics = metrics_by_step(straight_run.logs)
    assert [(line["step"], line["role"], len(line["ranks"])) for line in lines] == [(2, "policy", 2), (10, "policy", 2)]
    of_a_step = {"fetch", "packing", "forward attention", "forward layers", "head and loss", "backward"}
    of_a_step |= {"gradient reduction", "clip", "optimizer", "waiting for other ranks", "waiting"}
    for line, more in zip(lines, ({"load"}, {"validation", "save"}), strict=True):
        for seconds in line["ranks"]:
            assert seconds.keys() == of_a_step | more
            assert sum(seconds.values()) > metrics[line["step"]]["total_step_time"]


def test_the_engine_says_how_busy_it_was(straight_run: FinishedRun) -> None:
    metrics = metrics_by_step(straight_run.logs)
    assert "engine_busy" not in metrics[1], "there is no step before the first"
    assert all(0 < metrics[step]["engine_busy"] < 1 for step in range(2, STEPS + 1))


def test_validation_equals_a_plain_evaluation(straight_run: FinishedRun, inputs: Inputs, exported: Path) -> None:
    lines = {line["step"]: line for line in read_lines(straight_run.logs / "metrics.jsonl") if "val_loss" in line}
    assert sorted(lines) == [0, 10, 20, STEPS], "at the start, on each period and at the end"
    rows = read_rows(inputs.validation)
    for line in lines.values():
        assert line["val_samples"] == VALIDATION_ROWS, "each row counts once, the short last batch included"
        assert line["val_valid_tokens"] == sum(sum(trained) for _, trained in rows.values())
    assert lines[0]["val_loss"] == pytest.approx(plain_loss(inputs.model, rows.values()), rel=1e-5)
    assert lines[STEPS]["val_loss"] == pytest.approx(plain_loss(exported, rows.values()), rel=1e-5)
    assert lines[STEPS]["val_loss"] < lines[0]["val_loss"] / 1.5


def test_the_command_says_how_it_went(straight_run: FinishedRun) -> None:
    facts = dict(line.split(maxsplit=1) for line in straight_run.cli.output.splitlines() if line.startswith("  "))
    found = losses(straight_run.logs)
    assert facts["steps"] == str(STEPS)
    assert facts["loss"] == f"{found[0]:.4f} -> {found[-1]:.4f}"
    assert facts["checkpoint"].startswith(str(straight_run.checkpoints))
    assert facts["curves"] == f"onehop report {straight_run.logs}"
    assert "Traceback" not in straight_run.cli.output


def test_a_checkpoint_holds_counters_config_weights_and_loaders(straight_run: FinishedRun) -> None:
    folders = sorted(straight_run.checkpoints.iterdir(), key=lambda folder: int(folder.name.removeprefix("step_")))
    assert [folder.name for folder in folders] == [f"step_{step}" for step in SAVED]
    metrics = metrics_by_step(straight_run.logs)
    for step, folder in zip(SAVED, folders, strict=True):
        assert sorted(path.name for path in folder.iterdir()) == [
            "config.yaml",
            "digests.json",
            "loaders",
            "policy",
            "training_info.json",
        ]
        info = json.loads((folder / "training_info.json").read_text())
        assert info["total_steps"] == step and info["consumed_samples"] == step * GLOBAL_BATCH
        assert info["total_valid_tokens"] == sum(metrics[done]["valid_tokens"] for done in range(1, step + 1))
        assert info["dropped_samples"] == info["skipped_steps"] == {}
        config = yaml.safe_load((folder / "config.yaml").read_text())
        assert config["policy"]["train_global_batch_size"] == GLOBAL_BATCH
        assert sorted(path.name for path in (folder / "policy").iterdir()) == ["optimizer", "tokenizer", "weights"]
        loaders = {path.name: json.loads(path.read_text()) for path in (folder / "loaders").iterdir()}
        assert sorted(loaders) == ["shard_0.json", "shard_1.json"]


def test_a_checkpoint_can_not_run_code(straight_run: FinishedRun) -> None:
    """Pickles begin with a protocol mark; torch's archives with that of a zip file."""
    files = [path for path in straight_run.checkpoints.rglob("*") if path.is_file()]
    assert {path.suffix for path in files} == {".json", ".yaml", ".safetensors", ".jinja"}
    for path in files:
        assert not path.read_bytes().startswith((b"\x80", b"PK")), path
        if path.suffix == ".json":
            json.loads(path.read_text())


def test_the_export_is_the_checkpoint(straight_run: FinishedRun, inputs: Inputs, exported: Path) -> None:
    tensors: dict[str, torch.Tensor] = {}
    for path in (straight_run.checkpoints / f"step_{STEPS}" / "policy" / "weights").glob("*.safetensors"):
        tensors |= load_file(path)
    by_hand = AutoModelForCausalLM.from_pretrained(inputs.model, dtype=torch.float32)
    missing, unexpected = by_hand.load_state_dict(tensors, strict=False)
    assert missing in ([], ["lm_head.weight"]) and unexpected == [], "a tied head is saved once"
    model = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
    conversation = [{"role": "user", "content": "add sub"}]
    tokenizer: Any = AutoTokenizer.from_pretrained(exported)
    ids = tokenizer.apply_chat_template(conversation, add_generation_prompt=True, return_tensors="pt")["input_ids"]
    assert torch.equal(model(ids).logits, by_hand(ids).logits)
    untrained = AutoModelForCausalLM.from_pretrained(inputs.model, dtype=torch.float32)
    assert not torch.allclose(model(ids).logits, untrained(ids).logits, atol=0.1)


def test_the_report_is_one_file(straight_run: FinishedRun) -> None:
    run_cli("report", straight_run.logs)
    page = (straight_run.logs / "report.html").read_text()
    assert f"{losses(straight_run.logs)[-1]:.4f}" in page and "http://" not in page.replace("http://www.w3.org", "")


@pytest.mark.slow
def test_a_finished_run_started_again_trains_nothing(straight_run: FinishedRun, tmp_path: Path) -> None:
    """With another folder for its records, so that there is nothing to sum up."""
    again = run_sft(straight_run.config, f"logger.log_dir={tmp_path / 'logs'}")
    assert f"step_{STEPS}, step {STEPS}" in again.cli.output
    assert f"steps       {STEPS}" in again.cli.output
    assert not (tmp_path / "logs" / "rows.jsonl").exists()

"""PPO and GRPO runs as a user makes them, each in a process of its own, and what they leave."""

import json
import os
import random
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from sft_runs import REPO, RUN_LIMIT_S, read_lines
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

CHARACTERS = [*"0123456789+=", "E", "P"]
PROMPTS, GENERATIONS = 8, 2
SAMPLES = PROMPTS * GENERATIONS
COMPARED = (
    "reward_mean",
    "advantage_std",
    "loss",
    "grad_norm",
    "critic/loss",
    "critic/grad_norm",
    "critic/values_mean",
)
_PROGRAM = "import json, sys; from nemo_rl.algorithms.single_controller_run import run_ppo; "


@dataclass(frozen=True)
class Inputs:
    """A tiny model over characters with random weights, and prompts such as `07+12=` with their answers."""

    model: Path
    prompts: Path


def make_inputs(work: Path) -> Inputs:
    """Makes the inputs below `work`."""
    model = work / "model"
    tokens = Tokenizer(models.WordLevel({c: i for i, c in enumerate(CHARACTERS)}, unk_token="P"))
    tokens.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokens.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokens, pad_token="P", eos_token="E")
    tokenizer.save_pretrained(model)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(CHARACTERS),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=64,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    Qwen3ForCausalLM(config).save_pretrained(model)
    rng = random.Random(0)
    rows = []
    for _ in range(40):
        a, b = rng.randint(0, 49), rng.randint(0, 49)
        rows.append({"prompt": f"{a:02d}+{b:02d}=", "answer": f"{a + b:02d}"})
    prompts = work / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Inputs(model, prompts)


def write_config(work: Path, inputs: Inputs, *, algorithm: str = "ppo", **changes: Any) -> Path:
    """Writes `work/run.yaml` and returns its path; `changes` by key, with `__` where a path has a dot."""
    model: dict[str, Any] = {
        "model_name": str(inputs.model),
        "train_global_batch_size": SAMPLES,
        "max_total_sequence_length": 16,
        "train_mb_tokens": 64,
        "precision": "float32",
        "optimizer": {"name": "torch.optim.AdamW", "kwargs": {"lr": 5e-3}},
    }
    config: dict[str, Any] = {
        "policy": {**model, "generation": {"max_new_tokens": 4, "max_slots": 16}},
        algorithm: {
            "num_prompts_per_step": PROMPTS,
            "num_generations_per_prompt": GENERATIONS,
            "max_num_steps": 4,
            f"{algorithm}_epochs": 2,
        },
        "loss_fn": {"reference_policy_kl_penalty": 0.0},
        "env": {"name": "python", "function": f"{REPO / 'tests' / 'data' / 'any_digit.py'}:any_digit"},
        "data": {"train": {"path": str(inputs.prompts), "template": "text"}},
        "data_plane": {"enabled": True, "impl": "transfer_queue", "backend": "simple"},
        "logger": {"log_dir": str(work / "logs"), "log_row_ids": True, "log_rollouts": True},
        "cluster": {"gpus_per_node": 1, "oversubscribe": True, "start_timeout_s": 180, "step_timeout_s": 120},
        "checkpointing": {"checkpoint_dir": str(work / "checkpoints"), "save_period": 2},
    }
    if algorithm == "ppo":
        config["value"] = {**model, "value_head_init": "normal"}
        config["value_loss_fn"] = {"cliprange": 0.2}
    for key, value in changes.items():
        *parents, last = key.split("__")
        section = config
        for parent in parents:
            section = section.setdefault(parent, {})
        section[last] = value
    work.mkdir(parents=True, exist_ok=True)
    path = work / "run.yaml"
    path.write_text(yaml.safe_dump(config, sort_keys=False))
    return path


@dataclass(frozen=True)
class FinishedRun:
    """A run that went through: its config file and what it returned."""

    config: Path
    summary: dict[str, Any]

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The metrics of each step, of step 1 first."""
        lines = read_lines(self.config.parent / "logs" / "metrics.jsonl")
        return [line for line in lines if "reward_mean" in line]

    @property
    def rollouts(self) -> list[dict[str, Any]]:
        """Every sample, by group and number."""
        lines = read_lines(self.config.parent / "logs" / "rollouts.jsonl")
        return sorted(lines, key=lambda line: (line["group"], line["sample"]))

    def weights(self, step: int, role: str = "policy") -> dict[str, torch.Tensor]:
        """The saved float32 weights of a role."""
        folder = self.config.parent / "checkpoints" / f"step_{step}" / role / "weights"
        return {k: v for file in sorted(folder.glob("*.safetensors")) for k, v in load_file(file).items()}


def run_rl(config: Path) -> FinishedRun:
    """`run_ppo` in a process of its own, to its successful end."""
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM + "print(json.dumps(run_ppo(sys.argv[1])))", str(config)],
        capture_output=True,
        text=True,
        timeout=RUN_LIMIT_S,
        cwd=REPO,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return FinishedRun(config, json.loads(done.stdout.strip().splitlines()[-1]))


def assert_same_metrics(ours: list[dict[str, Any]], theirs: list[dict[str, Any]], rel: float) -> None:
    """The numbers of each step are equal."""
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        # The warm-up of the critic has no numbers of the policy.
        for name in COMPARED if "loss" in b else COMPARED[:2]:
            assert a[name] == pytest.approx(b[name], rel=rel, abs=1e-6), (a["step"], name)


def assert_same_weights(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], atol: float) -> None:
    """Every weight is equal."""
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=0, atol=atol, msg=name)

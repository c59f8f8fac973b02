"""A PPO config and a GRPO config that nothing is wrong with, as plain dicts to change, and the checked config."""

import copy
from pathlib import Path
from typing import Any

from nemo_rl.algorithms.single_controller_utils.config import MasterConfig
from nemo_rl.utils.config import validate_config


def ppo_sections(model: str = "model", prompts: str = "prompts.jsonl", out: str = "out") -> dict[str, Any]:
    """Steps of 4 prompts x 2 samples."""
    trained = {
        "model_name": model,
        "train_global_batch_size": 8,
        "max_total_sequence_length": 64,
        "precision": "float32",
        "optimizer": {"name": "torch.optim.AdamW", "kwargs": {"lr": 1e-3}},
    }
    return {
        "policy": {**trained, "generation": {"max_new_tokens": 8}},
        "value": copy.deepcopy(trained),
        "ppo": {"num_prompts_per_step": 4, "num_generations_per_prompt": 2, "max_num_steps": 10},
        "loss_fn": {"reference_policy_kl_penalty": 0.0},
        "value_loss_fn": {},
        "env": {"name": "exact_match"},
        "data": {"train": {"path": prompts, "template": "text"}},
        "data_plane": {"impl": "transfer_queue"},
        "cluster": {"gpus_per_node": 1},
        "logger": {"log_dir": str(Path(out) / "logs")},
        "checkpointing": {"checkpoint_dir": str(Path(out) / "checkpoints"), "save_period": 5},
    }


def grpo_sections(**paths: str) -> dict[str, Any]:
    """The same steps without a critic."""
    sections = ppo_sections(**paths)
    del sections["value"], sections["value_loss_fn"]
    sections["grpo"] = sections.pop("ppo")
    return sections


def change(sections: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    """Sets a dotted key, making the sections on the way; returns `sections`."""
    *parents, last = key.split(".")
    at = sections
    for name in parents:
        at = at.setdefault(name, {})
    at[last] = value
    return sections


def checked(sections: dict[str, Any]) -> MasterConfig:
    return validate_config(MasterConfig, sections)[0]


def ppo_config(**changes: Any) -> MasterConfig:
    """The PPO config with changes; `__` stands for the dot of a key."""
    sections = ppo_sections()
    for key, value in changes.items():
        change(sections, key.replace("__", "."), value)
    return checked(sections)

"""A config that runs, with every section and most keys, and what the command line says of a changed one."""

from pathlib import Path
from typing import Any

import pytest
import ray
import yaml

from nemo_rl.cli.main import EXIT_BAD_INPUT, main


def good_config(model: Path, rows: Path, out: Path) -> dict[str, Any]:
    """Two replicas of the tiny model of `tiny.py`; nothing in it is refused."""
    scheduler = "torch.optim.lr_scheduler."
    return {
        "policy": {
            "model_name": str(model),
            "tokenizer": {
                "name": str(model),
                "chat_template_kwargs": {"enable_thinking": False},
                "use_processor": False,
            },
            "train_global_batch_size": 4,
            "train_micro_batch_size": 1,
            "train_mb_tokens": 256,
            "logprob_batch_size": 2,
            "max_total_sequence_length": 128,
            "make_sequence_length_divisible_by": 8,
            "precision": "float32",
            "max_grad_norm": 1.0,
            "optimizer": {
                "name": "torch.optim.AdamW",
                "kwargs": {"lr": 1e-3, "weight_decay": 0.1, "betas": [0.9, 0.98], "eps": 1e-8},
            },
            "scheduler": [
                {"name": f"{scheduler}LinearLR", "kwargs": {"start_factor": 0.1, "total_iters": 5}},
                {"name": f"{scheduler}CosineAnnealingLR", "kwargs": {"T_max": 20, "eta_min": 1e-5}},
                {"milestones": [5]},
            ],
            "activation_checkpointing": False,
            "data_parallel": "auto",
            "dynamic_batching": {"enabled": False, "train_mb_tokens": 256},
            "sequence_packing": {"enabled": True, "train_mb_tokens": 256, "logprob_mb_tokens": 512},
            "megatron_cfg": {
                "enabled": False,
                "tensor_model_parallel_size": 1,
                "optimizer": {"optimizer": "adam", "lr": 1e-3, "min_lr": 1e-5, "weight_decay": 0.1, "adam_beta2": 0.98},
                "scheduler": {"lr_decay_style": "cosine", "lr_warmup_iters": 2, "lr_warmup_init": 1e-6},
            },
            "dtensor_cfg": {"enabled": False, "tensor_parallel_size": 1, "context_parallel_size": 1},
            "hf_config_overrides": {"attention_dropout": 0.1, "max_position_embeddings": 1024},
            "max_consecutive_skipped_steps": 5,
        },
        "data": {
            "backend": "energon",
            "train": {"path": str(rows), "split": "train", "limit": 20},
            "validation": {"path": str(rows)},
            "max_input_seq_length": 64,
            "overlong": "truncate",
            "shuffle": True,
            "add_bos": True,
            "add_eos": True,
            "energon": {
                "num_workers": 1,
                "prefetch_factor": 2,
                "topology_mapper": "elastic",
                "logical_shards": 2,
                "task_encoder": {"name": "generic_sft"},
                "cookers": [{"name": "generic_conversation", "options": {"system_prompt": "Be brief."}}],
                "seed_offset": 1,
                "max_consecutive_bad_rows": 10,
                "checkpoint_every_sec": 30.0,
            },
        },
        "sft": {
            "max_num_steps": 20,
            "max_num_epochs": 4,
            "val_period": 5,
            "val_batches": 2,
            "val_global_batch_size": 8,
            "val_micro_batch_size": 2,
            "val_at_start": False,
            "val_at_end": True,
            "seed": 1,
            "only_unmask_final": False,
        },
        "data_plane": {
            "enabled": True,
            "impl": "local",
            "max_partitions": 2,
            "observability": {"enabled": False},
        },
        "logger": {
            "log_dir": str(out / "logs"),
            "log_row_ids": True,
            "tensorboard_enabled": True,
            "wandb_enabled": False,
            "tensorboard": {"log_dir": "tensorboard"},
            "wandb": {"project": "p", "name": "n"},
        },
        "cluster": {
            "gpus_per_node": 2,
            "num_nodes": 1,
            "address": None,
            "oversubscribe": True,
            "master_port_range_low": 20000,
            "master_port_range_high": 20100,
            "start_timeout_s": 60.0,
            "step_timeout_s": 60.0,
        },
        "checkpointing": {
            "enabled": True,
            "checkpoint_dir": str(out / "checkpoints"),
            "save_period": 5,
            "keep_top_k": 2,
            "metric_name": "val:val_loss",
            "higher_is_better": False,
            "checkpoint_must_save_by": "00:03:00:00",
        },
        "telemetry": {"enabled": False, "service_name": "onehop", "span_groups": "default", "export_sample_rate": 0.5},
    }


def write(path: Path, config: dict[str, Any]) -> Path:
    path.write_text(yaml.safe_dump(config, sort_keys=False))
    return path


def complaints(file: Path, capfd: pytest.CaptureFixture[str], *overrides: str) -> list[str]:
    """The lines with which `check` and `sft` both refuse a config; fails when they differ, or when one starts a run."""
    said = []
    for words in (["check", str(file)], ["sft", "--config", str(file)]):
        code = main([*words, *overrides])
        out, err = capfd.readouterr()
        assert code == EXIT_BAD_INPUT, f"{words[0]} ended with {code}: {out}{err}"
        assert out == ""
        assert "Traceback" not in err
        said.append([line.removeprefix("error: ") for line in err.splitlines() if line.startswith("error: ")])
    assert not ray.is_initialized()
    assert said[0] == said[1]
    return said[0]

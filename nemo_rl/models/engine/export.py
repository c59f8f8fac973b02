"""A checkpoint as a directory that `AutoModelForCausalLM.from_pretrained` loads."""

import shutil
from pathlib import Path
from typing import Literal

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageReader
from transformers import AutoConfig, AutoModelForCausalLM

from nemo_rl.models.engine.value_model import ValueModel, save_value_head
from nemo_rl.utils.errors import UserError

EXPORT_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def export_hf(
    checkpoint_step_dir: Path, out_dir: Path, dtype: str = "bfloat16", role: Literal["policy", "value"] = "policy"
) -> Path:
    """Writes `<role>/weights` of a `step_N` folder as Hugging Face safetensors, with config and tokenizer.

    Tied weights stay tied. A critic becomes its decoder and, in a file of its own, the value head; `value.model_name`
    may name that directory. Runs in one process; needs memory for one float32 copy of the model.

    Raises:
        UserError: not a checkpoint folder, unknown dtype, or `out_dir` exists and is not empty.
    """
    if dtype not in EXPORT_DTYPES:
        raise UserError(f"dtype is {dtype!r}; use one of {', '.join(EXPORT_DTYPES)}")
    weights = checkpoint_step_dir / role / "weights"
    if not (weights / "config.json").is_file():
        raise UserError(f"{checkpoint_step_dir} is not a checkpoint: it has no {role}/weights/config.json")
    if out_dir.is_dir() and any(out_dir.iterdir()):
        raise UserError(f"{out_dir} is not empty; choose another folder or remove it")
    config = AutoConfig.from_pretrained(weights, trust_remote_code=False)
    causal = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)
    model = causal if role == "policy" else ValueModel(causal.base_model)
    saved = HuggingFaceStorageReader(str(weights)).read_metadata().state_dict_metadata
    tensors = {name: tensor.detach() for name, tensor in model.state_dict(keep_vars=True).items() if name in saved}
    missing = sorted({name for name, _ in model.named_parameters()} - set(tensors))
    if missing:
        raise UserError(f"{weights} lacks {missing[0]!r}")
    dcp.load(tensors, storage_reader=HuggingFaceStorageReader(str(weights)), no_dist=True)
    out_dir.mkdir(parents=True, exist_ok=True)
    written = model.model if isinstance(model, ValueModel) else model
    nn.Module.to(written, EXPORT_DTYPES[dtype])
    written.save_pretrained(out_dir)
    if isinstance(model, ValueModel):
        save_value_head(model.value_head, out_dir)
    tokenizer = checkpoint_step_dir / role / "tokenizer"
    if tokenizer.is_dir():
        shutil.copytree(tokenizer, out_dir, dirs_exist_ok=True)
    return out_dir

"""A model's own config: read without loading weights, and asked whether rows of that model can be packed."""

from pathlib import Path
from typing import Any

from transformers import AutoConfig, PretrainedConfig

from nemo_rl.utils.errors import UserError

_MIXERS_OUTSIDE_ATTENTION = ("linear_attention", "mamba", "recurrent", "conv", "ssm", "rwkv", "hybrid")
_MODELS_OUTSIDE_ATTENTION = (
    "mamba",
    "rwkv",
    "xlstm",
    "recurrent_gemma",
    "falcon_h1",
    "jamba",
    "bamba",
    "zamba",
    "lfm2",
)


def read_model_config(
    name: str, overrides: dict[str, Any] | None = None, *, section: str = "policy"
) -> PretrainedConfig:
    """The model's transformers config; `overrides` replace its fields. Never runs code of the model's repository.

    Raises:
        UserError: a local directory without `config.json`, or a name that can't be found; `section` is where it stands.
    """
    path = Path(name)
    if path.is_dir() and not (path / "config.json").is_file():
        raise UserError(f"{section}.model_name: {name} has no config.json, so it is not a model directory")
    if not path.is_dir() and (path.is_absolute() or name.startswith((".", "~"))):
        raise UserError(f"{section}.model_name: there is no directory {name}")
    try:
        return AutoConfig.from_pretrained(name, trust_remote_code=False, **(overrides or {}))
    except (OSError, ValueError, KeyError) as error:
        first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"{section}.model_name: {name!r} is no local directory and could not be loaded as a model ({first_line})"
        ) from error


def packing_problem(config: PretrainedConfig) -> str | None:
    """Why rows can't be packed for this model, or None. Its tokens must mix in the attention function only."""
    kinds = set(getattr(config, "layer_types", None) or ())
    foreign = sorted(kind for kind in kinds if any(word in kind for word in _MIXERS_OUTSIDE_ATTENTION))
    if foreign or any(config.model_type.startswith(word) for word in _MODELS_OUTSIDE_ATTENTION):
        what = ", ".join(foreign) or "a recurrent state"
        return f"{config.model_type} mixes tokens outside the attention function ({what}), so rows can't be packed"
    if getattr(config, "is_encoder_decoder", False):
        return f"{config.model_type} is an encoder-decoder model; only decoder models can be trained"
    return None

"""Load the tokenizer of a model and give it the chat template that the config names."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from nemo_rl.data.chat_template import ChatTemplate
from nemo_rl.utils.errors import UserError

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")


class TokenizerOptions(Protocol):
    """What is read of a tokenizer config: `name` and, if there, `chat_template`."""

    def __getitem__(self, key: str, /) -> Any: ...
    def get(self, key: str, default: Any = None, /) -> Any: ...


def get_tokenizer(
    config: TokenizerOptions | Mapping[str, Any], get_processor: bool = False, needs_chat_template: bool = True
) -> Any:
    """The fast tokenizer of `config["name"]`, with a pad token and a chat template that compiles.

    - `name`: a local directory, or a model name on the hub. Code that comes with a model is never run.
    - `chat_template`: the template's text or the path of a file that holds it; null or "default" keeps the one that
      comes with the tokenizer.
    - A tokenizer without a pad token pads with EOS: what is padding is decided by position, never by id.

    Args:
        config: `policy.tokenizer`, as a config model or a mapping.
        get_processor: return the model's processor, which holds the tokenizer; a model for text only has none, and
            its tokenizer is returned.
        needs_chat_template: False where conversations are never rendered.

    Raises:
        UserError: no such directory, no tokenizer in it, none that is fast, no chat template or one with a fault.
    """
    name = str(config["name"])
    tokenizer = _load(name)
    if not tokenizer.is_fast:
        raise UserError(
            f"policy.tokenizer.name: {name!r} has no fast tokenizer, and only those say which characters a token "
            "covers; convert it and save a tokenizer.json"
        )
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise UserError(f"policy.tokenizer.name: {name!r} has neither a pad token nor an EOS token to pad with")
        tokenizer.pad_token = tokenizer.eos_token
    template = config.get("chat_template")
    if template is not None and template != "default":
        tokenizer.chat_template = read_chat_template(str(template))
    if needs_chat_template or tokenizer.chat_template is not None:
        ChatTemplate.of(tokenizer).check_syntax()
    return _processor(name, tokenizer) if get_processor else tokenizer


def read_chat_template(template: str) -> str:
    """The text of a chat template given as that text or as a file path.

    Raises:
        UserError: it looks like a path, because it holds no template expression, and there is no such file.
    """
    if "{{" in template or "{%" in template:
        return template
    path = Path(template).expanduser()
    if not path.is_file():
        raise UserError(
            f"policy.tokenizer.chat_template: {template!r} is neither a file nor the text of a template; "
            "give a path to a .jinja file, or leave it null to use the tokenizer's own"
        )
    return path.read_text(encoding="utf-8")


def _load(name: str) -> PreTrainedTokenizerBase:
    path = Path(name).expanduser()
    if path.is_dir():
        if not any((path / file).is_file() for file in _TOKENIZER_FILES):
            raise UserError(
                f"policy.tokenizer.name: {name!r} holds no tokenizer; one of {', '.join(_TOKENIZER_FILES)} is needed"
            )
        source = str(path)
    # A hub name is `model` or `owner/model`; anything else can only be meant as a path.
    elif path.is_file() or path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise UserError(f"policy.tokenizer.name: {name!r} is not a directory")
    else:
        source = name
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    # Besides missing files, transformers reports broken or unknown ones through all of these.
    except (OSError, ValueError, TypeError, KeyError, ImportError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(f"policy.tokenizer.name: no tokenizer could be loaded from {name!r}: {reason}") from error
    assert tokenizer is not None  # only its annotation allows None: every failure raises
    return tokenizer


def _processor(name: str, tokenizer: PreTrainedTokenizerBase) -> Any:
    from transformers import AutoProcessor  # 1.5 s that only this call needs

    try:
        processor = AutoProcessor.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError):  # how transformers says that the model has no processor
        return tokenizer
    if not hasattr(processor, "tokenizer"):
        return tokenizer
    processor.tokenizer = tokenizer
    return processor

"""Write docs/config.md from the config models, so that the page can't fall behind the code.

    python docs/make_config_page.py [--check]

With `--check` nothing is written; the exit code is 1 when the page on disk differs.
"""

from __future__ import annotations

import inspect
import sys
import types
import typing
from pathlib import Path

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from nemo_rl.algorithms.sft_v2 import MasterConfig
from nemo_rl.algorithms.single_controller_utils.config import MasterConfig as RLMasterConfig

PAGE = Path(__file__).parent / "config.md"
INTRO = """\
# Config keys

Written from the config models by `python docs/make_config_page.py`; a test compares.

- A file may stand on others: `defaults: base.yaml`, or a list, relative to the file. Sections merge key by key; a
  section with `_override_: true` replaces the one below.
- `key=value` on the command line wins over the file, `~key` removes a key.
- `${other.key}` is replaced by the value of that key; `${mul:a,b}`, `${div:a,b}` and `${max:a,b}` calculate.
- A key that is not listed here is an error that names the nearest one that is. Keys which NeMo-RL's recipes hold and
  which mean nothing here are accepted, and listed once when a run starts.
- `onehop check FILE` lists every problem of a file at once and starts nothing.
"""

RL_INTRO = """\
# Keys of PPO and GRPO

A run of `onehop ppo` has exactly one of the sections `ppo` and `grpo`; `value` and `value_loss_fn` go with `ppo`.
Sections that are not listed again are those above.
"""


def models_in(annotation: object) -> list[type[BaseModel]]:
    """The config models that a field's type names, itself or inside a union, a list or `Annotated`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    parts = [model for part in typing.get_args(annotation) for model in models_in(part)]
    return list(dict.fromkeys(parts))


def type_name(annotation: object) -> str:
    """A field's type as a reader of YAML would say it."""
    if annotation is type(None):
        return "null"
    if typing.get_origin(annotation) is typing.Annotated:
        return type_name(typing.get_args(annotation)[0])
    if typing.get_origin(annotation) is typing.Literal:
        return ", ".join(
            f"`{value}`" if isinstance(value, str) else str(value).lower() for value in typing.get_args(annotation)
        )
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return " or ".join(type_name(part) for part in typing.get_args(annotation))
    if typing.get_origin(annotation) in (list, tuple):
        return f"list of {type_name(typing.get_args(annotation)[0])}"
    if typing.get_origin(annotation) is dict or models_in(annotation):
        return "section"
    names = {str: "text", int: "whole number", float: "number", bool: "true or false", dict: "section"}
    return names.get(annotation, "any") if isinstance(annotation, type) else "any"


def default_text(field: FieldInfo) -> str:
    """A field's default in YAML; `required` where there is none, empty for a section."""
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True, validated_data={})
    if isinstance(value, BaseModel | dict) or (isinstance(value, list) and value):
        return ""
    if value is None:
        return "`null`"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def section(name: str, model: type[BaseModel]) -> list[str]:
    """The table of one section and of those below it."""
    first_paragraph = inspect.cleandoc(model.__doc__ or "").split("\n\n")[0].replace("\n", " ")
    lines = ["", f"## {name}", "", first_paragraph, "", "| key | type | default | meaning |", "|---|---|---|---|"]
    below = []
    for key, field in model.model_fields.items():
        shown = field.alias or key
        meaning = " ".join((field.description or "").split()).replace("|", "\\|")
        inner_models = models_in(field.annotation)
        if inner_models and not meaning:
            meaning = f"see [{name}.{shown}](#{name.replace('.', '')}{shown})"
        lines.append(f"| `{shown}` | {type_name(field.annotation)} | {default_text(field)} | {meaning} |")
        for inner in inner_models:
            below += section(inner_name(f"{name}.{shown}", inner, inner_models), inner)
    return lines + below


def inner_name(name: str, model: type[BaseModel], alternatives: list[type[BaseModel]]) -> str:
    """The heading of a section; where a key has several shapes, with the `name` that chooses this one."""
    if len(alternatives) < 2 or "name" not in model.model_fields:
        return name
    return f"{name}: {typing.get_args(model.model_fields['name'].annotation)[0]}"


def sections(master: type[BaseModel], known: type[BaseModel] | None = None) -> list[str]:
    """All sections of a run's config, without those that `known` has in the same shape."""
    lines: list[str] = []
    for name, field in master.model_fields.items():
        models = models_in(field.annotation)
        other = known.model_fields.get(name) if known is not None else None
        if other is not None and models == models_in(other.annotation):
            continue
        for model in models:
            lines += section(inner_name(name, model, models), model)
    return lines


def page() -> str:
    """The whole page as Markdown."""
    lines = [INTRO.rstrip(), *sections(MasterConfig), "", *RL_INTRO.rstrip().splitlines()]
    lines += sections(RLMasterConfig, known=MasterConfig)
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    if "--check" in sys.argv[1:]:
        sys.exit(PAGE.read_text(encoding="utf-8") != page())
    PAGE.write_text(page(), encoding="utf-8")

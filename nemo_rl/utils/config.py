"""The base of every config model, and the way from YAML files and `key=value` words to a checked one."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, field_validator
from pydantic_core import PydanticKnownError

from nemo_rl.utils.config_problems import alternatives, split_unknown, value_problems
from nemo_rl.utils.errors import ConfigError, UserError
from nemo_rl.utils.yaml_reader import parse_yaml_value, read_yaml_file


class ConfigModel(BaseModel):
    """A config section: typed, unknown keys refused, assignments checked, readable as attributes or as a mapping.

    Numbers are finite, and `true` is not one.

    `cfg.lr`, `cfg["lr"]`, `cfg.get("lr", 0.1)`, `"lr" in cfg` and `cfg["lr"] = 0.2` all work; a name that the model
    does not have raises `KeyError` through the mapping and `AttributeError` through the attribute.
    """

    model_config = ConfigDict(
        extra="forbid",
        validate_assignment=True,
        use_attribute_docstrings=True,
        protected_namespaces=(),
        allow_inf_nan=False,
    )

    @field_validator("*", mode="before")
    @classmethod
    def _true_is_no_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Python, and pydantic with it, would read `max_num_steps: true` as 1."""
        if isinstance(value, bool) and (expected := _number_fields(cls).get(info.field_name or "")):
            raise PydanticKnownError(expected)
        return value

    def __getitem__(self, key: str) -> Any:
        if key not in self:
            raise KeyError(key)
        return getattr(self, key)

    def __setitem__(self, key: str, value: Any) -> None:
        if key not in self:
            raise KeyError(key)
        setattr(self, key, value)

    def __contains__(self, key: object) -> bool:
        return key in type(self).model_fields or (self.model_extra is not None and key in self.model_extra)

    def get(self, key: str, default: Any = None) -> Any:
        """The value of `key`, or `default` where the model has no such name."""
        return getattr(self, key) if key in self else default

    def keys(self) -> list[str]:
        """The names of the section, in the order they are declared; with `[]` it makes `dict(**cfg)` work."""
        return [*type(self).model_fields, *(self.model_extra or {})]


@functools.cache
def _number_fields(model: type[BaseModel]) -> dict[str, Literal["int_type", "float_type"]]:
    """The fields that take a number and neither true nor false, with pydantic's name of the error."""
    fields: dict[str, Literal["int_type", "float_type"]] = {}
    for name, field in model.model_fields.items():
        types = alternatives(field.annotation)
        if (int in types or float in types) and bool not in types:
            fields[name] = "float_type" if float in types else "int_type"
    return fields


ModelT = TypeVar("ModelT", bound=BaseModel)


def load_config(path: str | Path, overrides: list[str] | None = None) -> dict[str, Any]:
    """Reads a YAML config with everything it stands on, as plain dicts, lists and scalars without interpolations.

    - `defaults: base.yaml`, or a list of files, is read first; paths are relative to the file that names them. A
      section is merged key by key, anything else is replaced; a section with `_override_: true` replaces the one below.
    - Each of `overrides` is `key=value`: a dotted key and a YAML value. `+key=value` means the same, `~key` removes.
    - `${other.key}` is replaced last, also through `${mul:a,b}`, `${div:a,b}` (whole when it divides evenly) and
      `${max:a,b}`.

    Raises:
        UserError: a file that is missing, not YAML or its own ancestor, an override without `=`, an interpolation of a
            key that does not exist, a value left at `???`, a section that holds itself.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    for name, resolve in (("mul", _product), ("div", _quotient), ("max", _largest)):
        OmegaConf.register_new_resolver(name, resolve, replace=True)
    try:
        config = OmegaConf.create(_read_with_defaults(Path(path), ()))
        for word in overrides or []:
            _apply_override(config, word)
        container = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        reason = (error.msg or str(error)).splitlines()[0]
        raise UserError(f"{error.full_key or path}: {reason} (while reading {path})") from error
    except RecursionError as error:
        raise UserError(f"{path}: sections are nested too deep, or one of them holds itself") from error
    assert isinstance(container, dict)
    return {str(key): value for key, value in container.items()}


def validate_config(model: type[ModelT], raw: Mapping[str, Any]) -> tuple[ModelT, list[str]]:
    """The checked config, and the names in `raw` that recipes of the original project hold and nothing here reads.

    Raises:
        ConfigError: every unknown key, with the nearest known name, and every missing or refused value, all at once.
    """
    known, inert, unknown = split_unknown(model, raw)
    try:
        config = model.model_validate(known)
    except ValidationError as error:
        raise ConfigError(unknown + value_problems(error, known, unknown)) from error
    if unknown:
        raise ConfigError(unknown)
    return config, inert


def _read_with_defaults(path: Path, readers: tuple[Path, ...]) -> dict[str, Any]:
    """The mapping of one file merged over those that its `defaults` name; `readers` are the files that led here."""
    resolved = path.resolve()
    if resolved in readers:
        chain = " -> ".join(str(reader) for reader in (*readers, resolved))
        raise UserError(f"{path}: `defaults` goes in a circle: {chain}")
    own = read_yaml_file(path)
    defaults = own.pop("defaults", [])
    names = [defaults] if isinstance(defaults, str) else defaults
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UserError(f"{path}: defaults: expected a file name or a list of them, got {defaults!r}")
    merged: dict[str, Any] = {}
    for name in names:
        merged = _merge(merged, _read_with_defaults(path.parent / name, (*readers, resolved)))
    return _merge(merged, own)


def _merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = {} if above.get("_override_") else dict(below)
    for key, value in above.items():
        if isinstance(value, Mapping):
            under = merged.get(key)
            merged[key] = _merge(under if isinstance(under, Mapping) else {}, value)
        elif key != "_override_":
            merged[key] = value
    return merged


def _apply_override(config: Any, word: str) -> None:
    from omegaconf import OmegaConf

    if word.startswith("~"):
        parent, _, last = word[1:].rpartition(".")
        section = OmegaConf.select(config, parent) if parent else config
        if not OmegaConf.is_dict(section) or last not in section:
            raise UserError(f"{word}: no such key to remove")
        del section[last]
        return
    key, equals, value = word.lstrip("+").partition("=")
    if not equals or not key:
        raise UserError(f"{word!r}: an override is written key=value, for example sft.max_num_steps=20")
    parsed = parse_yaml_value(value, where=word)
    # What the override replaces may be an interpolation that leads nowhere.
    present = OmegaConf.select(config, key, throw_on_resolution_failure=False)
    is_merge = OmegaConf.is_dict(present) and isinstance(parsed, dict)
    OmegaConf.update(config, key, parsed, merge=is_merge, force_add=True)


def _product(*factors: float) -> float:
    return math.prod(factors)


def _quotient(dividend: float, divisor: float) -> float:
    exact = dividend / divisor
    return int(exact) if isinstance(dividend, int) and isinstance(divisor, int) and exact.is_integer() else exact


def _largest(*values: float) -> float:
    return max(values)

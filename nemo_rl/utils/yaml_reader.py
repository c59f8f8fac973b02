"""YAML as configs mean it: `1e-5` is a number, `10:00:00` is text, a key given twice is an error."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from nemo_rl.utils.errors import UserError

_INT, _FLOAT, _TIMESTAMP = (f"tag:yaml.org,2002:{name}" for name in ("int", "float", "timestamp"))


class _Loader(yaml.SafeLoader):
    """PyYAML reads `1e-5` as text, `10:00:00:00` as a number in base 60 and dates as objects; here none of that."""

    yaml_implicit_resolvers = {  # noqa: RUF012 (PyYAML's own class attribute)
        first: [(tag, pattern) for tag, pattern in resolvers if tag not in (_INT, _FLOAT, _TIMESTAMP)]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.value != "<<"]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} is given twice", node.start_mark)
        return super().construct_mapping(node, deep=deep)


_Loader.add_implicit_resolver(
    _INT, re.compile(r"[-+]?(?:0|[1-9][0-9_]*|0x[0-9a-fA-F_]+|0b[01_]+)\Z"), list("-+0123456789")
)
_Loader.add_implicit_resolver(
    _FLOAT,
    re.compile(
        r"(?:[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9]+|[0-9][0-9_]*(?=[eE]))(?:[eE][-+]?[0-9]+)?|"
        r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))\Z"
    ),
    list("-+0123456789."),
)


def read_yaml_file(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file.

    Raises:
        UserError: no such file, text that is not YAML, a key given twice, or a top level that is not a mapping;
            the message names the file and, where there is one, the line.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{path}: no such config file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: can't be read as a config file ({error})") from error
    value = _parse(text, where=str(path))
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise UserError(f"{path}: expected `key: value` lines at the top level, found a {type(value).__name__}")
    return value


def parse_yaml_value(text: str, *, where: str) -> Any:
    """The value that `text` has on the right side of `key=`; `where` begins the message of a `UserError`."""
    return _parse(text, where=where)


def _parse(text: str, *, where: str) -> Any:
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f", line {mark.line + 1}" if mark else ""
        raise UserError(f"{where}{line}: not valid YAML: {error.problem or error.context}") from error
    except yaml.YAMLError as error:
        raise UserError(f"{where}: not valid YAML: {' '.join(str(error).split())}") from error

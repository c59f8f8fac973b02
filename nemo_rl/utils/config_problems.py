"""What is wrong with a raw config, in plain lines: unknown keys with the nearest name, and values of the wrong type."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from nemo_rl.utils.config_names import recipe_names, recipe_sections, unknown_line

# pydantic's error types, in the words of a message "expected ..., got ...".
_EXPECTED = {
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "text",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "a section of `key: value` lines",
    "model_type": "a section of `key: value` lines",
    "model_attributes_type": "a section of `key: value` lines",
    "none_required": "null",
}


def split_unknown(model: type[BaseModel], raw: Mapping[str, Any]) -> tuple[dict[str, Any], list[str], list[str]]:
    """Parts `raw` into what `model` knows, what only the recipes know, and what nobody knows.

    Returns:
        known: `raw` without the keys of the other two; sections of free form stay whole.
        inert: dotted names that stand in `recipe_names()` and not in the model.
        problems: one line per key that neither has, with the nearest name.
    """
    inert: list[str] = []
    unknown: list[str] = []
    known = _keep_known([model], raw, "", inert, unknown)
    names = {name for name, _ in _names_below([model], "", ())}
    return known, inert, [unknown_line(key, names) for key in unknown]


def value_problems(error: ValidationError, raw: Mapping[str, Any], unknown: list[str]) -> list[str]:
    """One line per value that pydantic refused: the dotted key, what was expected and what came.

    Args:
        error: what the model raised.
        raw: what it was given, to tell keys from the branch names that pydantic puts into its locations.
        unknown: the lines about unknown keys; a missing key that one of them suggests is not reported again.
    """
    wanted: dict[str, list[str]] = {}
    got: dict[str, str] = {}
    problems: list[str] = []
    details = [(_dotted(detail, raw), detail) for detail in error.errors(include_url=False)]
    # A union complains for each of its branches; the one that looked inside the value is the one that was meant.
    looked_into = {key[:end] for key, _ in details for end in range(len(key)) if key[end] == "."}
    for key, detail in details:
        kind, context = detail["type"], detail.get("ctx", {})
        where = f"{key}: " if key else ""
        if kind == "missing":
            if not any(f"did you mean {key}?" in line for line in unknown):
                problems.append(f"{key}: missing, and it has no default")
        elif kind == "extra_forbidden":
            problems.append(f"{key}: unknown key in this section")
        elif kind in ("value_error", "assertion_error"):
            cause = context.get("error")
            problems.extend(f"{where}{line}" for line in getattr(cause, "problems", [str(cause)]))
        elif key not in looked_into:
            wanted.setdefault(key, []).append(_expectation(detail))
            got[key] = _shown(detail["input"])
    for key, choices in wanted.items():
        problems.append(f"{key or 'config'}: expected {' or '.join(dict.fromkeys(choices))}, got {got[key]}")
    return list(dict.fromkeys(problems))


def _expectation(detail: ErrorDetails) -> str:
    kind, context = detail["type"], detail.get("ctx", {})
    if kind in _EXPECTED:
        return _EXPECTED[kind]
    match kind:
        case "literal_error" | "enum":
            return f"one of {context['expected']}"
        case "greater_than":
            return f"more than {context['gt']}"
        case "greater_than_equal":
            return f"{context['ge']} or more"
        case "less_than":
            return f"less than {context['lt']}"
        case "less_than_equal":
            return f"{context['le']} or less"
        case "too_short":
            return f"{context['min_length']} or more entries"
        case "string_too_short":
            return "text that is not empty"
    message = detail["msg"]
    return message[0].lower() + message[1:]


def _shown(value: Any) -> str:
    text = f"a section with {', '.join(map(str, value))}" if isinstance(value, Mapping) and value else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _dotted(detail: ErrorDetails, raw: Mapping[str, Any]) -> str:
    """The dotted key of an error; steps of the location that name a branch of a union are left out."""
    parts: list[str] = []
    here: Any = raw
    for index, step in enumerate(detail["loc"]):
        inside = step in here if isinstance(here, Mapping) else isinstance(here, list) and isinstance(step, int)
        if inside:
            here = here[step]
        elif detail["type"] != "missing" or index != len(detail["loc"]) - 1:
            continue
        parts.append(str(step))
    return ".".join(parts)


def _keep_known(
    models: list[type[BaseModel]], raw: Mapping[str, Any], at: str, inert: list[str], unknown: list[str]
) -> dict[str, Any]:
    fields = {
        key: field.annotation
        for model in models
        for name, field in model.model_fields.items()
        for key in (name, field.alias or name)
    }
    is_open = any(model.model_config.get("extra") == "allow" for model in models)
    known: dict[str, Any] = {}
    for key, value in raw.items():
        dotted = f"{at}{key}"
        if key in fields:
            known[key] = _keep_known_value(fields[key], value, f"{dotted}.", inert, unknown)
        elif is_open:
            known[key] = value
        else:
            _sort_foreign(dotted, value, inert, unknown)
    return known


def _keep_known_value(annotation: Any, value: Any, at: str, inert: list[str], unknown: list[str]) -> Any:
    models, items = _models_and_items(annotation)
    if isinstance(value, Mapping):
        if models:
            return _keep_known(models, value, at, inert, unknown)
        if items is not None:
            return {k: _keep_known_value(items, v, f"{at}{k}.", inert, unknown) for k, v in value.items()}
    if isinstance(value, list) and items is not None:
        return [_keep_known_value(items, v, f"{at}{i}.", inert, unknown) for i, v in enumerate(value)]
    return value


def _sort_foreign(dotted: str, value: Any, inert: list[str], unknown: list[str]) -> None:
    """Files a key that the model lacks under `inert` or `unknown`, leaf by leaf where the recipes have its section."""
    if dotted in recipe_names():
        inert.append(dotted)
    elif dotted not in recipe_sections():
        while isinstance(value, Mapping) and len(value) == 1:
            ((key, value),) = value.items()
            dotted = f"{dotted}.{key}"
        unknown.append(dotted)
    elif isinstance(value, Mapping):
        for key, below in value.items():
            _sort_foreign(f"{dotted}.{key}", below, inert, unknown)
    else:
        inert.append(dotted)


def alternatives(annotation: Any) -> tuple[Any, ...]:
    """The types that a value of this annotation may have: the members of a union, else the one."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return alternatives(arguments[0])
    if origin in (Union, types.UnionType):
        return tuple(one for argument in arguments for one in alternatives(argument))
    return (annotation,)


def _models_and_items(annotation: Any) -> tuple[list[type[BaseModel]], Any | None]:
    """The models that a value of this annotation may be, and the annotation of its items if it is a list or mapping."""
    members = alternatives(annotation)
    if len(members) > 1:
        found = [_models_and_items(member) for member in members]
        return [m for models, _ in found for m in models], next((i for _, i in found if i is not None), None)
    (annotation,) = members
    origin, arguments = get_origin(annotation), get_args(annotation)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation], None
    if origin in (list, tuple) and arguments:
        return [], arguments[0]
    if origin is dict:
        return [], arguments[1]
    return [], None


def _names_below(
    models: list[type[BaseModel]], at: str, above: tuple[type[BaseModel], ...]
) -> Iterator[tuple[str, type[BaseModel]]]:
    """Every dotted name of the models, with `*` for the place in a list; a model that holds itself is entered once."""
    for model in models:
        for own_name, field in model.model_fields.items():
            name = field.alias or own_name
            yield f"{at}{name}", model
            inner, items = _models_and_items(field.annotation)
            in_list = [] if items is None else _models_and_items(items)[0]
            for found, below in ((inner, f"{at}{name}."), (in_list, f"{at}{name}.*.")):
                yield from _names_below([m for m in found if m not in above], below, (*above, model))

"""Plain JSON values out of what training code holds: tensors, arrays, NumPy numbers, paths."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any


def as_scalar(value: Any) -> float | int | bool | None:
    """The number in a Python number, NumPy number or one-element tensor or array; None when it holds no single one."""
    if isinstance(value, bool | int | float):
        return value
    if callable(getattr(value, "item", None)):
        try:
            number = value.item()
        except (RuntimeError, ValueError, TypeError):  # several elements, in the words of torch and of NumPy
            return None
        return number if isinstance(number, bool | int | float) else None
    return None


def json_value(value: Any, *, non_finite: Callable[[float], Any] = repr) -> Any:
    """`value` as JSON takes it: mappings with text keys, lists, text, numbers, null.

    Args:
        non_finite: what stands for NaN and the infinities, which JSON lacks.
    """
    if value is None or isinstance(value, str):
        return value
    number = as_scalar(value)
    if number is not None:
        return non_finite(number) if isinstance(number, float) and not math.isfinite(number) else number
    if isinstance(value, Mapping):
        return {str(key): json_value(item, non_finite=non_finite) for key, item in value.items()}
    if callable(getattr(value, "tolist", None)):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [json_value(item, non_finite=non_finite) for item in value]
    return str(value)

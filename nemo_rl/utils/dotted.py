"""An object that a config names as `module:Class`."""

from __future__ import annotations

import importlib
from typing import Any

from nemo_rl.utils.errors import UserError


def build_object(target: str, key: str, *args: Any, **options: Any) -> Any:
    """`Class(*args, **options)` of `target`, which is `module:Class`; `key` is where the config names it.

    Raises:
        UserError: it can't be imported, or does not take these arguments.
    """
    module, _, name = target.partition(":")
    try:
        return getattr(importlib.import_module(module), name)(*args, **options)
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise UserError(f"{key}: {target} can't be built: {error}") from error

"""Components by name, imported on first use, or from a Python file of the user."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from nemo_rl.utils.errors import UserError

if TYPE_CHECKING:
    from nemo_rl.data.energon.config import EnergonCookerConfig, EnergonTaskEncoderConfig

    Component = EnergonCookerConfig | EnergonTaskEncoderConfig


class LazyRegistry:
    """Names to `module:object`. A component is a factory; its options are the keyword arguments."""

    def __init__(self, kind: str, default: str):
        """`kind` is what messages call the components; `default` is used where a config names nothing."""
        self._kind = kind
        self._default = default
        self._targets: dict[str, str] = {}

    def register(self, name: str, target: str) -> None:
        """Add `module:object` under a name. Raises `ValueError` for a name that is taken."""
        if name in self._targets:
            raise ValueError(f"{self._kind} {name!r} is registered already")
        self._targets[name] = target

    def resolve(self, name: str) -> Any:
        """The object of a name. Raises `UserError` listing the names there are."""
        if name not in self._targets:
            raise UserError(f"no {self._kind} is called {name!r}; there are {', '.join(sorted(self._targets))}")
        module, _, attribute = self._targets[name].partition(":")
        return getattr(importlib.import_module(module), attribute)

    def resolve_configured(self, name: str | None, python_file: str | None, object_name: str | None) -> Any:
        """The object that a config names. Raises `UserError` where the file or the object is not there."""
        if python_file is None:
            return self.resolve(name or self._default)
        if object_name is None:
            raise UserError(f"{self._kind} of {python_file}: give `object` with `python_file`")
        module = _load_file(self._kind, python_file)
        if not hasattr(module, object_name):
            raise UserError(f"{python_file} has no object {object_name!r} for the {self._kind}")
        return getattr(module, object_name)

    def build(self, component: Component, *args: Any) -> Any:
        """Call the configured factory with `args` and its options. Raises `UserError` where it refuses them."""
        factory = self.resolve_configured(component.name, component.python_file, component.object_name)
        try:
            return factory(*args, **component.options)
        except TypeError as error:
            raise UserError(
                f"{self._kind} {self._title(component)}: options {component.options} don't fit: {error}"
            ) from error

    def identity(self, component: Component) -> dict[str, Any]:
        """What a resume must find again: the name, or the content of the file, and the options."""
        named: dict[str, Any] = {"name": self._title(component), "options": component.options}
        if component.python_file is not None:
            named["sha256"] = hashlib.sha256(Path(component.python_file).read_bytes()).hexdigest()
        return named

    def _title(self, component: Component) -> str:
        return component.object_name or component.name or self._default


COOKER_REGISTRY = LazyRegistry("cooker", "generic_conversation")
COOKER_REGISTRY.register("generic_conversation", "nemo_rl.data.energon.multimodal.cookers:generic_conversation")
TASK_ENCODER_REGISTRY = LazyRegistry("task encoder", "generic_sft")
TASK_ENCODER_REGISTRY.register("generic_sft", "nemo_rl.data.energon.multimodal.task_encoders:generic_sft")


def selected_registry_identity(
    *, task_encoder: EnergonTaskEncoderConfig, cookers: Sequence[EnergonCookerConfig]
) -> dict[str, Any]:
    """The part of a loader's identity that its components make."""
    return {
        "task_encoder": TASK_ENCODER_REGISTRY.identity(task_encoder),
        "cookers": [
            {**COOKER_REGISTRY.identity(cooker), "has_subflavors": cooker.has_subflavors} for cooker in cookers
        ],
    }


def _load_file(kind: str, python_file: str) -> ModuleType:
    path = Path(python_file)
    if not path.is_absolute() or path.suffix != ".py":
        raise UserError(f"{kind}: python_file {python_file} must be an absolute path of a .py file")
    if not path.is_file():
        raise UserError(f"{kind}: python_file {python_file} does not exist")
    spec = importlib.util.spec_from_file_location(f"onehop_user_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

"""The critic: a policy's worker with a value head. The package itself imports no torch."""

from typing import Any


def __getattr__(name: str) -> Any:
    if name == "ValueConfig":
        from nemo_rl.models.value.config import ValueConfig

        return ValueConfig
    raise AttributeError(name)

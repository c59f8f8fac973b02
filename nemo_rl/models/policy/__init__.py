"""The policy: the model that is trained. The package itself imports no torch."""

from typing import Any


def __getattr__(name: str) -> Any:
    if name in ("PolicyConfig", "TokenizerConfig"):
        from nemo_rl.models import config

        return getattr(config, name)
    raise AttributeError(name)

"""From files to token rows: conversations, masks, packing and the loaders beside the workers.

The names below load on first use, so that importing the package stays free of torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nemo_rl.data.config import DataConfig

__all__ = ["DataConfig"]


def __getattr__(name: str) -> Any:
    if name == "DataConfig":
        from nemo_rl.data.config import DataConfig

        return DataConfig
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""Named columns of rows, moved by their producers and consumers; the controller sees metadata only.

`README.md` beside this file has the vocabulary and one picture.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nemo_rl.data_plane.codec import materialize
    from nemo_rl.data_plane.factory import build_data_plane_client
    from nemo_rl.data_plane.interfaces import DataPlaneClient, DataPlaneConfig, KVBatchMeta
    from nemo_rl.data_plane.observability import MetricsDataPlaneClient, log_event

__all__ = [
    "DataPlaneClient",
    "DataPlaneConfig",
    "KVBatchMeta",
    "MetricsDataPlaneClient",
    "build_data_plane_client",
    "log_event",
    "materialize",
]

_MODULE_OF = {
    "DataPlaneClient": "interfaces",
    "DataPlaneConfig": "interfaces",
    "KVBatchMeta": "interfaces",
    "MetricsDataPlaneClient": "observability",
    "build_data_plane_client": "factory",
    "log_event": "observability",
    "materialize": "codec",
}


def __getattr__(name: str) -> Any:
    # torch and tensordict take seconds to import; a reader of the config or of a meta needs neither.
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)

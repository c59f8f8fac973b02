"""From the config section `data_plane` to a client."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from nemo_rl.data_plane.interfaces import (
    DataPlaneClient,
    DataPlaneConfig,
    DataPlaneRuntimeConfig,
    LocalDataPlaneConfig,
)
from nemo_rl.utils.errors import UserError

_IMPLEMENTATIONS = ("local", "transfer_queue")


def data_plane_enabled(cfg: DataPlaneRuntimeConfig | Mapping[str, Any] | None) -> bool:
    """Whether rows go through a data plane; False for None."""
    return cfg is not None and bool(cfg.get("enabled", False))


def maybe_configure_data_plane_env(cfg: DataPlaneRuntimeConfig | Mapping[str, Any] | None) -> None:
    """Sets what the plane's processes inherit from this one; to be called before Ray starts.

    What the environment says already stays. Does nothing without a shared plane.

    Raises:
        UserError: `data_plane.impl` names a plane that does not exist.
    """
    if not data_plane_enabled(cfg) or _implementation(cfg) == "local":
        return
    # It warns of every id that it does not find, in each process; callers get an error or no rows, which is enough.
    os.environ.setdefault("TQ_LOGGING_LEVEL", "ERROR")


def build_data_plane_client(
    cfg: DataPlaneRuntimeConfig | Mapping[str, Any] | None, *, bootstrap: bool = True
) -> DataPlaneClient:
    """The client that `data_plane` asks for, measured when `data_plane.observability.enabled` is set.

    Args:
        bootstrap: True in the driver, which starts what the clients of all processes share; False in the workers,
            which attach to it. A local plane shares nothing, so there each call makes a plane of its own.

    Raises:
        UserError: the section is missing or disabled, names a data plane that does not exist, or see the client.
    """
    if cfg is None or not data_plane_enabled(cfg):
        raise UserError("data_plane is missing or has enabled: false; set `data_plane: {enabled: true, impl: local}`")
    client = _make_client(cfg, bootstrap)
    observability = cfg.get("observability")
    if observability is None or not observability.get("enabled", False):
        return client
    from nemo_rl.data_plane.observability import MetricsDataPlaneClient

    return MetricsDataPlaneClient(client)


def _make_client(cfg: DataPlaneRuntimeConfig | Mapping[str, Any], bootstrap: bool) -> DataPlaneClient:
    # Imported here because a config can be checked without torch.
    if _implementation(cfg) == "local":
        from nemo_rl.data_plane.adapters.local import LocalDataPlaneClient

        return LocalDataPlaneClient(cfg if isinstance(cfg, LocalDataPlaneConfig) else LocalDataPlaneConfig(**dict(cfg)))
    from nemo_rl.data_plane.adapters.transfer_queue import TQDataPlaneClient

    shared = cfg if isinstance(cfg, DataPlaneConfig) else DataPlaneConfig(**dict(cfg))
    return TQDataPlaneClient(shared, bootstrap=bootstrap)


def _implementation(cfg: DataPlaneRuntimeConfig | Mapping[str, Any] | None) -> str:
    impl = None if cfg is None else cfg.get("impl")
    if impl not in _IMPLEMENTATIONS:
        raise UserError(f"data_plane.impl is {impl!r}, which is not available; use one of {list(_IMPLEMENTATIONS)}")
    return str(impl)

"""From the config section `data_plane` to a client."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nemo_rl.data_plane.interfaces import DataPlaneClient, DataPlaneRuntimeConfig, LocalDataPlaneConfig
from nemo_rl.utils.errors import UserError


def data_plane_enabled(cfg: DataPlaneRuntimeConfig | Mapping[str, Any] | None) -> bool:
    """Whether rows go through a data plane; False for None."""
    return cfg is not None and bool(cfg.get("enabled", False))


def build_data_plane_client(
    cfg: DataPlaneRuntimeConfig | Mapping[str, Any] | None, *, bootstrap: bool = True
) -> DataPlaneClient:
    """The client that `data_plane` asks for, measured when `data_plane.observability.enabled` is set.

    Args:
        bootstrap: True in the driver, which starts what the clients of all processes share; False in the workers,
            which attach to it. A local plane shares nothing, so there each call makes a plane of its own.

    Raises:
        UserError: the section is missing or disabled, or names a data plane that does not exist.
    """
    if cfg is None or not data_plane_enabled(cfg):
        raise UserError("data_plane is missing or has enabled: false; set `data_plane: {enabled: true, impl: local}`")
    impl = cfg.get("impl")
    if impl != "local":
        raise UserError(f"data_plane.impl is {impl!r}, which is not available; use `local`")
    # Imported here because a config can be checked without torch.
    from nemo_rl.data_plane.adapters.local import LocalDataPlaneClient
    from nemo_rl.data_plane.observability import MetricsDataPlaneClient

    local = cfg if isinstance(cfg, LocalDataPlaneConfig) else LocalDataPlaneConfig(**dict(cfg))
    client = LocalDataPlaneClient(local)
    if local.observability is not None and local.observability.enabled:
        return MetricsDataPlaneClient(client)
    return client

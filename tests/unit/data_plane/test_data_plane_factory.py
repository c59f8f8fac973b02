"""From config to client, and that the package imports without torch."""

import importlib.util
import os
import subprocess
import sys

import pydantic
import pytest

from nemo_rl.data_plane import MetricsDataPlaneClient, build_data_plane_client
from nemo_rl.data_plane.adapters.local import LocalDataPlaneClient
from nemo_rl.data_plane.factory import data_plane_enabled, maybe_configure_data_plane_env
from nemo_rl.data_plane.interfaces import (
    DataPlaneConfig,
    LocalDataPlaneConfig,
    MooncakeCpuConfig,
    SimpleStorageConfig,
    backend_config,
)
from nemo_rl.utils.errors import UserError


def test_enabled() -> None:
    assert data_plane_enabled(LocalDataPlaneConfig())
    assert data_plane_enabled({"enabled": True, "impl": "local"})
    assert not data_plane_enabled({"enabled": False})
    assert not data_plane_enabled(None)


def test_the_local_plane_with_and_without_counters() -> None:
    assert isinstance(build_data_plane_client(LocalDataPlaneConfig()), LocalDataPlaneClient)
    measured = build_data_plane_client(
        {"enabled": True, "impl": "local", "max_partitions": 1, "observability": {"enabled": True}}, bootstrap=False
    )
    assert isinstance(measured, MetricsDataPlaneClient)
    measured.register_partition("p", ["x"], 1, [])
    with pytest.raises(RuntimeError, match="max_partitions is 1"):
        measured.register_partition("q", ["x"], 1, [])


def test_refusals_name_the_key() -> None:
    for cfg in (None, {"enabled": False, "impl": "local"}):
        with pytest.raises(UserError, match="data_plane is missing or has enabled: false"):
            build_data_plane_client(cfg)
    with pytest.raises(UserError, match=r"data_plane\.impl is 'redis', .* \['local', 'transfer_queue'\]"):
        build_data_plane_client({"enabled": True, "impl": "redis"})
    with pytest.raises(UserError, match="runs inside Ray"):
        build_data_plane_client(DataPlaneConfig())
    if importlib.util.find_spec("mooncake") is None:
        with pytest.raises(UserError, match="pip install mooncake-transfer-engine"):
            build_data_plane_client(DataPlaneConfig(backend="mooncake_cpu"))
    with pytest.raises(pydantic.ValidationError):
        LocalDataPlaneConfig(max_partitions=0)


def test_the_section_of_the_chosen_backend() -> None:
    cfg = DataPlaneConfig(simple=SimpleStorageConfig(num_storage_units=3))
    assert (cfg["backend"], cfg.get("impl"), cfg.get("nope")) == ("simple", "transfer_queue", None)
    assert backend_config(cfg) == SimpleStorageConfig(num_storage_units=3, storage_capacity=1_000_000)
    assert isinstance(backend_config(DataPlaneConfig(backend="mooncake_cpu")), MooncakeCpuConfig)
    for wrong in ({"backend": "disk"}, {"storage_capacity": 1}, {"claim_meta_poll_interval_s": 0}):
        with pytest.raises(pydantic.ValidationError):
            DataPlaneConfig(**wrong)


def test_the_environment_of_the_actors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TQ_LOGGING_LEVEL", raising=False)
    for cfg in (None, LocalDataPlaneConfig(), DataPlaneConfig(enabled=False)):
        maybe_configure_data_plane_env(cfg)
        assert "TQ_LOGGING_LEVEL" not in os.environ
    monkeypatch.setenv("TQ_LOGGING_LEVEL", "DEBUG")
    maybe_configure_data_plane_env(DataPlaneConfig())
    assert os.environ["TQ_LOGGING_LEVEL"] == "DEBUG"
    with pytest.raises(UserError, match=r"data_plane\.impl is 'redis'"):
        maybe_configure_data_plane_env({"enabled": True, "impl": "redis"})


def test_config_and_meta_import_without_torch() -> None:
    code = (
        "import sys; from nemo_rl.data_plane import DataPlaneClient, KVBatchMeta; "
        "from nemo_rl.data_plane.factory import build_data_plane_client; "
        "from nemo_rl.data_plane.control import ControlOnlyClient; "
        "sys.exit(bool({'torch', 'tensordict', 'ray'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0

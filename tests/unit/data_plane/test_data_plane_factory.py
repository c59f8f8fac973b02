"""From config to client, and that the package imports without torch."""

import subprocess
import sys

import pydantic
import pytest

from nemo_rl.data_plane import MetricsDataPlaneClient, build_data_plane_client
from nemo_rl.data_plane.adapters.local import LocalDataPlaneClient
from nemo_rl.data_plane.factory import data_plane_enabled
from nemo_rl.data_plane.interfaces import LocalDataPlaneConfig
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
    with pytest.raises(UserError, match=r"data_plane\.impl is 'transfer_queue'"):
        build_data_plane_client({"enabled": True, "impl": "transfer_queue"})
    with pytest.raises(pydantic.ValidationError):
        LocalDataPlaneConfig(max_partitions=0)


def test_config_and_meta_import_without_torch() -> None:
    code = (
        "import sys; from nemo_rl.data_plane import DataPlaneClient, KVBatchMeta; "
        "from nemo_rl.data_plane.factory import build_data_plane_client; "
        "sys.exit(bool({'torch', 'tensordict', 'ray'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0

"""What `check_cluster` finds without starting anything. GPU counts are covered on machines with GPUs only."""

import subprocess
import sys

import pytest

from nemo_rl.distributed import config as cluster_config
from nemo_rl.distributed.config import ClusterConfig, available_cores, check_cluster

no_gpu = pytest.mark.skipif(cluster_config.local_gpus() > 0, reason="counts CPU cores")


def test_the_defaults_have_no_problem() -> None:
    assert check_cluster(ClusterConfig()) == []


@no_gpu
def test_more_workers_than_cores_need_oversubscribe() -> None:
    wanted = available_cores() + 1
    [problem] = check_cluster(ClusterConfig(gpus_per_node=wanted))
    assert f"{wanted} workers" in problem and f"{wanted - 1} CPU cores" in problem
    assert "cluster.gpus_per_node" in problem and "cluster.oversubscribe" in problem
    assert check_cluster(ClusterConfig(gpus_per_node=wanted, oversubscribe=True)) == []
    assert check_cluster(ClusterConfig(gpus_per_node=wanted, address="10.0.0.1:6379")) == [], "another machine's cores"


def test_all_problems_come_at_once() -> None:
    config = ClusterConfig(num_nodes=2, master_port_range_low=2000, master_port_range_high=1400, segment_size=16)
    problems = check_cluster(config)
    assert len(problems) == 3
    for key in ("cluster.num_nodes", "cluster.master_port_range_low", "cluster.segment_size"):
        assert any(problem.startswith(key) for problem in problems), key


@pytest.mark.parametrize("address", ["auto", "nonsense", "ray://10.0.0.1:10001", "10.0.0.1:", ":6379"])
def test_an_address_is_host_and_port(address: str) -> None:
    [problem] = check_cluster(ClusterConfig(address=address))
    assert "cluster.address" in problem and address in problem and "host:port" in problem


def test_half_a_port_range() -> None:
    [problem] = check_cluster(ClusterConfig(master_port_range_low=1400))
    assert "both or neither" in problem


def test_reading_a_config_imports_neither_ray_nor_torch() -> None:
    code = "import sys, nemo_rl.distributed.config as c; c.ClusterConfig(); print({'ray', 'torch'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"

"""Start, isolation and end of Ray. The slow tests run drivers of their own; a joined cluster of several nodes is not
covered."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import ray
from ray import cloudpickle

from nemo_rl.distributed.virtual_cluster import ClusterConfig, RaySession, RayVirtualCluster, init_ray
from nemo_rl.utils.errors import ConfigError, UserError

DRIVER = """
import sys
from nemo_rl.distributed.virtual_cluster import ClusterConfig, RayVirtualCluster, init_ray
from nemo_rl.distributed.worker_groups import RayWorkerBuilder, RayWorkerGroup

config = ClusterConfig(gpus_per_node=2, oversubscribe=True, start_timeout_s=120)
with init_ray(config) as session:
    cluster = RayVirtualCluster.from_config(config)
    group = RayWorkerGroup(cluster, RayWorkerBuilder("distributed_workers.TorchWorker"), name_prefix="w")
    print("ready", session.worker_logs.parent.parent, flush=True)
    sys.stdin.readline()
    print("sum", group.get_all_worker_results(group.run_all_workers_single_data("sum_of", value=1.0)), flush=True)
"""


def start_driver() -> tuple[subprocess.Popen, str]:
    """A driver that waits for a line after its workers have started, and the folder of its Ray."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )
    assert driver.stdout is not None
    word, _, folder = driver.stdout.readline().strip().partition(" ")
    assert word == "ready", word
    return driver, folder


def processes_of(driver_pid: int, folder: str) -> set[int]:
    """Descendants of the driver, and everything whose command line names its Ray's folder."""
    parents, found = {}, set()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            if folder in (entry / "cmdline").read_text():
                found.add(int(entry.name))
        except OSError:
            # It ended while we looked.
            continue
    family = {driver_pid}
    while grown := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= grown
    return (found | family) - {driver_pid}


def alive(pids: set[int]) -> set[int]:
    return {
        pid for pid in pids if Path(f"/proc/{pid}/stat").exists() and " Z " not in Path(f"/proc/{pid}/stat").read_text()
    }


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=lambda number: number.name)
def test_a_killed_driver_leaves_no_process(number: signal.Signals) -> None:
    driver, folder = start_driver()
    family = processes_of(driver.pid, folder)
    assert len(family) >= 5, "control service, node service, its helpers and two workers"
    os.kill(driver.pid, number)
    driver.wait(timeout=60)
    deadline = time.monotonic() + 30
    while (left := alive(family)) and time.monotonic() < deadline:
        time.sleep(0.5)
    assert left == set(), [Path(f"/proc/{pid}/cmdline").read_text() for pid in left]
    assert not Path(folder).exists()


@pytest.mark.slow
def test_two_private_rays_do_not_disturb_each_other() -> None:
    first, first_folder = start_driver()
    second, second_folder = start_driver()
    assert first_folder != second_folder
    second.kill()
    second.wait(timeout=30)
    out, _ = first.communicate("go\n", timeout=60)
    assert out.strip() == "sum [3.0, 3.0]" and first.returncode == 0
    assert not Path(first_folder).exists()


@pytest.mark.slow
def test_close_gives_back_environment_folder_and_logs(tmp_path: Path) -> None:
    """In a process of its own: the session of the other tests must stay."""
    code = f"""
import os, ray
from nemo_rl.distributed.virtual_cluster import ClusterConfig, init_ray
def ray_environment(): return {{k: v for k, v in os.environ.items() if k.startswith("RAY_")}}
before = ray_environment()
for _ in range(2):
    with init_ray(ClusterConfig(), log_dir={str(tmp_path)!r}) as session:
        folder = session.worker_logs.parent.parent
        @ray.remote(num_cpus=0)
        def shout(): print("hello from a worker")
        ray.get(shout.remote())
        assert session.private and session.address and os.environ["RAY_AUTH_MODE"] == "token"
    session.close()
    assert not folder.exists() and ray_environment() == before
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", ""), "nothing reaches the terminal"
    assert any("hello from a worker" in path.read_text() for path in (tmp_path / "workers").iterdir())


def test_the_private_ray_wants_a_token(ray_session: RaySession) -> None:
    code = f"import ray; ray.init(address={ray_session.address!r}, logging_level='ERROR')"
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_AUTH")}
    environment["RAY_gcs_server_port_wait_time_s"] = "1"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode != 0 and "token" in done.stderr.lower()
    done = subprocess.run(
        [sys.executable, "-c", code], env=dict(os.environ), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_nothing_of_ray_polls_for_nobody(ray_session: RaySession) -> None:
    assert ray_session.worker_logs is not None
    folder = str(ray_session.worker_logs.parent.parent)
    lines = []
    for pid in processes_of(os.getpid(), folder):
        with contextlib.suppress(OSError):
            lines.append(Path(f"/proc/{pid}/cmdline").read_text())
    assert any("raylet" in line for line in lines)
    assert not [line for line in lines if any(name in line for name in ("log_monitor", "dashboard.py", "monitor.py"))]


def test_a_second_session_in_one_process_is_refused(ray_session: RaySession) -> None:
    with pytest.raises(UserError, match="already running"):
        init_ray(ClusterConfig())
    assert ray.is_initialized()


def test_problems_are_found_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match=r"cluster\.num_nodes"):
        init_ray(ClusterConfig(num_nodes=2))


def test_nothing_listens_at_the_address() -> None:
    with socket.socket() as bound_but_not_listening:
        bound_but_not_listening.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{bound_but_not_listening.getsockname()[1]}"
        code = f"""
from nemo_rl.distributed.virtual_cluster import ClusterConfig, UserError, init_ray
try:
    init_ray(ClusterConfig(address={address!r}))
except UserError as error:
    print(error, end="")
"""
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False)
    assert done.stdout.startswith(f"cluster.address: no Ray to join at {address} (") and "refused" in done.stdout
    assert done.stderr == ""


def test_ray_never_starts_by_itself() -> None:
    code = "import nemo_rl.distributed, ray; ray.put(1)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode != 0 and "has not been started" in done.stderr


def test_places_that_do_not_exist(ray_session: RaySession) -> None:
    cluster = RayVirtualCluster([8], use_gpus=True, name="train", start_timeout_s=1.0)
    with pytest.raises(UserError) as caught:
        cluster.get_placement_groups()
    text = str(caught.value)
    for part in ("no room for train", "8 GPU", "0 GPU", "cluster.gpus_per_node", "cluster.start_timeout_s"):
        assert part in text
    # The failed attempt holds nothing: the same CPUs can be had at once.
    other = RayVirtualCluster([2], use_gpus=False, start_timeout_s=10.0)
    other.get_placement_groups()
    other.shutdown()


@pytest.mark.parametrize(
    ("counts", "options", "says"),
    [([], {}, "at least one"), ([2, 0], {}, "at least one"), ([9], {"num_gpus_per_node": 8}, "num_gpus_per_node=8")],
)
def test_refused_counts(counts: list[int], options: dict, says: str) -> None:
    with pytest.raises(UserError, match=says):
        RayVirtualCluster(counts, **options)


def test_only_the_creator_gives_places_back(cluster: RayVirtualCluster) -> None:
    copy = cloudpickle.loads(cloudpickle.dumps(cluster))
    assert copy.get_placement_groups() == cluster.get_placement_groups()
    assert (copy.world_size(), copy.node_count()) == (4, 1)
    copy.shutdown()
    assert cluster.get_placement_groups()[0].wait(5), "still reserved"

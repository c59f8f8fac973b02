"""Start or join Ray, and leave nothing behind.

A private Ray shares nothing with another one on the machine: its own folder, its own token, system-chosen ports, and
its processes end when the driver dies, see `reaper.py`.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import ray
from ray import _raylet
from ray._private import worker as ray_worker
from ray.exceptions import RayError

from nemo_rl.distributed.config import ClusterConfig, check_cluster
from nemo_rl.utils.errors import ConfigError, UserError

logger = logging.getLogger(__name__)

# One CPU each for the controller and for the three actors of TransferQueue, which hang without; the rest is room for
# actors a user adds.
EXTRA_ACTORS = 8

_LOOPBACK = "127.0.0.2"
_CONNECT_S = 10.0

# How often Ray tries to reach a control service, 40 s each; its default of 20 makes that a quarter of an hour.
_CONNECT_TRIES = "RAY_gcs_server_port_wait_time_s"


class _Reaper:
    """The process that cleans up when this one closes the session, or is gone."""

    def __init__(self, folder: Path, token: str):
        # A plain descriptor, so that only `release` and the end of this process close it, never garbage collection.
        read, self._write = os.pipe()
        script = Path(__file__).with_name("reaper.py")
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(script), str(folder)], stdin=read, start_new_session=True
        )
        os.close(read)
        os.write(self._write, f"{token}\n".encode())

    def release(self) -> None:
        """Let it work, and wait until it has. May be called twice."""
        if self._write >= 0:
            os.close(self._write)
            self._write = -1
            self._process.wait()


@dataclass
class RaySession:
    """A connection to Ray. `close()` it, or use it as a context manager.

    Attributes:
        private: whether this process started that Ray, and stops it with `close()`.
        address: `host:port` of the cluster's control service.
        worker_logs: where the standard output and error of worker processes go; None for a joined cluster.
    """

    private: bool
    address: str
    worker_logs: Path | None
    _log_dir: Path | None = None
    _reaper: _Reaper | None = None
    _environment: dict[str, str | None] = field(default_factory=dict)

    def close(self) -> None:
        """Disconnect, and stop a private Ray with all its processes. May be called twice."""
        ray.shutdown()
        if self._log_dir is not None and self.worker_logs is not None:
            _keep_worker_logs(self.worker_logs, self._log_dir)
        if self._reaper is not None:
            self._reaper.release()
        for name, value in self._environment.items():
            _set_environment(name, value)
        if self._environment:
            _refresh_authentication()
        self._environment = {}

    def __enter__(self) -> RaySession:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def init_ray(
    cluster: ClusterConfig,
    *,
    log_dir: str | Path | None = None,
    num_extra_actors: int = EXTRA_ACTORS,
    debug: bool = False,
) -> RaySession:
    """Connect this process to Ray: a private one (`cluster.address` null) or the one at `cluster.address`.

    A private Ray has one logical CPU per worker and `num_extra_actors` more, whatever the machine has: CPU workers
    share cores by their thread counts, not by reservation. It requires a random token from everything that talks to
    it, has no dashboard, and dies with this process, SIGKILL included.

    Args:
        log_dir: `close()` copies what workers wrote to their standard output and error into `log_dir/workers`.
        debug: show workers' output on this process's terminal as well.

    Raises:
        ConfigError: the cluster section can't be met, see `check_cluster`.
        UserError: Ray already runs in this process, or nothing answers at `cluster.address`.
    """
    if problems := check_cluster(cluster):
        raise ConfigError(problems)
    if ray.is_initialized():
        raise UserError("Ray is already running in this process; close that session first")
    logs = Path(log_dir) if log_dir is not None else None
    on_terminate = signal.getsignal(signal.SIGTERM)
    try:
        if cluster.address is None:
            return _start_private(cluster, logs, num_extra_actors, debug)
        return _join(cluster.address, debug)
    finally:
        # Ray takes SIGTERM over, to print a native stack and leave without the caller's clean-up.
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, on_terminate)


def _start_private(cluster: ClusterConfig, log_dir: Path | None, num_extra_actors: int, debug: bool) -> RaySession:
    token = secrets.token_hex(32)
    changes = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": token,
        "RAY_enable_metrics_collection": "0",
        # Ray would run workers at the lowest priority but four. Threads that meet at every operation then all wait for
        # the one whose core another program uses.
        "RAY_worker_niceness": "0",
    }
    before = {name: os.environ.get(name) for name in changes}
    folder = _make_folder()
    session = RaySession(private=True, address="", worker_logs=None, _log_dir=log_dir, _environment=before)
    session._reaper = _Reaper(folder, token)
    try:
        for name, value in changes.items():
            _set_environment(name, value)
        _refresh_authentication()
        ray.init(
            address="local",
            num_cpus=cluster.gpus_per_node * cluster.num_nodes + num_extra_actors,
            include_dashboard=False,
            log_to_driver=debug,
            logging_level=logging.INFO if debug else logging.ERROR,
            _node_ip_address=_loopback_address(),
            _temp_dir=str(folder),
        )
        if not debug:
            _stop_spare_services()
    except BaseException:
        session.close()
        raise
    session.address = ray.get_runtime_context().gcs_address
    session.worker_logs = folder / "session_latest" / "logs"
    return session


def _join(address: str, debug: bool) -> RaySession:
    host, _, port = address.rpartition(":")
    before = os.environ.get(_CONNECT_TRIES)
    _set_environment(_CONNECT_TRIES, "1")
    try:
        # Ray itself would keep trying, and writing to the terminal, where nothing listens.
        socket.create_connection((host, int(port)), timeout=_CONNECT_S).close()
        ray.init(address=address, log_to_driver=debug, logging_level=logging.INFO if debug else logging.ERROR)
    except (OSError, RuntimeError, ValueError, RayError) as error:
        ray.shutdown()
        cause = str(error).strip().splitlines()[0]
        raise UserError(
            f"cluster.address: no Ray to join at {address} ({cause}); start one with `ray start --head`, "
            "or set cluster.address to null for a private one"
        ) from error
    finally:
        _set_environment(_CONNECT_TRIES, before)
    return RaySession(private=False, address=ray.get_runtime_context().gcs_address, worker_logs=None)


def _make_folder() -> Path:
    """A folder of our own. Ray's sockets lie in it and their paths may have 107 bytes, so a long TMPDIR is not used."""
    default = tempfile.gettempdir()
    return Path(tempfile.mkdtemp(prefix="onehop-ray-", dir=default if len(default) <= 24 else "/tmp"))


def _loopback_address() -> str | None:
    """An address that only this machine reaches, or None where there is no second loopback address.

    Ray replaces 127.0.0.1 by the address of the network card, which changes when a laptop moves between networks and
    is reachable from outside; it keeps 127.0.0.2, which Linux answers on and macOS does not.
    """
    with socket.socket() as probe:
        try:
            probe.bind((_LOOPBACK, 0))
        except OSError:
            return None
    return _LOOPBACK if sys.platform == "linux" else None


def _set_environment(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


def _stop_spare_services() -> None:
    """Ends the parts of a private Ray that nothing asks: the reader of logs, the dashboard's state, the autoscaler.

    Idle they take 1.5 % of a core by polling, and on few cores whatever takes a core from one thread of an engine
    holds up the others.
    """
    node = getattr(ray_worker, "_global_node", None)
    for name in ("kill_log_monitor", "kill_dashboard", "kill_monitor"):
        if stop := getattr(node, name, None):
            stop(check_alive=False)


def _refresh_authentication() -> None:
    """Ray reads mode and token once per process, at import; a process that starts Ray twice needs the new ones."""
    # A compiled module without type information.
    getattr(_raylet, "Config").initialize("")  # noqa: B009
    getattr(_raylet, "AuthenticationTokenLoader").instance().reset_cache()  # noqa: B009


def _keep_worker_logs(source: Path, log_dir: Path) -> None:
    for path in [*source.glob("worker-*.out"), *source.glob("worker-*.err")]:
        if path.stat().st_size > 0:
            target = log_dir / "workers"
            target.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target / path.name)

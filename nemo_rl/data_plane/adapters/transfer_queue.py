"""The data plane that all processes of a run share, over TransferQueue. Nothing else imports that package.

A controller actor knows who has written and who has been given what, storage actors keep the rows; clients talk to
both over sockets of their own, Ray only starts them. Rows travel as bytes, see `row_codec`.

TransferQueue's own `init` keeps one plane per process and per Ray cluster under a fixed name, and its actors reserve a
CPU each and wait without a word where there is none. Here the plane has a namespace of the Ray job, so that runs which
share a cluster have planes of their own, and its actors reserve nothing.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import subprocess
import time
from collections.abc import Coroutine, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import resources
from typing import Any, TypeVar
from uuid import uuid4

import ray
import ray.util
from omegaconf import OmegaConf
from ray.exceptions import GetTimeoutError, RayActorError, RayError
from tensordict import NonTensorData, TensorDict
from torch import Tensor
from transfer_queue.client import AsyncTransferQueueClient
from transfer_queue.controller import TransferQueueController
from transfer_queue.sampler import SequentialSampler
from transfer_queue.storage.bootstrap import StorageBootstrapProvider
from transfer_queue.storage.managers.base import StorageManagerFactory
from transfer_queue.storage.managers.simple_storage_manager import AsyncSimpleStorageManager
from transfer_queue.storage.simple_storage import SimpleStorageUnit
from transfer_queue.utils.common import get_node_round_robin_scheduling_strategies

from nemo_rl.data_plane.adapters.event_loop import EventLoopThread, UnansweredError
from nemo_rl.data_plane.adapters.queue_requests import QueueRequests, RowRecords
from nemo_rl.data_plane.adapters.row_codec import Row, decode_rows, encode_rows, payload_bytes
from nemo_rl.data_plane.codec import column_names
from nemo_rl.data_plane.interfaces import (
    DataPlaneClient,
    DataPlaneConfig,
    KVBatchMeta,
    MooncakeCpuConfig,
    SimpleStorageConfig,
    backend_config,
)
from nemo_rl.data_plane.schema import INPUT_LENGTHS
from nemo_rl.data_plane.traffic import PROCESS_TRAFFIC
from nemo_rl.utils.errors import RunError, UserError

_Result = TypeVar("_Result")

_CONTROLLER_NAME = "data_plane_controller"
_POLL_S = 0.1
_PROBE_S = 2.0

if "TQ_LOGGING_LEVEL" not in os.environ:
    # It warns about every id that a read does not find; here the caller gets an error that says so.
    for _name in [name for name in logging.root.manager.loggerDict if name.startswith("transfer_queue")]:
        logging.getLogger(_name).setLevel(logging.ERROR)


class PlaneUnansweredError(RunError, TimeoutError):
    """A call that the plane's actors did not answer in time.

    Reads, writes and clears may be repeated; a claim may have moved the task's cursor.
    """


def _plain_class(actor_class: Any) -> Any:
    """The class that Ray made an actor class of."""
    return actor_class.__ray_metadata__.modified_class.__ray_actor_class__


@contextmanager
def _node_address(host: str | None) -> Generator[None]:
    """Ray names `host` as the address of this node; with None its own.

    TransferQueue's actors listen on what Ray names when they start, and take no argument for it.
    """
    answer = ray.util.get_node_ip_address
    if host is not None:
        setattr(ray.util, "get_node_ip_address", lambda *_: host)  # noqa: B010  a function is no attribute to assign
    try:
        yield
    finally:
        setattr(ray.util, "get_node_ip_address", answer)  # noqa: B010


class DataPlaneController(_plain_class(TransferQueueController)):
    """TransferQueue's controller in its actor process, listening on `host`, or on the node's address for None."""

    def __init__(self, host: str | None) -> None:
        with _node_address(host):
            super().__init__(sampler=SequentialSampler, polling_mode=True)


class DataPlaneStorage(_plain_class(SimpleStorageUnit)):
    """TransferQueue's storage in its actor process, listening on `host`, or on the node's address for None."""

    def __init__(self, host: str | None, config: dict[str, Any]) -> None:
        with _node_address(host):
            super().__init__(config)


@StorageManagerFactory.register("RowBytes")
class _RowBytesManager(AsyncSimpleStorageManager):
    """Hands columns out as lists of `bytes`; the base class would wrap each row in an object of its own."""

    @staticmethod
    def _pack_field_values(values: list[Any]) -> Any:
        return NonTensorData(values, batch_size=[len(values)])


@dataclass(frozen=True)
class _Address:
    """What a client needs to connect: the controller's sockets, and how it reaches the rows."""

    controller: Any
    manager: str
    manager_config: dict[str, Any]


@dataclass
class _Actors:
    """The actors of a plane; those who started it hold them, and they end with their holder."""

    controller: Any
    storage: list[Any] = field(default_factory=list)
    mooncake_master: subprocess.Popen | None = None

    def kill(self) -> None:
        if self.mooncake_master is not None:
            self.mooncake_master.terminate()
        if ray.is_initialized():
            for actor in (*self.storage, self.controller):
                ray.kill(actor)


class TQDataPlaneClient(DataPlaneClient):
    """A client of the plane of this Ray job; any number of processes and threads may have one.

    **Kinds.** A column comes back as it was written, bit for bit and whatever its lengths: dense or jagged, any dtype,
    rows of plain data as well. Rows of one column that were written as different kinds can't be read together.

    **Order.** Rows come in the order of the ids asked for. Claims follow no promised order.

    **Waiting.** Only `claim_meta` waits for data. No call waits for the plane's actors longer than
    `data_plane.ack_timeout_ms`; then `PlaneUnansweredError` says so.

    Partitions need no declaration except for `claim_meta`, `check_consumption_status` and `finish_partition`; declaring
    one again keeps its rows. Clear a row in one process only, when nobody reads it any more.

    Args:
        bootstrap: start the plane, which ends when this client is closed or its process ends; else wait up to
            `data_plane.attach_timeout_s` until another process of the job has done so.

    Raises:
        UserError: no Ray here, a plane that is there already or not there, or a backend that is not installed.
        RunError: the actors did not start.
    """

    def __init__(self, cfg: DataPlaneConfig | Mapping[str, Any], *, bootstrap: bool) -> None:
        self._cfg = cfg if isinstance(cfg, DataPlaneConfig) else DataPlaneConfig(**dict(cfg))
        _check_backend(self._cfg)
        if not ray.is_initialized():
            raise UserError("data_plane.impl transfer_queue runs inside Ray, which this process has not started")
        self._closed = False
        self._actors: _Actors | None = None
        if bootstrap:
            self._actors, address = _start(self._cfg)
        else:
            address = _attach(self._cfg)
        self._where = f"{address.controller.ip}:{address.controller.ports['request_handle_socket']}"
        self._queue = AsyncTransferQueueClient(f"client_{uuid4().hex[:12]}", address.controller, zmq_io_threads=1)
        try:
            self._greet_controller(address)
        except BaseException:
            self._queue.close()
            if self._actors is not None:
                self._actors.kill()
            raise
        self._requests = QueueRequests(self._queue, self._queue.storage_manager)
        self._loop = EventLoopThread("data-plane-client")

    def register_partition(
        self, partition_id: str, fields: Sequence[str], num_samples: int, consumer_tasks: Sequence[str]
    ) -> None:
        """Declares a partition; its columns need no room in advance, so `fields` is for the record.

        Raises:
            ValueError: `num_samples < 1`, or a name that the adapter keeps for itself.
        """
        if num_samples < 1 or partition_id.startswith("__"):
            raise ValueError(f"partition {partition_id!r} of {num_samples} rows: needs at least 1 and no leading __")
        declared = {
            "num_samples": num_samples,
            "tasks": list(consumer_tasks),
            "fields": list(fields),
            "finished": False,
        }
        self._run("register", partition_id, self._requests.declare(partition_id, declared))

    def claim_meta(
        self,
        partition_id: str,
        task_name: str,
        required_fields: Sequence[str],
        batch_size: int,
        blocking: bool = True,
        timeout_s: float = 60.0,
    ) -> KVBatchMeta:
        """See `DataPlaneClient.claim_meta`; no row is handed out twice, whichever processes claim.

        Raises:
            ValueError: no columns named, or `batch_size < 1`.
        """
        if not required_fields or batch_size < 1:
            raise ValueError(f"partition {partition_id!r}: a claim of {batch_size} rows with {list(required_fields)}")
        claim = self._requests.claim(
            partition_id,
            task_name,
            list(dict.fromkeys(required_fields)),
            batch_size,
            limit_s=timeout_s if blocking else None,
            poll_s=self._cfg.claim_meta_poll_interval_s,
        )
        records = self._run("claim", partition_id, claim, waits_s=timeout_s if blocking else 0.0)
        return _meta(partition_id, task_name, records)

    def check_consumption_status(self, partition_id: str, task_names: Sequence[str]) -> bool:
        """See `DataPlaneClient.check_consumption_status`; rows cleared in the meantime count as never given."""
        return self._run("check", partition_id, self._requests.is_consumed(partition_id, task_names))

    def put_samples(
        self,
        sample_ids: Sequence[str],
        partition_id: str,
        fields: TensorDict | None = None,
        tags: Sequence[Mapping[str, Any]] | None = None,
    ) -> KVBatchMeta:
        """Writes or rewrites columns, and adds tags to those that the rows have. All columns of a call travel together.

        Raises:
            TypeError: a column that is neither a tensor nor rows of plain data.
            ValueError: also ids given more than once.
        """
        if fields is None and tags is None:
            raise ValueError(f"partition {partition_id!r}: neither columns nor tags to write")
        for count in (None if fields is None else fields.batch_size.numel(), None if tags is None else len(tags)):
            if count is not None and count != len(sample_ids):
                raise ValueError(f"partition {partition_id!r}: {count} rows for {len(sample_ids)} sample ids")
        if len(set(sample_ids)) != len(sample_ids):
            raise ValueError(f"partition {partition_id!r}: sample ids given more than once")
        names = [] if fields is None else column_names(fields)
        if not sample_ids:
            return _meta(partition_id, None, RowRecords([], [], names))
        columns = {} if fields is None else {name: encode_rows(name, fields.get(name)) for name in names}
        put = self._requests.put(list(sample_ids), partition_id, columns, None if tags is None else [*map(dict, tags)])
        records = RowRecords(list(sample_ids), self._run("write", partition_id, put), names)
        PROCESS_TRAFFIC.add(written=sum(map(payload_bytes, columns.values())))
        lengths = None if fields is None else fields.get(INPUT_LENGTHS, None)
        return _meta(partition_id, None, records, lengths.tolist() if isinstance(lengths, Tensor) else None)

    def get_samples(self, sample_ids: Sequence[str], partition_id: str, select_fields: Sequence[str]) -> TensorDict:
        """See `DataPlaneClient.get_samples`; the tensors are the caller's own.

        Raises:
            ValueError: no ids or no columns, or rows of a column that were written as different kinds.
        """
        names = list(dict.fromkeys(select_fields))
        if not names or not sample_ids:
            raise ValueError(f"partition {partition_id!r}: {len(sample_ids)} rows and columns {names} to read")
        stored = self._run("read", partition_id, self._requests.get(list(sample_ids), partition_id, names))
        columns = {name: _row_list(stored.get(name)) for name in names}
        PROCESS_TRAFFIC.add(read=sum(map(payload_bytes, columns.values())))
        decoded = {name: decode_rows(name, rows) for name, rows in columns.items()}
        return TensorDict(decoded, batch_size=[len(sample_ids)])

    def get_meta(self, sample_ids: Sequence[str], partition_id: str) -> KVBatchMeta:
        if not sample_ids:
            return _meta(partition_id, None, RowRecords([], [], []))
        records = self._run("look up", partition_id, self._requests.describe(list(sample_ids), partition_id))
        return _meta(partition_id, None, records)

    def finish_partition(self, partition_id: str) -> None:
        async def finish() -> None:
            await self._requests.declaration(partition_id)
            await self._requests.declare(partition_id, {"finished": True})

        self._run("finish", partition_id, finish())

    def list_sample_ids(self, partition_id: str) -> list[str]:
        return self._run("list", partition_id, self._requests.list_ids(partition_id))

    def clear_samples(self, sample_ids: Sequence[str] | None, partition_id: str) -> None:
        if sample_ids is None:
            self._run("clear", partition_id, self._requests.clear_partition(partition_id))
        elif sample_ids:
            self._run("clear", partition_id, self._requests.clear(list(sample_ids), partition_id))

    def supports_checkpointing(self) -> bool:
        """True: rows can be written to files and put back, see `row_files`."""
        return True

    def close(self) -> None:
        """Leaves the plane, and ends it where this client started it. May be called twice."""
        if self._closed:
            return
        self._closed = True
        # The sockets belong to the loop's thread: closing them beside it is not safe, so a stuck one keeps them.
        if self._loop.close():
            self._queue.close()
        if self._actors is not None:
            self._actors.kill()

    def _greet_controller(self, address: _Address) -> None:
        """Connects; TransferQueue gives up after three seconds, which is short on a machine that starts a run."""
        deadline = time.monotonic() + self._cfg.ack_timeout_ms / 1000
        while True:
            try:
                return self._queue.initialize_storage_manager(address.manager, dict(address.manager_config))
            except TimeoutError as error:
                if time.monotonic() > deadline:
                    raise RunError(
                        f"the data plane's controller at {self._where} can't be reached from this process; on several "
                        "nodes set data_plane.loopback_only to false"
                    ) from error

    def _run(
        self, action: str, partition_id: str, request: Coroutine[Any, Any, _Result], *, waits_s: float = 0.0
    ) -> _Result:
        if self._closed:
            request.close()
            raise RuntimeError("the data plane is closed")
        limit_s = self._cfg.ack_timeout_ms / 1000
        try:
            return self._loop.run(request, timeout_s=waits_s + limit_s)
        except UnansweredError as error:
            raise PlaneUnansweredError(
                f"data plane: the {action} of partition {partition_id!r} got no answer within {limit_s:g} s "
                f"(data_plane.ack_timeout_ms); the controller at {self._where} {_state_of_controller()}"
            ) from error


def _meta(
    partition_id: str, task_name: str | None, records: RowRecords, lengths: list[int] | None = None
) -> KVBatchMeta:
    tagged = [tag[INPUT_LENGTHS] for tag in records.tags if INPUT_LENGTHS in tag]
    return KVBatchMeta(
        partition_id=partition_id,
        task_name=task_name,
        sample_ids=records.sample_ids,
        fields=records.columns,
        sequence_lengths=lengths if lengths is not None else tagged if len(tagged) == len(records.tags) else None,
        tags=[dict(tag) for tag in records.tags],
    )


def _row_list(column: Any) -> list[Row]:
    """The rows of a column as the storage manager hands it out: one object for all of them, or one for each."""
    return column.data if isinstance(column, NonTensorData) and isinstance(column.data, list) else column.tolist()


def _namespace() -> str:
    """Of all processes of this Ray job, and of no other job in the cluster."""
    return f"data_plane_{ray.get_runtime_context().get_job_id()}"


def _start(cfg: DataPlaneConfig) -> tuple[_Actors, _Address]:
    host = _listen_host(cfg)
    deadline = time.monotonic() + cfg.attach_timeout_s
    actors = _Actors(_start_controller(host, deadline))
    backend = backend_config(cfg)
    try:
        if isinstance(backend, MooncakeCpuConfig):
            actors.mooncake_master, settings = _start_mooncake(backend)
            address = _Address(_info_of(actors.controller, deadline), "MooncakeStore", settings)
        else:
            # Both kinds of actors take seconds to import torch, so they do it side by side.
            actors.storage = _start_storage(backend, host)
            units = [_info_of(unit, deadline) for unit in actors.storage]
            address = _Address(
                _info_of(actors.controller, deadline), "RowBytes", {"zmq_info": {unit.id: unit for unit in units}}
            )
        _answer(actors.controller.store_config.remote(address), deadline)
    except BaseException:
        actors.kill()
        raise
    return actors, address


def _start_controller(host: str | None, deadline: float) -> Any:
    actor_class = ray.remote(num_cpus=0)(DataPlaneController)
    while True:
        try:
            return actor_class.options(name=_CONTROLLER_NAME, namespace=_namespace()).remote(host)
        except ValueError as error:
            # Ray frees the name of a plane that was closed a moment ago after its process has ended.
            if time.monotonic() > deadline or _state_of_controller() == "is alive":
                raise UserError(
                    "a data plane runs in this Ray job already; close its client first, or attach with bootstrap=False"
                ) from error
            time.sleep(_POLL_S)


def _start_storage(backend: SimpleStorageConfig, host: str | None) -> list[Any]:
    count = backend.num_storage_units or sum(bool(node["Alive"]) for node in ray.nodes())
    config = {"total_storage_size": backend.storage_capacity, "num_data_storage_units": count}
    actor_class = ray.remote(num_cpus=0)(DataPlaneStorage)
    places = get_node_round_robin_scheduling_strategies(count)
    return [actor_class.options(scheduling_strategy=place).remote(host, config) for place in places]


def _attach(cfg: DataPlaneConfig) -> _Address:
    deadline = time.monotonic() + cfg.attach_timeout_s
    while True:
        try:
            controller = ray.get_actor(_CONTROLLER_NAME, namespace=_namespace())
            address = ray.get(controller.get_config.remote(), timeout=max(deadline - time.monotonic(), _POLL_S))
        except (ValueError, RayActorError, GetTimeoutError):
            address = None
        if isinstance(address, _Address):
            return address
        if time.monotonic() > deadline:
            raise UserError(
                f"no data plane was started in this Ray job within {cfg.attach_timeout_s:g} s "
                "(data_plane.attach_timeout_s); the driver starts one with build_data_plane_client(cfg, bootstrap=True)"
            )
        time.sleep(_POLL_S)


def _info_of(actor: Any, deadline: float) -> Any:
    """Where an actor listens, once it does."""
    return _answer(actor.get_zmq_server_info.remote(), deadline)


def _answer(reference: Any, deadline: float) -> Any:
    try:
        return ray.get(reference, timeout=max(deadline - time.monotonic(), _POLL_S))
    except GetTimeoutError as error:
        raise RunError("the data plane's actors did not start within data_plane.attach_timeout_s") from error
    except RayError as error:
        raise RunError(f"an actor of the data plane did not start: {error}") from error


def _state_of_controller() -> str:
    try:
        controller = ray.get_actor(_CONTROLLER_NAME, namespace=_namespace())
        ray.get(controller.get_config.remote(), timeout=_PROBE_S)
    except (ValueError, RayActorError):
        return "has ended"
    except GetTimeoutError:
        return "does not answer Ray either"
    return "is alive"


def _listen_host(cfg: DataPlaneConfig) -> str | None:
    """The loopback address where that is enough and Ray's address of this node is another one."""
    nodes = [node for node in ray.nodes() if node["Alive"]]
    if cfg.loopback_only and len(nodes) > 1:
        raise UserError(f"data_plane.loopback_only: true, but the Ray cluster has {len(nodes)} nodes; set it to null")
    alone = len(nodes) == 1 if cfg.loopback_only is None else cfg.loopback_only
    return "127.0.0.1" if alone and not nodes[0]["NodeManagerAddress"].startswith("127.") else None


def _check_backend(cfg: DataPlaneConfig) -> None:
    if cfg.backend == "mooncake_cpu" and importlib.util.find_spec("mooncake") is None:
        raise UserError(
            "data_plane.backend: mooncake_cpu needs a package that is not installed; run "
            "`pip install mooncake-transfer-engine`, or set data_plane.backend to simple"
        )


def _start_mooncake(backend: MooncakeCpuConfig) -> tuple[subprocess.Popen, dict[str, Any]]:
    """Mooncake's master, started on this node, and what its clients need."""
    if subprocess.run(["pgrep", "-x", "mooncake_master"], capture_output=True, check=False).returncode == 0:
        raise UserError(
            "data_plane.backend: mooncake_cpu: a mooncake_master runs on this machine already, and TransferQueue would "
            "end it; stop it first, or set data_plane.backend to simple"
        )
    defaults = OmegaConf.load(str(resources.files("transfer_queue") / "config.yaml"))
    chosen = {"backend": {"storage_backend": "MooncakeStore", "MooncakeStore": backend.model_dump()}}
    conf: Any = OmegaConf.merge(defaults, chosen)
    provider = StorageBootstrapProvider.get_provider("MooncakeStore")
    assert provider is not None, "TransferQueue registers it where it is imported"
    master = provider(conf)
    settings = OmegaConf.to_container(conf.backend.MooncakeStore, resolve=True)
    assert isinstance(settings, dict)
    return master, {str(key): value for key, value in settings.items()}

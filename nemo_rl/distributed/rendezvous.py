"""How the workers of a group find each other: rank 0 listens on a port it already holds, the others connect."""

from __future__ import annotations

import os
import socket
from datetime import timedelta

import torch
import torch.distributed as dist

from nemo_rl.utils.errors import UserError


class DistributedWorker:
    """Base of a worker class that takes part in a process group. A plain class; the worker group hosts it in an actor.

    The constructor runs before the process group exists, so it must not use `torch.distributed`; the group then calls
    `bind_rendezvous` on rank 0 and `join_rendezvous` on everyone, and any method after that may.

    Attributes:
        rank: 0-based, over all workers of the group.
        world_size: number of workers of the group.
        local_rank: 0-based, among the group's workers of one node.
        device: `cuda:0` when Ray gave the worker a GPU (it shows each worker its own), else `cpu`.
    """

    def __init__(self) -> None:
        self.rank = int(os.environ["RANK"])
        self.world_size = int(os.environ["WORLD_SIZE"])
        self.local_rank = int(os.environ["LOCAL_RANK"])
        self.device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
        self._listener: socket.socket | None = None

    def ping(self) -> int:
        """The rank. Answers as soon as the call running before it is over."""
        return self.rank

    def bind_rendezvous(self, host: str, port_range: tuple[int, int] | None) -> tuple[str, int]:
        """Listen on `host` and return (host, port); the socket stays open, so that nobody else gets the port.

        Args:
            port_range: first and last port to try, inclusive; None lets the system choose.

        Raises:
            UserError: every port of the range is taken.
        """
        for port in range(port_range[0], port_range[1] + 1) if port_range else (0,):
            listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            try:
                listener.bind((host, port))
            except OSError:
                listener.close()
                continue
            listener.listen(self.world_size)
            self._listener = listener
            return host, listener.getsockname()[1]
        raise UserError(
            f"cluster.master_port_range_low..high: no free port on {host} in {port_range}; widen the range or set "
            "both keys to null"
        )

    def join_rendezvous(self, host: str, port: int, timeout_s: float) -> None:
        """Form the default process group: gloo on CPU, NCCL beside it for tensors on GPUs.

        Returns when all `world_size` workers have joined. `timeout_s` bounds that, and each collective after it.
        """
        limit = timedelta(seconds=timeout_s)
        listener, self._listener = self._listener, None
        store = dist.TCPStore(
            host,
            port,
            self.world_size,
            is_master=self.rank == 0,
            timeout=limit,
            master_listen_fd=listener.detach() if listener is not None else None,
        )
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        backend = "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.world_size, timeout=limit)

    def shutdown(self) -> None:
        """Leave the process group. May be called twice."""
        if dist.is_initialized():
            dist.destroy_process_group()

"""The Ray actor that a worker lives in.

It prepares the process before anything heavy is imported: thread counts are read by torch at import, and an actor
with its own Ray runtime environment takes seconds longer to start than one that sets the variables itself.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray import cloudpickle

from nemo_rl.distributed.config import available_cores
from nemo_rl.utils.errors import UserError

# Parameters of mallopt(3), as malloc.h numbers them.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


@dataclass(frozen=True)
class HostReport:
    """What a started worker process says about itself."""

    pid: int
    node_ip: str
    actor_id: str


class WorkerHost:
    """Holds one worker object and forwards calls to it, one at a time, on the process's main thread."""

    def __init__(self, env: Mapping[str, str], workers_on_node: int):
        """Set the process's environment; `OMP_NUM_THREADS` is this worker's share of the node's cores unless given."""
        share = str(max(1, available_cores() // workers_on_node))
        os.environ.update({"OMP_NUM_THREADS": share, "TOKENIZERS_PARALLELISM": "false", **env})
        keep_freed_memory()
        self._worker: Any = None

    def report(self) -> HostReport:
        """Where this process runs."""
        actor_id = ray.get_runtime_context().get_actor_id()
        return HostReport(os.getpid(), ray.util.get_node_ip_address(), str(actor_id))

    def build(self, class_name: str, arguments: bytes) -> bool:
        """Import the worker class and construct it; whether it wants a process group.

        Args:
            class_name: dotted name of a class.
            arguments: cloudpickled (args, kwargs); they are unpickled here, after the environment is set.

        Raises:
            UserError: there is no such class.
        """
        # From the driver through Ray, whose token guards that way; never from a file.
        args, kwargs = cloudpickle.loads(arguments)
        self._worker = import_class(class_name)(*args, **kwargs)
        return hasattr(self._worker, "join_rendezvous")

    def call(self, method_name: str, /, **kwargs: Any) -> Any:
        """The result of the worker's method; `AttributeError` when it has none of that name."""
        return getattr(self._worker, method_name)(**kwargs)


def keep_freed_memory() -> None:
    """Makes the C library keep freed memory for the next allocation; does nothing where it is not glibc.

    A training pass frees and allocates the same sizes again and again. Given back to the system in between, every page
    of them is zeroed and mapped anew: thousands of page faults a step, a tenth of the time of a small model.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 1 << 30)
        mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)


def import_class(class_name: str) -> type:
    """The class of a dotted name such as `package.module.Class`; `UserError` when there is none."""
    module_name, _, attribute = class_name.rpartition(".")
    try:
        found = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(f"worker class {class_name} can't be imported: {error}") from error
    if not isinstance(found, type):
        raise UserError(f"worker class {class_name} is a {type(found).__name__}, not a class")
    return found

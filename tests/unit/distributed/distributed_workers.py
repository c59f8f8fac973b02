"""Worker classes of the tests in this folder. Imported by name in worker processes, so no test code lives here."""

import os
import signal
import time
from typing import Any

from nemo_rl.utils.errors import ConfigError, PeerError, UserError


class PlainWorker:
    """Without process group, and without torch, so that it starts fast."""

    def __init__(self, fail_on_rank: int | None = None):
        self.rank = int(os.environ["RANK"])
        if self.rank == fail_on_rank:
            raise UserError("model_dir: no config.json in it")

    def environment(self, names: list[str]) -> dict[str, str | None]:
        return {name: os.environ.get(name) for name in names}

    def echo(self, **kwargs: Any) -> tuple[int, dict[str, Any]]:
        return self.rank, kwargs

    def sleep_on(self, rank: int, seconds: float) -> int:
        if self.rank == rank:
            time.sleep(seconds)
        return self.rank

    def fail_on(self, rank: int, kind: str, others_sleep_s: float = 0.0) -> int:
        """Fail on one rank in the way of `kind`, while the others are busy."""
        if self.rank != rank:
            time.sleep(others_sleep_s)
            if kind == "peers":
                raise PeerError("1 of 2 ranks failed")
            return self.rank
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "user":
            raise UserError("row 3 has no messages")
        if kind == "config":
            raise ConfigError(["policy.lr: -1 is below 0", "policy.mb: 0 is below 1"])
        if kind == "peers":
            time.sleep(0.3)
        raise RuntimeError("first line\nsecond line")


def make_torch_worker() -> type:
    """The class below, defined late: its import takes seconds, which workers of the other class need not spend."""
    import torch
    import torch.distributed as dist

    from nemo_rl.distributed.rendezvous import DistributedWorker

    class TorchWorker(DistributedWorker):
        def sum_of(self, value: float) -> float:
            """All-reduced sum over the ranks of `value * (rank + 1)`."""
            total = torch.tensor([value * (self.rank + 1)])
            dist.all_reduce(total)
            return total.item()

        def threads(self) -> int:
            return torch.get_num_threads()

        def die_in_collective(self, rank: int) -> float:
            """The others are inside the collective when `rank` dies."""
            if self.rank == rank:
                time.sleep(0.5)
                os.kill(os.getpid(), signal.SIGKILL)
            return self.sum_of(1.0)

    return TorchWorker


def __getattr__(name: str) -> type:
    if name == "TorchWorker":
        return make_torch_worker()
    raise AttributeError(name)

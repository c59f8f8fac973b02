"""The hand-over itself: exported once, loaded by every sampler, with the version checked."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nemo_rl.utils.errors import RunError

if TYPE_CHECKING:
    from nemo_rl.distributed.worker_groups import RayWorkerGroup
    from nemo_rl.models.driver import ModelDriver


@dataclass(frozen=True)
class WeightSyncReport:
    """One hand-over: the new version, how long it took in seconds, and how many bytes each sampler got."""

    version: int
    seconds: float
    num_bytes: int


class WeightSynchronizer:
    """Gives the weights of `policy` to the rollout workers. Only references pass through this process.

    Args:
        dtype: torch's name of the type to send; None sends float32.
    """

    def __init__(self, policy: ModelDriver, rollouts: RayWorkerGroup, dtype: str | None = None):
        self._policy = policy
        self._rollouts = rollouts
        self._dtype = dtype

    def sync_weights(self, version: int) -> WeightSyncReport:
        """Returns when every sampler draws with the weights of now, called `version`.

        Raises:
            RunError: a worker died, did not answer in time, or is at another version.
        """
        started = time.monotonic()
        group = self._policy.worker_group
        refs = group.run_all_workers_single_data("export_weights", dtype=self._dtype)
        buckets = group.get_all_worker_results(refs, reason="exporting weights")[0]
        loads = self._rollouts.run_all_workers_single_data("load_weights", refs=buckets, version=version)
        versions = self._rollouts.get_all_worker_results(loads, reason=f"weights of version {version}")
        workers = zip(self._rollouts.worker_metadata, versions, strict=True)
        wrong = [f"{worker} is at {found}" for worker, found in workers if found != version]
        if wrong:
            raise RunError(f"after the hand-over of weights of version {version}: {'; '.join(wrong)}")
        num_bytes = sum(bucket.entries[-1].end for bucket in buckets)
        return WeightSyncReport(version, time.monotonic() - started, num_bytes)

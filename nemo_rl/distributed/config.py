"""The `cluster` section, and what can be said about it before anything starts."""

from __future__ import annotations

import os
from pathlib import Path

from pydantic import Field

from nemo_rl.utils.config import ConfigModel


class ClusterConfig(ConfigModel):
    """The `cluster` section of a config: how many workers, and on which Ray."""

    gpus_per_node: int = Field(default=1, ge=1)
    """Workers per node: one GPU each, or CPU workers that share the node's cores where there are no GPUs."""

    num_nodes: int = Field(default=1, ge=1)
    """Nodes that get `gpus_per_node` workers each. More than one needs `address`."""

    address: str | None = None
    """`host:port` of a running Ray to join; null starts a private Ray on this machine and stops it afterwards."""

    oversubscribe: bool = False
    """Allow more CPU workers than this machine has cores; they take turns, so that a layout can be tried out."""

    master_port_range_low: int | None = Field(default=None, ge=1, le=65535)
    """First port the rank-0 worker may listen on for its peers; null leaves the choice to the system."""

    master_port_range_high: int | None = Field(default=None, ge=1, le=65535)
    """Last port the rank-0 worker may listen on, inclusive; set together with `master_port_range_low`."""

    segment_size: int | None = None
    """Nodes per NVLink domain. Only null is accepted: nodes are used without regard for domains."""

    start_timeout_s: float = Field(default=600.0, gt=0)
    """Longest wait, in seconds, for nodes, worker processes and their process group to come up."""

    step_timeout_s: float = Field(default=3600.0, gt=0)
    """Longest wait, in seconds, for one call to all workers, such as a training step or a checkpoint."""


def check_cluster(config: ClusterConfig) -> list[str]:
    """The problems of `config` that can be found without starting anything, one line each; `[]` when there are none.

    The machine's cores and GPUs are looked at only for a private local Ray (`address: null`).
    """
    problems = []
    low, high = config.master_port_range_low, config.master_port_range_high
    if (low is None) != (high is None):
        problems.append("cluster.master_port_range_low and cluster.master_port_range_high: set both or neither")
    elif low is not None and high is not None and low > high:
        problems.append(f"cluster.master_port_range_low: {low} is above cluster.master_port_range_high: {high}")
    if config.segment_size is not None:
        problems.append(f"cluster.segment_size: {config.segment_size} is not supported; set it to null")
    if config.address is not None:
        host, _, port = config.address.rpartition(":")
        if not host or "/" in host or not port.isdigit():
            problems.append(
                f"cluster.address: {config.address} is not host:port; run on a node of that Ray and give the address "
                "of its head, such as 10.0.0.1:6379"
            )
        return problems
    if config.num_nodes > 1:
        problems.append(
            f"cluster.num_nodes: {config.num_nodes} nodes wanted, but cluster.address is null, which means this one "
            "machine; start Ray on the nodes and give its host:port as cluster.address"
        )
    return problems + _check_this_machine(config)


def _check_this_machine(config: ClusterConfig) -> list[str]:
    gpus = local_gpus()
    if gpus > 0:
        if config.gpus_per_node > gpus:
            return [
                f"cluster.gpus_per_node: {config.gpus_per_node} GPUs wanted on one node, {gpus} available; "
                "lower cluster.gpus_per_node"
            ]
        return []
    cores = available_cores()
    if config.gpus_per_node > cores and not config.oversubscribe:
        return [
            f"cluster.gpus_per_node: {config.gpus_per_node} workers wanted on one node, {cores} CPU cores and no GPU "
            "available; lower cluster.gpus_per_node or set cluster.oversubscribe: true"
        ]
    return []


def available_cores() -> int:
    """CPU cores this process may use: the affinity mask, capped by the control group's quota where there is one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        if quota != "max":
            cores = min(cores, int(quota) // int(period))
    except (OSError, ValueError):
        # Not Linux, or control groups of version 1: the affinity mask is what there is.
        pass
    return max(1, cores)


def local_gpus() -> int:
    """CUDA devices this process may use, counted without creating a context."""
    import torch  # heavy, and not needed to read a config

    return torch.cuda.device_count()

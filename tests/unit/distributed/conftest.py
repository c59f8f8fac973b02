"""One private Ray for the tests of this folder that need one, and a cluster of four places on it."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nemo_rl.distributed.virtual_cluster import ClusterConfig, RaySession, RayVirtualCluster, init_ray
from nemo_rl.distributed.worker_groups import RayWorkerBuilder, RayWorkerGroup

CONFIG = ClusterConfig(gpus_per_node=4, oversubscribe=True, start_timeout_s=60, step_timeout_s=60)


@pytest.fixture(scope="package")
def ray_session() -> Iterator[RaySession]:
    # Workers import the test classes by name.
    path = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", path)
        with init_ray(CONFIG) as session:
            yield session


@pytest.fixture(scope="package")
def cluster(ray_session: RaySession) -> Iterator[RayVirtualCluster]:
    made = RayVirtualCluster.from_config(CONFIG, name="tests")
    yield made
    made.shutdown()


@pytest.fixture
def make_group(cluster: RayVirtualCluster) -> Iterator[Callable[..., RayWorkerGroup]]:
    """Starts a group of a class of `distributed_workers`, and ends it after the test."""
    groups = []

    def make(class_name: str, *args: object, workers: int = 2, **options: object) -> RayWorkerGroup:
        builder = RayWorkerBuilder(f"distributed_workers.{class_name}", *args)
        groups.append(RayWorkerGroup(cluster, builder, workers_per_node=workers, name_prefix="w", **options))
        return groups[-1]

    yield make
    for group in groups:
        group.shutdown(force=True)

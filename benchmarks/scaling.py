"""How the controller's and the data plane's cost grows: with workers, with rows, with bytes. No model, no training.

    python benchmarks/scaling.py [workers] [stubs] [rows] [plane] [--quick]

workers: a controller's SFT step over 1 to 64 worker processes without a model, against Ray's own fan-out and gather of
as many empty calls. stubs: the same step over 1 to 1,024 workers inside the process, which leaves the controller's own
time. rows: handling the metas of 10^2 to 10^5 rows. plane: columns of 1 KB to 100 MB through the adapter and through
TransferQueue's own client. Writes `scaling-<date>-<processor>.json` and `.svg` to benchmarks/results; `--quick` does
less and writes nothing.
"""

import argparse
import datetime
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from run import RESULTS, environment, results_name
from stub_worker import StubWorker

ROWS_PER_WORKER = 32
CALLS_PER_STEP = 5  # load, begin, forward and backward, finish, commit
Series = dict[str, dict[int, float]]


def median_ms(call: Callable[[], object], repeats: int) -> float:
    """Milliseconds of a call, after one that does not count."""
    call()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return round(1e3 * statistics.median(times), 3)


def exponent(points: dict[int, float]) -> float:
    """The power of n that the upper half of the points grows with: 1 is linear, 2 is square."""
    sizes = sorted(points)[len(points) // 2 :]
    x, y = [math.log(n) for n in sizes], [math.log(points[n]) for n in sizes]
    return round(statistics.linear_regression(x, y).slope, 2)


def controller(worker_group: Any) -> Any:
    """The SFT controller, without its actor, over workers that have no model."""
    from nemo_rl.algorithms.sft_v2 import SFTSingleControllerActor
    from nemo_rl.models.engine.config import ParallelSizes
    from nemo_rl.models.policy.tq_policy import TQPolicy

    made = object.__new__(SFTSingleControllerActor.__ray_metadata__.modified_class)  # type: ignore[attr-defined]
    trainer = object.__new__(TQPolicy)
    trainer.worker_group, trainer.sharding_annotations = worker_group, worker_group.sharding_annotations
    trainer.dp_client = SimpleNamespace(process_local=True)  # type: ignore[assignment]
    trainer.cfg = SimpleNamespace(parallel=ParallelSizes())  # type: ignore[assignment]
    made._trainer, made._multiple, made._policy_step_open, made._skipped_in_a_row = trainer, 1, False, 0
    made._state = SimpleNamespace(
        total_steps=0, consumed_samples=0, total_valid_tokens=0, dropped_samples={}, skipped_steps={}
    )
    made._config = SimpleNamespace(policy=SimpleNamespace(max_consecutive_skipped_steps=10))
    made._logger = SimpleNamespace(log_rows=lambda step, rows: list(rows))
    made._args = SimpleNamespace(
        loss_fn=SimpleNamespace(metric_normalizations={}),
        loader_settings=SimpleNamespace(train=SimpleNamespace(bad_lines=())),
        placement_plan=SimpleNamespace(logical_world_size=len(worker_group.worker_metadata)),
    )
    return made


def measure_workers(counts: Sequence[int]) -> Series:
    """A step over worker processes, and Ray's fan-out and gather of as many calls that do nothing."""
    import ray

    from nemo_rl.distributed.virtual_cluster import ClusterConfig, RayVirtualCluster, init_ray
    from nemo_rl.distributed.worker_groups import RayWorkerBuilder, RayWorkerGroup
    from nemo_rl.models.driver import sharding_of
    from nemo_rl.models.engine.config import ParallelSizes

    @ray.remote(num_cpus=0)
    class Empty:
        def call(self) -> None: ...

    ours: dict[int, float] = {}
    floor: dict[int, float] = {}
    path = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    config = ClusterConfig(gpus_per_node=max(counts), oversubscribe=True, start_timeout_s=600, step_timeout_s=120)
    with init_ray(config):
        cluster = RayVirtualCluster.from_config(config, name="scaling")
        for count in counts:
            actors = [Empty.remote() for _ in range(count)]

            def gather(actors: list[Any] = actors) -> None:
                for _ in range(CALLS_PER_STEP):
                    ray.get([actor.call.remote() for actor in actors])

            floor[count] = median_ms(gather, 30)
            for actor in actors:
                ray.kill(actor)
            group = RayWorkerGroup(
                cluster,
                RayWorkerBuilder("stub_worker.StubWorker", ROWS_PER_WORKER),
                workers_per_node=count,
                sharding_annotations=sharding_of(ParallelSizes(), count),
            )
            ours[count] = median_ms(controller(group)._run_train_step, 30)
            group.shutdown(force=True)
            print(f"{count:5} workers: step {ours[count]:8.2f} ms, Ray's calls {floor[count]:8.2f} ms", flush=True)
    return {"controller's step, ms": ours, "Ray's fan-out and gather, ms": floor}


class InProcessGroup:
    """Workers that are objects of this process, behind the calls of a `RayWorkerGroup`."""

    def __init__(self, count: int):
        from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
        from nemo_rl.distributed.worker_groups import RayWorkerGroup
        from nemo_rl.distributed.worker_start import place_workers
        from nemo_rl.models.driver import sharding_of
        from nemo_rl.models.engine.config import ParallelSizes

        stubs = [StubWorker(ROWS_PER_WORKER, rank, count) for rank in range(count)]

        class Group(RayWorkerGroup):
            def __init__(self) -> None:
                self.cluster = RayVirtualCluster([count], use_gpus=False)
                self.name_prefix, self.sharding_annotations = "stub", sharding_of(ParallelSizes(), count)
                self._metadata, self._workers = place_workers([count], "stub"), []

            def run_single_worker_single_data(self, method_name: str, worker_idx: int, **kwargs: Any) -> Any:
                return getattr(stubs[worker_idx], method_name)(**kwargs)

            def _share(self, kwargs: Any) -> dict[str, Any]:
                return dict(kwargs)

            def get_all_worker_results(self, future: Any, **kwargs: Any) -> list[Any]:
                return list(getattr(future, "futures", future))

        self.group = Group()


def measure_stubs(counts: Sequence[int]) -> Series:
    """A step over workers of this process: the controller's own time, and the workers' answers, which grow alike."""
    times = {}
    for count in counts:
        times[count] = median_ms(controller(InProcessGroup(count).group)._run_train_step, 7)
        print(f"{count:5} workers in one process: step {times[count]:8.2f} ms", flush=True)
    return {"controller's step, ms": times}


def measure_rows(counts: Sequence[int]) -> Series:
    """What a controller does with the metas of a PPO step: joining groups, dealing to 8 replicas, dropping rows."""
    from nemo_rl.data_plane.interfaces import KVBatchMeta
    from nemo_rl.data_plane.preshard import deal_meta_by_length

    series: Series = {"joining groups of 8, ms": {}, "dealing to 8 replicas, ms": {}, "dropping every tenth, ms": {}}
    for count in counts:
        groups = [
            KVBatchMeta(
                partition_id="train",
                task_name="train",
                sample_ids=[f"g{start + i}" for i in range(8)],
                fields=["input_ids"],
                sequence_lengths=[64 + (7 * (start + i)) % 960 for i in range(8)],
                extra_info={},
                tags=[{"reward": 1.0}] * 8,
            )
            for start in range(0, count, 8)
        ]
        meta = groups[0].concat(*groups[1:])
        tenth = list(range(0, meta.size, 10))
        calls: dict[str, Callable[[], object]] = {
            "joining groups of 8, ms": lambda groups=groups: groups[0].concat(*groups[1:]),
            "dealing to 8 replicas, ms": lambda meta=meta: deal_meta_by_length(meta, dp_world=8),
            "dropping every tenth, ms": lambda meta=meta, tenth=tenth: meta.drop(tenth),
        }
        for name, call in calls.items():
            series[name][count] = median_ms(call, 7)
        print(
            f"{count:7} rows: " + ", ".join(f"{name[:-4]} {series[name][count]:.2f} ms" for name in calls), flush=True
        )
    return series


def measure_plane(kilobytes: Sequence[int]) -> Series:
    """Put and get of one column of that many KB in 64 rows: our adapter, and TransferQueue's own client beside it."""
    import ray
    import torch
    import transfer_queue as tq
    from omegaconf import OmegaConf
    from tensordict import TensorDict

    from nemo_rl.data_plane.factory import build_data_plane_client
    from nemo_rl.data_plane.interfaces import DataPlaneConfig
    from nemo_rl.distributed.virtual_cluster import ClusterConfig, init_ray
    from nemo_rl.distributed.worker_host import keep_freed_memory

    keep_freed_memory()  # as in a worker, for both
    rows = 64
    keys = [f"k{i}" for i in range(rows)]
    series: Series = {f"{what}, {who}, ms": {} for what in ("put", "get") for who in ("adapter", "own client")}
    with init_ray(ClusterConfig(gpus_per_node=1, oversubscribe=True)):
        client = build_data_plane_client(DataPlaneConfig(enabled=True, impl="transfer_queue"), bootstrap=True)
        client.register_partition("train", ["column"], rows, ["train"])
        store = {"storage_backend": "SimpleStorage", "SimpleStorage": {"num_data_storage_units": 2}}
        ray.get(ray.remote(lambda: None).remote())
        tq.init(OmegaConf.create({"controller": {"polling_mode": True}, "backend": store}))
        for size in kilobytes:
            data = TensorDict({"column": torch.randn(rows, max(1, size * 1024 // 4 // rows))}, batch_size=[rows])
            tags = [{} for _ in keys]
            repeats = 15 if size <= 1024 else 5
            calls: dict[str, Callable[[], object]] = {
                "put, adapter, ms": lambda data=data: client.put_samples(keys, "train", data),
                "get, adapter, ms": lambda: client.get_samples(keys, "train", ["column"]),
                "put, own client, ms": lambda data=data, tags=tags: tq.kv_batch_put(
                    keys=keys, partition_id="own", fields=data, tags=tags
                ),
                "get, own client, ms": lambda: tq.kv_batch_get(keys=keys, partition_id="own", select_fields=["column"]),
            }
            for name, call in calls.items():
                series[name][size] = median_ms(call, repeats)
            client.clear_samples(keys, "train")
            tq.kv_clear(keys=keys, partition_id="own")
            shown = ", ".join(f"{name[:-4]} {series[name][size]:.1f} ms" for name in calls)
            print(f"{size:7} KB: {shown}", flush=True)
        tq.close()
        client.close()
    return series


MEASURES: dict[str, tuple[Callable[[Sequence[int]], Series], list[int], str]] = {
    "workers": (measure_workers, [1, 2, 4, 8, 16, 32, 64], "worker processes"),
    "stubs": (measure_stubs, [1, 4, 16, 64, 256, 1024], "workers in one process"),
    "rows": (measure_rows, [100, 1_000, 10_000, 100_000], "rows"),
    "plane": (measure_plane, [1, 10, 100, 1_000, 10_000, 100_000], "KB of a column"),
}


def plot(results: dict[str, Series], path: Path) -> None:
    """Time over size, both logarithmic, one panel each."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(results), figsize=(4.6 * len(results), 4.2), squeeze=False)
    for panel, (name, series) in zip(panels[0], results.items(), strict=True):
        for label, points in series.items():
            panel.plot(list(points), list(points.values()), marker="o", label=f"{label[:-4]} (n^{exponent(points)})")
        panel.set(xscale="log", yscale="log", xlabel=MEASURES[name][2], ylabel="ms", title=name)
        panel.grid(alpha=0.3)
        panel.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", choices=[*MEASURES, []], default=[])
    parser.add_argument("--quick", action="store_true", help="half of the sizes, and nothing written")
    args = parser.parse_args()
    results = {}
    for name in args.what or MEASURES:
        measure, sizes, _ = MEASURES[name]
        results[name] = measure(sizes[: len(sizes) // 2 + 1] if args.quick else sizes)
    growth = {name: {label: exponent(points) for label, points in series.items()} for name, series in results.items()}
    print(json.dumps(growth, indent=1))
    if not args.quick and not args.what:
        stem = f"scaling-{datetime.date.today().isoformat()}-{results_name()}"
        found = environment() | {"growth": growth, "series": results}
        (RESULTS / f"{stem}.json").write_text(json.dumps(found, indent=1) + "\n")
        plot(results, RESULTS / f"{stem}.svg")


if __name__ == "__main__":
    main()

"""The controller's side of a model: it starts the workers, spreads calls over them and gathers their results.

Policy and critic are this class with another config and another head.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nemo_rl.distributed.named_sharding import REPLICATED_AXES, NamedSharding
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl.distributed.worker_groups import MultiWorkerFuture, RayWorkerBuilder, RayWorkerGroup
from nemo_rl.models.config import ModelConfig
from nemo_rl.models.engine.config import AXES, DATA, ParallelSizes
from nemo_rl.utils.errors import RunError, UserError

if TYPE_CHECKING:
    from ray import ObjectRef
    from transformers import PreTrainedTokenizerBase

    from nemo_rl.algorithms.loss.interfaces import LossFunction
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict

log = logging.getLogger(__name__)

_SAVE_POLL_S = 0.2


def check_parallel_sizes(parallel: ParallelSizes, world_size: int, section: str) -> list[str]:
    """One line per reason why `world_size` workers can't form these replicas."""
    problems = []
    for axis in ("tensor", "context", "pipeline"):
        size = getattr(parallel, axis)
        if size != 1:
            problems.append(
                f"{section}: {axis} parallel size {size} is not supported; set it to 1, data parallel takes all workers"
            )
    if world_size % parallel.replica:
        problems.append(
            f"{section}: {world_size} workers (cluster.gpus_per_node x cluster.num_nodes) do not divide into replicas "
            f"of {parallel.replica}"
        )
    return problems


def sharding_of(parallel: ParallelSizes, world_size: int) -> NamedSharding:
    """Ranks laid out as pipeline x data x context x tensor."""
    layout = np.arange(world_size).reshape(parallel.pipeline, -1, parallel.context, parallel.tensor)
    return NamedSharding(layout.tolist(), list(AXES))


class ModelDriver:
    """Workers that hold one model, and what can be asked of them. Picklable: handles only, no tensor.

    Several of them may share the places of one cluster and take turns; `prepare_for_*` and `finish_*` mark the turns.

    Args:
        engine_options: fields of the `EngineConfig` that the role decides, such as its head.

    Raises:
        UserError: sizes that do not fit, or a model or checkpoint that the workers can't load.
        RunError: a worker died or did not start in time.
    """

    _sent: tuple[tuple[list[ObjectRef] | MultiWorkerFuture, str], ...] = ()
    """Calls that nobody has waited for yet, and what they are for."""

    def __init__(
        self,
        cluster: RayVirtualCluster,
        config: ModelConfig,
        tokenizer: PreTrainedTokenizerBase,
        *,
        name_prefix: str,
        worker_class_fqn: str,
        workers_per_node: int | list[int] | None = None,
        init_optimizer: bool = True,
        weights_path: str | Path | None = None,
        optimizer_path: str | Path | None = None,
        seed: int = 42,
        engine_options: Mapping[str, Any] | None = None,
    ):
        self.cfg = config
        section = config.section
        world_size = cluster.world_size() if workers_per_node is None else _total(workers_per_node, cluster)
        problems = check_parallel_sizes(config.parallel, world_size, section)
        if problems:
            raise UserError("; ".join(problems))
        self.sharding_annotations = sharding_of(config.parallel, world_size)
        engine_config = replace(
            config.engine_config(seed=seed, init_optimizer=init_optimizer), **(engine_options or {})
        )
        builder = RayWorkerBuilder(
            worker_class_fqn,
            engine_config=engine_config,
            row_tokens=config.max_total_sequence_length,
            tokenizer=tokenizer,
        )
        self.worker_group = RayWorkerGroup(
            cluster,
            builder,
            workers_per_node=workers_per_node,
            name_prefix=name_prefix,
            sharding_annotations=self.sharding_annotations,
        )
        try:
            self.model_info: dict[str, Any] = self._call_all(
                "initialize",
                reason=f"loading {config.model_name}",
                timeout_s=cluster.start_timeout_s,
                weights_path=_absolute(weights_path),
                optimizer_path=_absolute(optimizer_path),
            )[0]
            info = self.model_info
            log.info(
                "%s: %.1f M parameters, %s compute on %s (%s.precision: %s), passes of %d tokens, weights %s over %d "
                "replica(s)",
                section, info["num_parameters"] / 1e6, info["compute_dtype"], info["device"], section, config.precision,
                info["microbatch_tokens"], "sharded" if info["sharded"] else "replicated", self.data_parallel_size,
            )  # fmt: skip
            if info["emulated"]:
                log.warning(
                    "%s.precision: %s is emulated on this %s, which takes a hundred times as long as float32; "
                    "set it to auto or float32", section, config.precision, info["device"],
                )  # fmt: skip
        except BaseException:
            self.worker_group.shutdown(force=True)
            raise

    @property
    def data_parallel_size(self) -> int:
        """Number of replicas."""
        return self.sharding_annotations.get_axis_size(DATA)

    # -- whole calls --------------------------------------------------------------------------------------------------

    def train(
        self,
        data: BatchedDataDict,
        loss_fn: LossFunction,
        eval_mode: bool = False,
        gbs: int | None = None,
        mbs: int | None = None,
    ) -> dict[str, Any]:
        """Optimizer steps of `gbs` rows over `data`, which is sent from here; see `aggregate_train_results`.

        Raises:
            ValueError: the rows do not divide into steps and replicas.
        """
        gbs = self.cfg.train_global_batch_size if gbs is None else gbs
        if data.size % gbs or gbs % self.data_parallel_size:
            raise ValueError(
                f"{data.size} rows do not divide into steps of gbs {gbs} over {self.data_parallel_size} replicas"
            )
        results = self._call_sharded(
            "train",
            reason="training",
            data=data.shard_by_batch_size(self.data_parallel_size, batch_size=gbs),
            common={"loss_fn": loss_fn, "eval_mode": eval_mode, "gbs": gbs, "mbs": mbs},
        )
        return aggregate_train_results(results)

    def _infer(self, method: str, data: BatchedDataDict, micro_batch_size: int | None, *, reason: str) -> Any:
        """The batches that `method` gives for the rows of `data`, which is sent from here, joined in its order."""
        # A replica may get no row: the engine takes part in its collectives all the same.
        shards = data.shard_by_batch_size(self.data_parallel_size, allow_uneven_shards=True)
        common = {"micro_batch_size": micro_batch_size}
        results: list[Any] = self._call_sharded(method, reason=reason, data=shards, common=common)
        return type(data).from_batches(results)

    # -- taking turns -------------------------------------------------------------------------------------------------
    # Where models share devices they stay on them: weights, masters and optimizer state of all of them must fit. These
    # calls mark whose turn it is and move nothing.

    def prepare_for_training(self, *args: Any, **kwargs: Any) -> None:
        """Before `train` or `begin_train_step`. Moves nothing for now."""

    def prepare_for_inference(self, *args: Any, **kwargs: Any) -> None:
        """Before a pass without gradients. Moves nothing for now."""

    def prepare_for_lp_inference(self, keep_train_buffers: bool = False) -> None:
        """Before log-probabilities; a step may be open. Moves nothing for now."""

    def finish_training(self, *args: Any, **kwargs: Any) -> None:
        """After the last step of a turn. Moves nothing for now."""

    def finish_inference(self, *args: Any, **kwargs: Any) -> None:
        """After a pass without gradients. Moves nothing for now."""

    def offload_to_cpu(self) -> None:
        """Where another model needs the devices. Moves nothing for now."""

    def offload_before_refit(self) -> None:
        """Before weights go to the sampler. Moves nothing for now."""

    def offload_after_refit(self) -> None:
        """After weights went to the sampler. Moves nothing for now."""

    # -- where the time goes ------------------------------------------------------------------------------------------

    def start_profile(self) -> None:
        """Every worker times its phases from now on."""
        self._call_all("start_profile", reason="opening a profile")

    def stop_profile(self) -> list[dict[str, float]]:
        """Seconds by phase since `start_profile`, in the order of ranks; each second counts once."""
        return self._call_all("stop_profile", reason="closing a profile")

    # -- on disk, and the end -----------------------------------------------------------------------------------------

    def save_checkpoint(
        self,
        weights_path: str | Path,
        optimizer_path: str | Path | None = None,
        tokenizer_path: str | Path | None = None,
    ) -> None:
        """Returns when the state is copied; it is written in the background, see `finalize_async_save`."""
        self._call_all(
            "save_checkpoint",
            reason="copying the state for a checkpoint",
            weights_path=_absolute(weights_path),
            optimizer_path=_absolute(optimizer_path),
            tokenizer_path=_absolute(tokenizer_path),
        )

    def finalize_async_save(self) -> None:
        """Returns when the last save is on disk on all workers, which can train meanwhile.

        Raises:
            RunError: it failed, or takes longer than `cluster.step_timeout_s`.
        """
        deadline = time.monotonic() + self.worker_group.cluster.step_timeout_s
        while not all(self._call_all("async_save_done", reason="writing a checkpoint")):
            if time.monotonic() > deadline:
                raise RunError("writing a checkpoint takes longer than cluster.step_timeout_s")
            time.sleep(_SAVE_POLL_S)

    def shutdown(self) -> bool:
        """Ends the workers; whether they went in good order."""
        return self.worker_group.shutdown(cleanup_method="shutdown")

    # -- dispatch -----------------------------------------------------------------------------------------------------

    def _call_all(self, method: str, *, reason: str, timeout_s: float | None = None, **kwargs: Any) -> list[Any]:
        refs = self.worker_group.run_all_workers_single_data(method, **kwargs)
        self._wait_for_sent()
        return self.worker_group.get_all_worker_results(refs, reason=reason, timeout_s=timeout_s)

    def _call_sharded(
        self, method: str, *, reason: str, common: Mapping[str, Any] | None = None, **per_replica: Any
    ) -> list[Any]:
        """Calls every worker with the part of its replica; the leaders' results in replica order."""
        future = self._start_sharded(method, common, per_replica)
        self._wait_for_sent()
        return self.worker_group.get_all_worker_results(future, reason=reason)

    # What is sent is not waited for: workers take calls in their order, and the next call raises what failed in it.

    def _send_all(self, method: str, *, reason: str, **kwargs: Any) -> None:
        self._sent = (*self._sent, (self.worker_group.run_all_workers_single_data(method, **kwargs), reason))

    def _send_sharded(self, method: str, *, reason: str, **per_replica: Any) -> None:
        self._sent = (*self._sent, (self._start_sharded(method, None, per_replica), reason))

    def _wait_for_sent(self) -> None:
        sent, self._sent = self._sent, ()
        for refs, reason in sent:
            self.worker_group.get_all_worker_results(refs, reason=reason)

    def _start_sharded(
        self, method: str, common: Mapping[str, Any] | None, per_replica: Mapping[str, Any]
    ) -> MultiWorkerFuture:
        return self.worker_group.run_all_workers_sharded_data(
            method,
            in_sharded_axes=[DATA],
            replicate_on_axes=list(REPLICATED_AXES),
            output_is_replicated=list(REPLICATED_AXES),
            common_kwargs=common,
            **per_replica,
        )


def aggregate_train_results(results: list[dict[str, Any]]) -> dict[str, Any]:
    """The workers' results as one: `loss` (mean over the steps), `grad_norm` and `skipped`, metrics joined by name, and
    `engine_busy` of the worker that was busy least, where they say it.

    Only replica leaders count, since the siblings of a replica report the same tokens.

    Raises:
        ValueError: no results.
    """
    leaders = [result for result in results if result.get("is_replica_leader", True)]
    if not leaders:
        raise ValueError("no worker reported a training result")
    metrics: dict[str, list[float]] = {}
    for result in leaders:
        for key, values in result["all_mb_metrics"].items():
            metrics.setdefault(key, []).extend(values)
    return {
        "loss": sum(leaders[0]["global_loss"]) / len(leaders[0]["global_loss"]),
        "grad_norm": leaders[0]["grad_norm"],
        "skipped": leaders[0]["skipped"],
        "all_mb_metrics": metrics,
        "num_ranks": len(results),
        **({"engine_busy": min(busy)} if (busy := [r["engine_busy"] for r in leaders if "engine_busy" in r]) else {}),
    }


def _absolute(path: str | Path | None) -> str | None:
    """Workers run in another directory, so paths go to them whole."""
    return None if path is None else str(Path(path).absolute())


def _total(workers_per_node: int | list[int], cluster: RayVirtualCluster) -> int:
    return workers_per_node * cluster.node_count() if isinstance(workers_per_node, int) else sum(workers_per_node)

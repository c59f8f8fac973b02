"""PPO and GRPO with one controller: rollouts are ordered, collected and trained by their metas.

The way of a row, and what the controller sees of it:

    prompt -> generation engine -> environment          experience/rollout_worker, one process
      -> data plane: ids, masks, log-probs, reward      written there, once
           -> GroupResult: ids, lengths, reward         to this controller, which answers with calls by meta
      -> values                                         TQValue's workers
      -> previous (and reference) log-probs             TQPolicy's workers
      -> advantages, returns                            the stage worker, whitened over the whole step
      -> critic's step, policy's step                   TQValue, TQPolicy
      -> rows cleared, weights to the samplers          refs only pass through here
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Callable, Coroutine
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ray

from nemo_rl.algorithms.async_utils.rollout_pump import RolloutPump
from nemo_rl.algorithms.ppo import PPOConfig, _compute_critic_metrics
from nemo_rl.algorithms.profile import StepProfiler
from nemo_rl.algorithms.single_controller_utils.config import (
    MasterConfig,
    algo_config,
    groups_per_chunk,
    needs_prev_logprobs,
    needs_reference,
)
from nemo_rl.algorithms.single_controller_utils.requests import AdvantageOutcome, AdvantageRequest
from nemo_rl.algorithms.single_controller_utils.rollout_metrics import rollout_metrics
from nemo_rl.algorithms.single_controller_utils.state import IDENTITY, SingleControllerActorArgs
from nemo_rl.algorithms.train_metrics import train_metrics
from nemo_rl.data_plane import traffic
from nemo_rl.data_plane.control import ControlOnlyClient
from nemo_rl.data_plane.interfaces import KVBatchMeta
from nemo_rl.data_plane.schema import DP_TRAIN_FIELDS, PREV_LOGPROBS, REFERENCE_POLICY_LOGPROBS, TOTAL_REWARD
from nemo_rl.telemetry.instrumentation import accepts_trace_context
from nemo_rl.telemetry.setup import init_telemetry_worker, shutdown_telemetry
from nemo_rl.utils.checkpoint import CheckpointManager
from nemo_rl.utils.errors import RunError, UserError
from nemo_rl.utils.logger import SAMPLES_FILE, Logger
from nemo_rl.utils.notices import configure_controller_logging
from nemo_rl.utils.timer import TimeoutChecker, Timer
from nemo_rl.weight_sync.synchronizer import WeightSynchronizer

log = logging.getLogger(__name__)

ROLLOUTS = "rollouts"  # the folder of a checkpoint that holds rollouts which wait
_POLL_S = 0.005
_WAITING = "exposed_generation"  # the phase that waits for samples
_SAMPLES = 16  # answers in the table
_VAL_METRICS = ("val_reward", "val_response_tokens", "val_samples", "val_time")


@ray.remote(num_cpus=0, num_gpus=0)
class SingleControllerActor:
    """Drives samplers, critic and policy by metas."""

    def __init__(self, master_config: MasterConfig, actor_args: SingleControllerActorArgs):
        self._notices = configure_controller_logging()
        init_telemetry_worker(rank=0, world_size=1, worker_group="single_controller")
        self._config, self._args = master_config, actor_args
        self._algorithm = algo_config(master_config)
        self._trainer, self._value = actor_args.trainer_handle, actor_args.value_handle
        for handle in (self._trainer, self._value):
            if handle is not None:
                handle.dp_client = ControlOnlyClient(handle.dp_client)
        self._rollouts = actor_args.rollout_group
        self._state, self._prompts = actor_args.save_state, actor_args.prompts
        self._groups_per_step = self._algorithm.num_prompts_per_step
        per_pass = self._prompts.num_prompts * self._prompts.max_epochs
        self._max_steps = min(self._algorithm.max_num_steps, per_pass // self._groups_per_step)
        self._pump = RolloutPump(
            master_config,
            prompts=self._prompts,
            state=self._state,
            max_steps=self._max_steps,
            num_workers=len(self._rollouts.workers),
            partition_id=actor_args.partition_id,
            call_worker=self._call_rollout,
            call_stage=self._call_stage,
            drop_rows=self._drop_rows,
        )
        self._moved_at, self._doing = time.monotonic(), ""
        self._weights = WeightSynchronizer(self._trainer, self._rollouts)
        self._logger = Logger(master_config.logger)
        self._logger.begin(resumed_after=self._state.total_steps if actor_args.last_checkpoint_path else None)
        self._logger.log_hyperparams(master_config)
        self._profiler = StepProfiler(master_config.logger.profile_steps, self._roles(), self._logger)
        self._checkpointer = CheckpointManager(master_config.checkpointing)
        self._timeout = TimeoutChecker(master_config.checkpointing.checkpoint_must_save_by, fit_last_save_time=True)
        self._timer = Timer()
        self._progress: dict[str, Any] = {"step": self._state.total_steps, "max_steps": self._max_steps}

    @property
    def _version(self) -> int:
        """Version of the newest weights: the number of finished steps."""
        return self._state.total_steps

    # -- what the driver calls ----------------------------------------------------------------------------------------

    async def progress(self) -> dict[str, Any]:
        """Where the run is: `step`, `max_steps`, `notices` (warnings), after a step what `_note_progress` adds."""
        return {**self._progress, "notices": self._notices.texts}

    async def ping(self) -> dict[str, Any]:
        """A sign of life: `alive`, `trainer_version`, `train_steps`, `inflight_rollouts`, `rollout_permitted`,
        `epoch`."""
        return {
            "alive": True,
            "trainer_version": self._version,
            "train_steps": self._state.total_steps,
            "inflight_rollouts": self._pump.num_inflight,
            "rollout_permitted": self._pump.may_dispatch.is_set(),
            "epoch": self._prompts.epoch,
        }

    @accepts_trace_context
    async def run_with_trace_context(self) -> dict[str, Any]:
        """`run` under the driver's trace context."""
        return await self.run()

    async def run(self) -> dict[str, Any]:
        """Runs to the end; the final state as a dict, with `train_steps`, `trainer_version` and
        `controller_column_bytes`, the bytes of columns that went through this process: 0.

        Raises:
            RunError: a worker died, a wait passed its limit, a save failed, too many rollouts failed, or nothing moved.
        """
        pumps: list[asyncio.Task[None]] = []
        try:
            await self._sync_weights()
            if self._args.last_checkpoint_path is not None:
                await self._pump.restore(Path(self._args.last_checkpoint_path) / ROLLOUTS)
            if self._algorithm.val_at_start and self._state.total_steps == 0:
                self._logger.log_metrics(await self._validate(), 0)
            self._timeout.start_iterations()
            pumps = [asyncio.create_task(pump) for pump in self._pumps()]
            done, _ = await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            while not any(task is pumps[0] or task.exception() for task in done):
                done, _ = await asyncio.wait(
                    [task for task in pumps if not task.done()], return_when=asyncio.FIRST_COMPLETED
                )
            for task in done:
                task.result()
            await asyncio.to_thread(self._checkpointer.finalize_pending)
        finally:
            for task in pumps:
                task.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            self._cleanup()
        return asdict(self._state) | {
            "train_steps": self._state.total_steps,
            "trainer_version": self._version,
            "controller_column_bytes": sum(traffic.PROCESS_TRAFFIC.snapshot().values()),
        }

    def _pumps(self) -> list[Coroutine[Any, Any, None]]:
        """Training first: the run is over when it is."""
        return [self._train_pump(), self._watchdog(), *self._pump.pumps()]

    # -- train pump ---------------------------------------------------------------------------------------------------

    async def _train_pump(self) -> None:
        """Steps until the last one; logs, validates and saves between them."""
        algorithm = self._algorithm
        while self._state.total_steps < self._max_steps:
            await self._call(self._profiler.begin, self._state.total_steps + 1)
            metrics = await self._train_step()
            step = self._state.total_steps
            is_last = step >= self._max_steps
            if (algorithm.val_period and step % algorithm.val_period == 0) or (is_last and algorithm.val_at_end):
                metrics |= await self._validate()
                await self._write_samples(step)
            self._logger.log_metrics(metrics, step, step_finished=True)
            self._note_progress(metrics)
            metric = self._checkpointer.metric_of(metrics, _VAL_METRICS)
            self._timeout.mark_iteration()
            by_timeout = self._timeout.check_save()
            if self._checkpointer.is_due(step, forced=is_last or by_timeout):
                await self._save_checkpoint(metric)
            await self._call(self._profiler.end, step)
            if by_timeout:
                log.warning("checkpointing.checkpoint_must_save_by is reached: saved at step %d and stopping", step)
                return

    async def _train_step(self) -> dict[str, Any]:
        """One step: values, advantages and the critic's first epoch per chunk, everything else after the last one."""
        started = time.perf_counter()
        chunks: list[KVBatchMeta] = []
        metrics: dict[str, Any] = {}
        try:
            groups, is_complete = 0, False
            while not is_complete:
                chunk, count, is_complete = await self._next_chunk(groups)
                if chunk is None:
                    metrics |= await self._call_stage("finish", "computing advantages")
                    break
                groups += count
                chunk = await self._infer(chunk)
                outcome = await self._advantages(chunk, is_complete)
                metrics |= outcome.metrics
                for reason, filtered in outcome.num_mask_sample_filtered.items():
                    self._state.count_dropped(reason, filtered)
                if self._value is not None:
                    await self._critic_chunk(outcome.meta, is_first=not chunks)
                chunks.append(outcome.meta)
            step_rows = chunks[0].concat(*chunks[1:])
            if self._value is not None:
                metrics |= await self._finish_critic(step_rows)
            metrics |= await self._train_policy(step_rows)
        except BaseException:
            await asyncio.shield(self._abort())
            raise
        metrics |= rollout_metrics(step_rows, self._version) | self._pump.take_metrics()
        await self._drop_rows(step_rows.sample_ids)
        left = await self._call(self._trainer.dp_client.list_sample_ids, self._args.partition_id)
        metrics["rows_in_plane"] = len(left)
        self._count(step_rows, metrics)
        await self._sync_weights()
        total = time.perf_counter() - started
        # What is measured between two steps, such as a save, stands in the line of the second.
        timings = {f"timing/{label}": seconds for label, seconds in self._timer.get_timing_metrics("sum").items()}
        self._timer = Timer()
        return (
            metrics
            | timings
            | {
                "total_step_time": total,
                "samples_per_second": step_rows.size / total,
                "tokens_per_second": sum(step_rows.sequence_lengths or ()) / total,
                "epoch": self._prompts.epoch,
                "dropped": dict(self._state.dropped),
            }
        )

    async def _next_chunk(self, have: int) -> tuple[KVBatchMeta | None, int, bool]:
        """The next rows of the step, the number of their groups, and whether they complete it.

        No rows where the last prompts of the step were dropped after the chunk before was taken: that one ended it.

        Raises:
            RunError: too many prompts of the step were dropped.
        """
        with self._timed(_WAITING):
            while True:
                wanted = self._pump.groups_of_step(self._version)
                size = min(groups_per_chunk(self._config), wanted - have)
                if size <= 0:
                    return None, 0, True
                meta, count = await self._pump.take(self._version, size)
                if meta is not None:
                    return meta, count, have + count >= wanted
                await asyncio.sleep(_POLL_S)

    async def _infer(self, meta: KVBatchMeta) -> KVBatchMeta:
        """Writes `prev_logprobs`, `reference_policy_logprobs` and `values`, those of them that the run needs."""
        if needs_prev_logprobs(self._config):
            with self._timed("policy_logprobs"):
                await self._call(self._trainer.get_logprobs_from_meta, meta)
        if needs_reference(self._config):
            with self._timed("reference_logprobs"):
                await self._call(self._trainer.get_reference_policy_logprobs_from_meta, meta)
        if self._value is not None:
            with self._timed("value_inference"):
                await self._call(self._value.get_values_from_meta, meta)
        return meta

    async def _advantages(self, meta: KVBatchMeta, is_last: bool) -> AdvantageOutcome:
        with self._timed("advantage_calculation"):
            return await self._call_stage(
                "run_advantages", "computing advantages", request=AdvantageRequest(meta, is_last)
            )

    async def _critic_chunk(self, meta: KVBatchMeta, *, is_first: bool) -> None:
        """The critic's first epoch over one chunk."""
        assert self._value is not None
        with self._timed("value_training"):
            if is_first:
                await self._call(self._value.begin_train_step, self._args.value_loss_fn)
            await self._call(self._value.train_microbatches_from_meta, meta)

    async def _finish_critic(self, step_rows: KVBatchMeta) -> dict[str, Any]:
        """Ends the critic's first epoch and runs the others; the metrics of the last one."""
        assert self._value is not None and isinstance(self._algorithm, PPOConfig)
        with self._timed("value_training"):
            results = await self._call(self._value.finish_train_step)
            for _ in range(self._algorithm.critic_epochs - 1):
                results = await self._call(self._value.train_step_from_meta, step_rows, self._args.value_loss_fn)
        if results["skipped"] is not None:
            self._count_skipped(f"critic_{results['skipped']}")
        return _compute_critic_metrics(results)

    async def _train_policy(self, step_rows: KVBatchMeta) -> dict[str, Any]:
        """The policy's epochs over the step; the metrics of the last one. `{}` while the critic warms up."""
        algorithm, epochs = self._algorithm, 0
        if not isinstance(algorithm, PPOConfig):
            epochs = algorithm.grpo_epochs
        elif self._state.total_steps >= algorithm.policy_training_start_step:
            epochs = algorithm.ppo_epochs
        absent = {
            PREV_LOGPROBS: not needs_prev_logprobs(self._config),
            REFERENCE_POLICY_LOGPROBS: not needs_reference(self._config),
        }
        fields = [name for name in DP_TRAIN_FIELDS if not absent.get(name)]
        if self._config.loss_fn.positive_example_nll_weight > 0:
            fields.append(TOTAL_REWARD)
        metrics: dict[str, Any] = {}
        with self._timed("policy_training"):
            for _ in range(epochs):
                results = await self._call(
                    self._trainer.train_step_from_meta, step_rows, self._args.loss_fn, train_fields=fields
                )
                self._count_update(results["skipped"])
                metrics = train_metrics(results, self._args.loss_fn.metric_normalizations)
        return metrics

    def _count_update(self, skipped: str | None) -> None:
        """Counts an update of the policy, or one that changed nothing.

        Raises:
            RunError: `policy.max_consecutive_skipped_steps` updates in a row had a non-finite gradient norm.
        """
        state, limit = self._state, self._config.policy.max_consecutive_skipped_steps
        if skipped is None:
            state.policy_updates += 1
        else:
            self._count_skipped(skipped)
        state.skipped_in_a_row = state.skipped_in_a_row + 1 if skipped == "non_finite_gradient" else 0
        if state.skipped_in_a_row >= limit:
            raise RunError(
                f"step {state.total_steps + 1}: {limit} updates in a row had a non-finite gradient norm "
                "(policy.max_consecutive_skipped_steps); lower the learning rate"
            )

    def _count_skipped(self, reason: str) -> None:
        skipped = self._state.skipped_steps
        skipped[reason] = skipped.get(reason, 0) + 1
        log.warning("an update in step %d changed nothing: %s", self._state.total_steps + 1, reason.replace("_", " "))

    def _count(self, rows: KVBatchMeta, metrics: dict[str, Any]) -> None:
        state = self._state
        state.total_steps += 1
        state.consumed_samples += rows.size
        # While the critic warms up, it alone counts them.
        metrics["valid_tokens"] = int(metrics.get("global_valid_toks", metrics.get("critic/global_valid_toks", 0)))
        state.total_valid_tokens += metrics["valid_tokens"]
        metrics["policy_updates"] = state.policy_updates
        metrics["consumed_samples"] = state.consumed_samples
        metrics["skipped_steps"] = sum(state.skipped_steps.values())
        self._logger.log_rows(state.total_steps, [(0, [str(tag.get("source_id")) for tag in rows.tags or ()])])

    async def _abort(self) -> None:
        """Discards open steps; a failure here must not hide the one that led to it."""
        for handle in (self._trainer, self._value):
            if handle is not None:
                with contextlib.suppress(UserError, RunError, RuntimeError):
                    await self._call(handle.abort_train_step)

    # -- weights, validation, watchdog --------------------------------------------------------------------------------

    async def _sync_weights(self) -> None:
        """Gives the newest weights to the samplers, with no new prompt handed out meanwhile."""
        self._pump.may_dispatch.clear()
        with self._timed("weight_sync"):
            await self._call(self._weights.sync_weights, self._version)
        self._pump.may_dispatch.set()

    async def _validate(self) -> dict[str, Any]:
        """One sample for each validation prompt; `{}` when there is no validation set."""
        prompts = min(self._args.validation_prompts, self._algorithm.max_val_samples)
        if not prompts:
            return {}
        started = time.perf_counter()
        stats = await self._pump.evaluate(prompts, self._algorithm.val_batch_size)
        if not stats:
            raise UserError("data.validation: no prompt of it could be sampled, so there is no validation reward")
        return {
            "val_reward": sum(sample.reward for sample in stats) / len(stats),
            "val_response_tokens": sum(sample.response_tokens for sample in stats) / len(stats),
            "val_samples": len(stats),
            "val_time": time.perf_counter() - started,
        }

    async def _write_samples(self, step: int) -> None:
        """Leaves some sampled answers where the report finds them."""
        answers = await self._call_rollout(0, "sample_table", "sampled answers", count=_SAMPLES)
        lines = [json.dumps({"step": step, **asdict(answer)}) for answer in answers]
        (self._logger.log_dir / SAMPLES_FILE).write_text("".join(f"{line}\n" for line in lines))

    async def _watchdog(self) -> None:
        """Notices when the step waits for samples and none come; all other waits have limits of their own.

        Raises:
            RunError: none came for `stall_timeout_s`, and `stall_action` is abort.
        """
        watchdog = self._config.async_rl.stall_watchdog
        while True:
            await asyncio.sleep(watchdog.interval_s)
            idle = time.monotonic() - max(self._moved_at, self._pump.moved_at)
            if self._doing != _WAITING or idle < watchdog.stall_timeout_s:
                continue
            message = (
                f"step {self._version + 1} has waited {idle:.0f} s for samples "
                f"(async_rl.stall_watchdog.stall_timeout_s): {self._pump.num_inflight} prompts in work, "
                f"{self._pump.buffer.size()} ready"
            )
            if watchdog.stall_action == "abort":
                raise RunError(message)
            log.warning(message)

    # -- checkpoint ---------------------------------------------------------------------------------------------------

    async def _save_checkpoint(self, metric: dict[str, float]) -> None:
        """Copies the state of the run and writes it in the background; the save before it is complete by then."""
        with self._timed("checkpointing"):
            await asyncio.to_thread(self._checkpointer.finalize_pending)
            # Taken before anything is awaited: the pumps go on, and counters and orders must be of one moment.
            info = asdict(self._state) | metric | {IDENTITY: dict(self._args.identity)}
            waiting = self._pump.state_dict()
            path = self._checkpointer.init_tmp_checkpoint(self._state.total_steps, info, self._config)
            with self._checkpointer.saving(path):
                await self._pump.save(path / ROLLOUTS, waiting)
                for role, handle in self._roles().items():
                    optimizer = path / role / "optimizer" if self._config.checkpointing.save_optimizer else None
                    await self._call(
                        handle.save_checkpoint, path / role / "weights", optimizer, path / role / "tokenizer"
                    )
            self._checkpointer.begin_finalization(path, wait_fn=self._finalize_roles)

    def _roles(self) -> dict[str, Any]:
        return {"policy": self._trainer} | ({} if self._value is None else {"value": self._value})

    def _finalize_roles(self) -> None:
        for handle in self._roles().values():
            handle.finalize_async_save()

    # -- shared -------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _timed(self, label: str) -> Any:
        """Measures a phase of the step and tells the watchdog which it is."""
        self._doing, self._moved_at = label, time.monotonic()
        with self._timer.time(label):
            yield
        self._doing = ""

    async def _call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A blocking call to workers, in a thread of its own; its waits are bounded."""
        return await asyncio.to_thread(function, *args, **kwargs)

    async def _call_rollout(self, worker: int, method: str, reason: str, **kwargs: Any) -> Any:
        ref = self._rollouts.run_single_worker_single_data(method, worker, **kwargs)
        return (await self._call(self._rollouts.get_all_worker_results, [ref], reason=reason))[0]

    async def _call_stage(self, method: str, reason: str, **kwargs: Any) -> Any:
        ref = self._args.stage_group.run_single_worker_single_data(method, 0, **kwargs)
        return (await self._call(self._args.stage_group.get_all_worker_results, [ref], reason=reason))[0]

    async def _drop_rows(self, sample_ids: list[str]) -> None:
        await self._call(self._trainer.discard_samples, sample_ids, self._args.partition_id)

    def _note_progress(self, metrics: dict[str, Any]) -> None:
        """What `progress` answers until the next step."""
        seconds = metrics["total_step_time"]
        smoothed = 0.8 * self._progress.get("seconds_per_step", seconds) + 0.2 * seconds
        self._progress = {
            "step": self._state.total_steps,
            "max_steps": self._max_steps,
            "reward": metrics.get("reward_mean"),
            "loss": metrics.get("loss"),
            "lr": metrics.get("lr", 0.0),
            "tokens_per_s": metrics["tokens_per_second"],
            "seconds_per_step": smoothed,
            "eta_s": smoothed * (self._max_steps - self._state.total_steps),
            "epoch": metrics["epoch"],
            "dropped": dict(self._state.dropped),
            "val_reward": metrics.get("val_reward", self._progress.get("val_reward")),
        }

    def _cleanup(self) -> None:
        """Closes what the run opened. A failure here is a warning: it must not hide how the run ended."""
        for close in (self._logger.finish, self._checkpointer.shutdown, shutdown_telemetry):
            try:
                close()
            except Exception as error:  # noqa: BLE001  see above
                log.warning("while closing: %s", error)

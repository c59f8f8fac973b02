"""Single-controller SFT with one colocated Energon loader per data-parallel replica.

The way of a row, and what the controller sees of it:

    JSONL / WebDataset                                  (files)
      -> Energon reader -> cooker -> task encoder       data/energon, in the loader thread of the replica's leader
      -> process-local data plane                       data_plane, same process
           -> StepEnvelope: ids, lengths, counts        to this controller, which answers with a train call
      -> fetch, broadcast to siblings                   data_plane/worker_mixin
      -> a few rows change replicas, to even tokens out data_plane/leveling, distributed/row_exchange
      -> packs -> forward, backward                     models/engine
      -> one division by all trained tokens, update     models/engine
      -> commit: the batch is forgotten, its loader state is the one a checkpoint keeps
"""

import json
import logging
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import ray

from nemo_rl.algorithms.loss.interfaces import MetricNormalizer
from nemo_rl.algorithms.profile import StepProfiler
from nemo_rl.algorithms.sft_config import MasterConfig
from nemo_rl.algorithms.sft_state import (
    IDENTITY,
    SFTV2ActorArgs,
    SFTV2SaveState,
    _initial_save_state,
    _max_train_steps,
    _restore_save_state,
)
from nemo_rl.algorithms.train_metrics import train_metrics
from nemo_rl.data.energon.sft_types import StepEnvelope
from nemo_rl.distributed.named_sharding import REPLICATED_AXES
from nemo_rl.telemetry.instrumentation import (
    TeedMetric,
    accepts_trace_context,
    managed_span,
    register_teed_metrics,
    umbrella_span,
)
from nemo_rl.telemetry.setup import init_telemetry_worker, shutdown_telemetry
from nemo_rl.telemetry.span_groups import RLSpanGroup
from nemo_rl.utils.checkpoint import CheckpointManager
from nemo_rl.utils.errors import RunError, UserError
from nemo_rl.utils.logger import Logger
from nemo_rl.utils.notices import configure_controller_logging
from nemo_rl.utils.timer import TimeoutChecker

log = logging.getLogger(__name__)

LOADER_LATENCY_MAX_KEY = "loader_latency_max"
POLICY_TIME_KEY = "policy_time"
TOTAL_STEP_TIME_KEY = "total_step_time"
VALID_TOKENS_PER_SECOND_KEY = "valid_tokens_per_second"

SFT_V2_TEED_METRICS = (
    TeedMetric(
        LOADER_LATENCY_MAX_KEY,
        "rl.sft_v2.loader.latency.max",
        unit="s",
        description="Time the slowest replica took to draw and encode the batch of a step",
    ),
    TeedMetric(
        POLICY_TIME_KEY,
        "rl.sft_v2.policy.duration",
        unit="s",
        description="Time of forward, backward and update of a step",
    ),
    TeedMetric(TOTAL_STEP_TIME_KEY, "rl.sft_v2.step.duration", unit="s", description="Time of a whole step"),
    TeedMetric(
        VALID_TOKENS_PER_SECOND_KEY,
        "rl.sft_v2.valid_tokens_per_second",
        unit="{token}/s",
        description="Trained tokens of a step over its time",
    ),
)
register_teed_metrics(SFT_V2_TEED_METRICS)

_VAL_METRICS = ("val_loss", "val_valid_tokens", "val_samples", "val_time")

# Two threads, so that `progress` answers while `run` is busy.
_ACTOR_OPTIONS: dict[str, Any] = {"num_cpus": 0, "num_gpus": 0, "max_concurrency": 2}


@ray.remote(**_ACTOR_OPTIONS)
class SFTSingleControllerActor:
    """Drive colocated loaders and the existing TQPolicy from one actor.

    Raises:
        RuntimeError: not every replica set its loader up.
    """

    def __init__(self, master_config: MasterConfig, actor_args: SFTV2ActorArgs):
        self._notices = configure_controller_logging()
        init_telemetry_worker(rank=0, world_size=1, worker_group="sft_v2_controller")
        self._config = master_config
        self._args = actor_args
        self._trainer = actor_args.trainer
        self._state = actor_args.save_state
        self._max_steps = _max_train_steps(master_config)
        self._multiple = master_config.policy.make_sequence_length_divisible_by
        self._logger = Logger(master_config.logger)
        self._logger.begin(resumed_after=self._state.total_steps if actor_args.last_checkpoint_path else None)
        self._logger.log_hyperparams(master_config)
        self._profiler = StepProfiler(master_config.logger.profile_steps, {"policy": self._trainer}, self._logger)
        self._checkpointer = CheckpointManager(master_config.checkpointing)
        self._timeout = TimeoutChecker(master_config.checkpointing.checkpoint_must_save_by, fit_last_save_time=True)
        self._policy_step_open = False
        self._loading: list[ray.ObjectRef] | None = None
        self._skipped_in_a_row = 0
        self._progress: dict[str, Any] = {"step": self._state.total_steps, "max_steps": self._max_steps}
        self._setup_loaders()

    def progress(self) -> dict[str, Any]:
        """Where the run is: `step`, `max_steps`, `notices` (warnings), after a step what `_note_progress` adds.

        Answers while `run` is busy, which is why the actor has two threads.
        """
        return {**self._progress, "notices": self._notices.texts}

    @accepts_trace_context
    def run_with_trace_context(self) -> dict[str, Any]:
        """Run under the driver's trace context when called through Ray."""
        return self.run()

    def run(self) -> dict[str, Any]:
        """Run SFT training; returns the final save state as a dict.

        Raises:
            RunError: a worker died, a wait passed its limit, a save failed, or too many steps in a row were skipped.
        """
        try:
            with umbrella_span(RLSpanGroup.U_JOB, "rl.sft_v2.job"):
                self._run_loop()
            self._checkpointer.finalize_pending()
        finally:
            self._cleanup()
        return asdict(self._state)

    def _run_loop(self) -> None:
        sft = self._config.sft
        if sft.val_at_start and self._state.total_steps == 0:
            self._validate()
        self._timeout.start_iterations()
        while self._state.total_steps < self._max_steps:
            self._profiler.begin(self._state.total_steps + 1)
            metrics = self._run_train_step()
            step = self._state.total_steps
            is_last = step >= self._max_steps
            if self._is_validated(step):
                metrics |= self._validate()
            self._logger.log_metrics(metrics, step, step_finished=True)
            self._note_progress(metrics)
            metric = self._checkpointer.metric_of(metrics, _VAL_METRICS)
            self._timeout.mark_iteration()
            by_timeout = self._timeout.check_save()
            if self._checkpointer.is_due(step, forced=is_last or by_timeout):
                self._save_checkpoint(metric)
            self._profiler.end(step)
            if by_timeout:
                log.warning("checkpointing.checkpoint_must_save_by is reached: saved at step %d and stopping", step)
                return

    def _is_validated(self, step: int) -> bool:
        """Whether a validation follows this step."""
        sft = self._config.sft
        return bool(sft.val_period and step % sft.val_period == 0) or (step >= self._max_steps and sft.val_at_end)

    def _setup_loaders(self) -> None:
        """Starts the loader of every replica, from the checkpoint's states where there are some."""
        plan, states = self._args.placement_plan, self._args.loader_states
        if states is not None and len(states) != plan.num_logical_shards:
            raise UserError(
                f"the checkpoint holds the state of {len(states)} data shards, this run has {plan.num_logical_shards}"
            )
        shards = [plan.shards_of(rank) for rank in range(plan.logical_world_size)]
        restored = [None if states is None else {shard: states[shard] for shard in owned} for owned in shards]
        refs = self._trainer.worker_group.run_all_workers_multiple_data(
            "setup_sft_dataloader",
            run_rank_0_only_axes=list(REPLICATED_AXES),
            shards=shards,
            restored_states=restored,
            common_kwargs={"settings": self._args.loader_settings},
        )
        results = self._trainer.worker_group.get_all_worker_results(refs, reason="opening the data loaders")
        if results != [True] * plan.logical_world_size:
            raise RuntimeError(f"not every replica opened its loader: {results}")

    def _load_envelopes(self) -> list[StepEnvelope]:
        """The next batch of every replica, in replica order."""
        refs, self._loading = self._loading or self._send_load(), None
        envelopes = self._owner_results(refs, reason="loading a batch")
        self._check_ranks(envelopes)
        return envelopes

    def _send_load(self) -> list[ray.ObjectRef]:
        return self._send_to_owners("load_next_sft_batch", make_sequence_length_divisible_by=self._multiple)

    def _commit(self) -> None:
        """The step's batch is done with. The next one is asked for in the same breath, unless something comes between.

        So the workers have it ready by the time this process has written the step down.
        """
        refs = self._send_to_owners("commit_sft_batch")
        step = self._state.total_steps + 1
        if (
            step < self._max_steps
            and not self._is_validated(step)
            and not self._checkpointer.is_due(step, forced=False)
        ):
            self._loading = self._send_load()
        self._owner_results(refs, reason="committing a batch")

    def _take_back_ahead(self) -> None:
        """Takes a batch back that was asked for ahead, so that the loaders stand after the last committed one."""
        if self._loading is not None:
            self._load_envelopes()
            self._owner_call("abort_sft_batch", reason="taking a batch back")

    def _run_train_step(self) -> dict[str, Any]:
        """One optimizer step and its metrics. Counters move only when it is complete."""
        started = time.perf_counter()
        with umbrella_span(RLSpanGroup.U_STEP, "rl.sft_v2.step"):
            envelopes = self._load_envelopes()
            policy_started = time.perf_counter()
            try:
                with managed_span(RLSpanGroup.POLICY_UPDATE, "rl.sft_v2.policy_training"):
                    results = self._train_with_retry(envelopes)
            except BaseException:
                self._abort()
                raise
            policy_time = time.perf_counter() - policy_started
            self._commit()
        metrics = self._count(envelopes, results)
        total_time = time.perf_counter() - started
        latencies = [envelope.load_seconds for envelope in envelopes]
        return {
            LOADER_LATENCY_MAX_KEY: max(latencies),
            "loader_latency_mean": sum(latencies) / len(latencies),
            "loader_copy_imbalance": max(latencies) - min(latencies),
            POLICY_TIME_KEY: policy_time,
            TOTAL_STEP_TIME_KEY: total_time,
            VALID_TOKENS_PER_SECOND_KEY: metrics["valid_tokens"] / total_time,
            "tokens_per_second": metrics["tokens"] / total_time,
            **metrics,
        }

    def _train_with_retry(self, envelopes: list[StepEnvelope]) -> dict[str, Any]:
        """The split step; once more with passes half as long when one did not fit into memory."""
        try:
            return self._train(envelopes)
        except RunError as error:
            if not self._trainer.can_retry(error):
                raise
            self._trainer.abort_train_step()
            tokens = self._trainer.halve_microbatches()
            log.warning("step %d again with passes of %d tokens: %s", self._state.total_steps + 1, tokens, error)
            return self._train(envelopes)

    def _train(self, envelopes: list[StepEnvelope]) -> dict[str, Any]:
        """The split step over placed rows."""
        self._trainer.begin_train_step(self._args.loss_fn)
        self._policy_step_open = True
        self._trainer.train_placed_microbatches([envelope.meta for envelope in envelopes])
        results = self._trainer.finish_train_step()
        self._policy_step_open = False
        return results

    def _abort(self) -> None:
        """Discards the open step and takes the batch back; a failure here must not hide the one that led to it."""
        try:
            if self._policy_step_open:
                self._trainer.abort_train_step()
            self._owner_call("abort_sft_batch", reason="taking a batch back")
        except (RunError, UserError, RuntimeError) as error:
            log.warning("while aborting a step: %s", error)
        self._policy_step_open = False

    def _count(self, envelopes: list[StepEnvelope], results: dict[str, Any]) -> dict[str, Any]:
        """Moves the counters past a committed step and returns its metrics.

        Raises:
            RunError: `policy.max_consecutive_skipped_steps` steps in a row had a non-finite gradient norm.
        """
        state = self._state
        real = [(e.shards[i], source) for e in envelopes for i, source in enumerate(e.source_ids) if source]
        valid_tokens = sum(envelope.valid_tokens for envelope in envelopes)
        state.total_steps += 1
        state.consumed_samples += len(real)
        state.total_valid_tokens += valid_tokens
        for envelope in envelopes:
            for reason, count in envelope.dropped.items():
                state.dropped_samples[reason] = state.dropped_samples.get(reason, 0) + count
        bad_lines = len(self._args.loader_settings.train.bad_lines)
        if bad_lines:
            # Indexed out before the run, so no batch counts them; each pass leaves them out once more.
            state.dropped_samples["bad_line"] = bad_lines * (envelopes[0].epoch + 1)
        by_shard: dict[int, list[str]] = {}
        for shard, source in real:
            by_shard.setdefault(shard, []).append(source)
        self._logger.log_rows(state.total_steps, by_shard.items())
        skipped = results["skipped"]
        if skipped is not None:
            state.skipped_steps[skipped] = state.skipped_steps.get(skipped, 0) + 1
            log.warning("step %d changed nothing: %s", state.total_steps, skipped.replace("_", " "))
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if skipped == "non_finite_gradient" else 0
        if self._skipped_in_a_row >= self._config.policy.max_consecutive_skipped_steps:
            raise RunError(
                f"step {state.total_steps}: {self._skipped_in_a_row} steps in a row had a non-finite gradient norm "
                "(policy.max_consecutive_skipped_steps); lower the learning rate or look at the rows of these steps"
            )
        return {
            "valid_tokens": valid_tokens,
            "tokens": sum(n for e in envelopes for n, s in zip(e.sequence_lengths, e.source_ids, strict=True) if s),
            "source_samples": len(real),
            "physical_packs": sum(len(envelope.source_ids) for envelope in envelopes),
            "epoch": envelopes[0].epoch,
            "consumed_samples": state.consumed_samples,
            "dropped_samples": sum(state.dropped_samples.values()),
            "dropped": dict(state.dropped_samples),
            "skipped_steps": sum(state.skipped_steps.values()),
            **self._policy_metrics(results, self._args.loss_fn.metric_normalizations),
        }

    @staticmethod
    def _policy_metrics(
        train_results: dict[str, Any], rules: Mapping[str, MetricNormalizer] | None = None
    ) -> dict[str, Any]:
        """Convert policy output into flat scalar logger metrics, each by the rule that the loss states for it."""
        return train_metrics(train_results, rules)

    def _validate(self) -> dict[str, Any]:
        """The loss over the validation rows, each once; `{}` when there is no validation set."""
        if self._args.loader_settings.validation is None:
            return {}
        started = time.perf_counter()
        sums = {"loss_sum": 0.0, "valid_tokens": 0.0, "valid_rows": 0.0}
        while True:
            envelopes = self._owner_call(
                "load_next_validation_batch",
                reason="loading a validation batch",
                make_sequence_length_divisible_by=self._multiple,
            )
            if all(envelope is None for envelope in envelopes):
                break
            self._check_ranks(envelopes)
            metas = [envelope.meta for envelope in envelopes]
            for key, value in self._trainer.eval_placed_microbatches(metas, self._args.loss_fn).items():
                sums[key] += value
            self._owner_call("clear_validation_batch", reason="clearing a validation batch")
        if sums["valid_tokens"] == 0:
            raise UserError("data.validation has no trained token, so there is no validation loss")
        metrics = {
            "val_loss": sums["loss_sum"] / sums["valid_tokens"],
            "val_valid_tokens": sums["valid_tokens"],
            "val_samples": sums["valid_rows"],
            "val_time": time.perf_counter() - started,
        }
        if self._state.total_steps == 0:
            self._logger.log_metrics(metrics, 0)
        return metrics

    def _owner_call(self, method_name: str, *, reason: str | None = None, **kwargs: Any) -> list[Any]:
        """Calls the leader of every replica and waits, which messages call `reason`; results in replica order."""
        return self._owner_results(self._send_to_owners(method_name, **kwargs), reason=reason or method_name)

    def _send_to_owners(self, method_name: str, **kwargs: Any) -> list[ray.ObjectRef]:
        return self._trainer.worker_group.run_all_workers_single_data(
            method_name, run_rank_0_only_axes=list(REPLICATED_AXES), **kwargs
        )

    def _owner_results(self, refs: list[ray.ObjectRef], *, reason: str) -> list[Any]:
        return self._trainer.worker_group.get_all_worker_results(refs, reason=reason)

    def _check_ranks(self, envelopes: list[StepEnvelope]) -> None:
        ranks = [envelope.logical_rank for envelope in envelopes]
        if ranks != list(range(self._args.placement_plan.logical_world_size)):
            raise RuntimeError(f"batches came from replicas {ranks}, not one from each in order")

    def _loader_state_dicts(self) -> list[dict[str, Any]]:
        """The state of every logical shard, in shard order."""
        by_shard: dict[int, dict[str, Any]] = {}
        for states in self._owner_call("sft_dataloader_state_dict", reason="collecting loader states"):
            by_shard |= states
        return [by_shard[shard] for shard in sorted(by_shard)]

    def _save_checkpoint(self, metric: dict[str, float]) -> None:
        """Copies the state of the run and writes it in the background; the save before it is complete by then."""
        self._checkpointer.finalize_pending()
        self._take_back_ahead()
        states = self._loader_state_dicts()
        info = asdict(self._state) | metric | {IDENTITY: self._args.identity}
        path = self._checkpointer.init_tmp_checkpoint(self._state.total_steps, info, self._config)
        policy = path / "policy"
        with self._checkpointer.saving(path):
            loaders = path / "loaders"
            loaders.mkdir()
            for shard, state in enumerate(states):
                (loaders / f"shard_{shard}.json").write_text(json.dumps(state))
            self._trainer.save_checkpoint(
                policy / "weights",
                policy / "optimizer" if self._config.checkpointing.save_optimizer else None,
                policy / "tokenizer",
            )
        self._checkpointer.begin_finalization(path, wait_fn=self._trainer.finalize_async_save)

    def _note_progress(self, metrics: dict[str, Any]) -> None:
        """What `progress` answers until the next step."""
        state = self._state
        seconds = metrics[TOTAL_STEP_TIME_KEY]
        previous = self._progress.get("seconds_per_step", seconds)
        smoothed = 0.8 * previous + 0.2 * seconds
        self._progress = {
            "step": state.total_steps,
            "max_steps": self._max_steps,
            "loss": metrics["loss"],
            "lr": metrics.get("lr", 0.0),
            "tokens_per_s": metrics["tokens_per_second"],
            "seconds_per_step": smoothed,
            "eta_s": smoothed * (self._max_steps - state.total_steps),
            "epoch": metrics["epoch"],
            "dropped": dict(state.dropped_samples),
            "val_loss": metrics.get("val_loss", self._progress.get("val_loss")),
        }

    def _close_loaders(self) -> None:
        self._owner_call("close_sft_dataloader", reason="closing the data loaders")

    def _cleanup(self) -> None:
        """Closes what the run opened. A failure here is a warning: it must not hide how the run ended."""
        for close in (self._close_loaders, self._logger.finish, self._checkpointer.shutdown, shutdown_telemetry):
            try:
                close()
            except Exception as error:  # noqa: BLE001  see above
                log.warning("while closing: %s", error)


def setup_sft_v2(master_config: MasterConfig, tokenizer_or_processor: Any) -> SFTV2ActorArgs:
    """Build the V2 cluster, TQPolicy, placement, and resume state.

    Ray must be connected. `data.train.virtual_epoch_length` and the schedule's horizon are filled in on
    `master_config`. When anything fails, no worker is left behind.

    Raises:
        ConfigError: the config can't be run; all problems at once, before any worker starts.
        UserError: a checkpoint that is not of this run, or a model that can't be loaded.
        RunError: a worker died or did not start in time.
    """
    # Only the driver needs what this imports; the controller's process holds no tensor and loads no tensor library.
    from nemo_rl.algorithms.sft_setup import build_actor_args

    return build_actor_args(master_config, tokenizer_or_processor)


__all__ = [
    "MasterConfig",
    "SFTSingleControllerActor",
    "SFTV2ActorArgs",
    "SFTV2SaveState",
    "_initial_save_state",
    "_max_train_steps",
    "_restore_save_state",
    "setup_sft_v2",
]

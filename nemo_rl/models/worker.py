"""The worker: a process of the group that holds an engine and fetches its own rows. Every role runs this class."""

import logging
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from nemo_rl.algorithms.loss.interfaces import LossFunction
from nemo_rl.data_plane.worker_mixin import TQWorkerMixin
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.rendezvous import DistributedWorker
from nemo_rl.models.engine.checkpoint import EngineCheckpointer
from nemo_rl.models.engine.config import DATA, EngineConfig
from nemo_rl.models.engine.engine import Engine, StepResult
from nemo_rl.models.engine.mesh import Mesh, build_mesh
from nemo_rl.models.engine.precision import has_bfloat16
from nemo_rl.models.weight_source import WeightSourceMixin
from nemo_rl.utils import phases
from nemo_rl.utils.errors import MemoryExhaustedError

log = logging.getLogger(__name__)


class ModelWorker(TQWorkerMixin, WeightSourceMixin, DistributedWorker):
    """One rank of a model: the split step, whole steps, evaluation, log-probabilities or values, saving.

    The constructor is light; `initialize` builds the engine once the process group stands.

    Args:
        engine_config: what to build; its head is the role.
        row_tokens: longest row; a microbatch size in rows times this is a token budget.
        tokenizer: gives the pad id of padded views, and is saved with checkpoints.
    """

    _busy_s = 0.0
    _finished_at: float | None = None
    _engine_busy: float | None = None

    def __init__(self, engine_config: EngineConfig, row_tokens: int, tokenizer: PreTrainedTokenizerBase):
        super().__init__()
        self.engine_config = engine_config
        self.row_tokens = row_tokens
        self.tokenizer = tokenizer
        self._mesh: Mesh | None = None
        self._engine: Engine | None = None
        self._checkpointer: EngineCheckpointer | None = None

    def initialize(self, weights_path: str | None = None, optimizer_path: str | None = None) -> dict[str, Any]:
        """Builds mesh and engine and, with `weights_path`, continues from a checkpoint.

        Returns:
            `num_parameters`, `compute_dtype` (name), `sharded`, `device` (type),
            `microbatch_tokens`, `emulated` (compute without hardware for that dtype).

        Raises:
            UserError: the model or the checkpoint can't be loaded.
        """
        logging.basicConfig(level=logging.INFO, format=f"%(asctime)s rank {self.rank} %(levelname)s %(message)s")
        transformers_logging.disable_progress_bar()
        transformers_logging.set_verbosity_error()
        self._mesh = build_mesh(self.engine_config.parallel, self.device)
        self._engine = Engine(self.engine_config, self._mesh)
        self._checkpointer = EngineCheckpointer(self._engine)
        if weights_path is not None:
            self._checkpointer.load(Path(weights_path), Path(optimizer_path) if optimizer_path else None)
        return {
            "num_parameters": self._engine.num_parameters,
            "compute_dtype": str(self._engine.model.compute_dtype).removeprefix("torch."),
            "sharded": self._engine.model.sharded,
            "device": self.device.type,
            "microbatch_tokens": self._engine.microbatch_tokens,
            "emulated": self._engine.model.compute_dtype == torch.bfloat16 and not has_bfloat16(self.device),
        }

    @property
    def mesh(self) -> Mesh:
        """This rank's place; exists after `initialize`."""
        assert self._mesh is not None, "initialize has not run"
        return self._mesh

    @property
    def engine(self) -> Engine:
        """The engine; exists after `initialize`."""
        assert self._engine is not None, "initialize has not run"
        return self._engine

    @property
    def checkpointer(self) -> EngineCheckpointer:
        """Saves and loads the engine; exists after `initialize`."""
        assert self._checkpointer is not None, "initialize has not run"
        return self._checkpointer

    # -- one optimizer step in parts ----------------------------------------------------------------------------------

    def begin_train_step(self, loss_fn: LossFunction, gbs: int | None = None, mbs: int | None = None) -> None:
        """Opens a step.

        Args:
            loss_fn: applied to every microbatch.
            gbs: rows of the step over all ranks, as the interface has it; the engine divides by what it counts.
            mbs: rows of a forward pass if all had the greatest length; None takes the configured token budget.
        """
        with self._busy():
            self.engine.begin_step(loss_fn, self._budget(mbs))

    def train_microbatch(self, data: BatchedDataDict) -> None:
        """Adds the gradients of these rows to the open step.

        Raises:
            MemoryExhaustedError: a pass did not fit; the step can only be aborted.
        """
        try:
            with self._busy():
                self.engine.microbatch(data)
        except torch.OutOfMemoryError as error:
            first_line = str(error).splitlines()[0]
            raise MemoryExhaustedError(f"a pass of {self.engine.microbatch_tokens} tokens: {first_line}") from error

    def halve_microbatches(self) -> int:
        """Halves the token budget of all later passes; returns the new one of training."""
        engine = self.engine
        engine.microbatch_tokens = max(1, engine.microbatch_tokens // 2)
        engine.inference_microbatch_tokens = max(1, engine.inference_microbatch_tokens // 2)
        return engine.microbatch_tokens

    def finish_train_step(self) -> dict[str, Any]:
        """Updates the weights and closes the step; see `_train_result`."""
        return self._train_result([self._finish_step()])

    def abort_train_step(self) -> None:
        """Discards the open step, if there is one."""
        self.engine.abort_step()

    def fail_train_step(self) -> None:
        """Rows of the open step are missing: to finish it raises, on all ranks."""
        self.engine.fail_step()

    def withdraw_from_train_step(self) -> None:
        """This rank won't come to the end of a whole call to `train`: those that wait for it there raise."""
        self.engine.withdraw_step()

    # -- whole calls --------------------------------------------------------------------------------------------------

    def train(
        self,
        data: BatchedDataDict,
        loss_fn: LossFunction,
        eval_mode: bool = False,
        gbs: int | None = None,
        mbs: int | None = None,
    ) -> dict[str, Any]:
        """Optimizer steps over this rank's rows, `gbs` rows of all ranks each; without updates in `eval_mode`.

        A plan on the batch (`elem_counts_per_gb`) says how many of the rows belong to each step, which may be none.
        Without a plan every rank has the same number of them.

        Raises:
            ValueError: the rows do not divide into steps.
        """
        steps, start = [], 0
        for count in self._rows_per_step(data, gbs):
            rows = data.slice(start, start + count)
            start += count
            if eval_mode:
                steps.append(self.engine.evaluation_step(loss_fn, rows))
                continue
            self.begin_train_step(loss_fn, mbs=mbs)
            self.train_microbatch(rows)
            steps.append(self._finish_step())
        return self._train_result(steps)

    def eval_microbatch(self, data: BatchedDataDict, loss_fn: LossFunction) -> dict[str, float]:
        """Raw sums over this rank's rows: `loss_sum`, `valid_tokens`, `valid_rows`."""
        return self.engine.evaluate(loss_fn, data)

    def get_logprobs(self, data: BatchedDataDict, micro_batch_size: int | None = None) -> BatchedDataDict:
        """`logprobs [B, S]` float32: of each token given its prefix; column 0 and padding are 0.

        With a column `token_mask` in `data`, which every call from a meta has, only its tokens are computed and the
        others are 0: nothing reads them, and they would cost most of the vocabulary projection.
        """
        budget, targets = self._budget(micro_batch_size), data.get("token_mask")
        return BatchedDataDict({"logprobs": self.engine.log_probs(data, budget, targets=targets)})

    def get_reference_policy_logprobs(
        self, data: BatchedDataDict, micro_batch_size: int | None = None
    ) -> BatchedDataDict:
        """`reference_logprobs [B, S]` float32: as `get_logprobs`, by the weights that the run started from."""
        budget, targets = self._budget(micro_batch_size), data.get("token_mask")
        values = self.engine.log_probs(data, budget, targets=targets, reference=True)
        return BatchedDataDict({"reference_logprobs": values})

    def get_values(self, data: BatchedDataDict, micro_batch_size: int | None = None) -> BatchedDataDict:
        """`values [B, S]` float32: the critic's estimate before each token; column 0 and padding are 0."""
        return BatchedDataDict({"values": self.engine.values(data, self._budget(micro_batch_size))})

    def save_checkpoint(
        self, weights_path: str, optimizer_path: str | None = None, tokenizer_path: str | None = None
    ) -> None:
        """Copies the state and writes it in the background; `async_save_done` says when it is on disk."""
        with phases.phase("save"):
            self.checkpointer.save(Path(weights_path), Path(optimizer_path) if optimizer_path else None)
            if tokenizer_path is not None and self.rank == 0:
                self.tokenizer.save_pretrained(tokenizer_path)

    def start_profile(self) -> None:
        """Times the phases of this process from now on; on a GPU each waits for the device, which costs overlap."""
        self.engine.watch_head()
        phases.start_profile(torch.cuda.synchronize if self.device.type == "cuda" else None)

    def stop_profile(self) -> dict[str, float]:
        """Seconds by phase since `start_profile`; each second counts once."""
        self.engine.unwatch_head()
        return phases.stop_profile()

    def async_save_done(self) -> bool:
        """Whether the last save is on disk; never waits. Raises `RunError` when it failed."""
        return self.checkpointer.is_done()

    def _local_coords(self) -> dict[str, int]:
        return self.mesh.coords

    def _get_replica_group(self) -> dist.ProcessGroup | None:
        return self.mesh.replica_group

    def _get_data_group(self) -> dist.ProcessGroup:
        return self.mesh.data_group

    def _finish_step(self) -> StepResult:
        """Closes the step, and with it the stretch of time over which `engine_busy` is taken."""
        with self._busy():
            step = self.engine.finish_step()
        self._busy_s -= step.waited_s
        now, since = time.perf_counter(), self._finished_at
        self._engine_busy = None if since is None else self._busy_s / (now - since)
        self._finished_at, self._busy_s = now, 0.0
        return step

    @contextmanager
    def _busy(self) -> Generator[None, None, None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self._busy_s += time.perf_counter() - started

    def _rows_per_step(self, data: BatchedDataDict, gbs: int | None) -> list[int]:
        if data.elem_counts_per_gb is not None:
            return data.elem_counts_per_gb
        data_ranks = self.mesh.size(DATA)
        local = data.size if gbs is None else gbs // data_ranks
        if local == 0 or data.size % local:
            raise ValueError(
                f"{data.size} rows on a rank do not divide into steps of {gbs} rows over {data_ranks} ranks"
            )
        return [local] * (data.size // local)

    def _budget(self, mbs: int | None) -> int | None:
        return None if mbs is None else mbs * self.row_tokens

    def _train_result(self, steps: list[StepResult]) -> dict[str, Any]:
        """What a rank reports of its steps.

        `global_loss`: one float per step, the same on all ranks; `grad_norm`: of the last step; `all_mb_metrics`: this
        rank's metrics by name, one entry per forward pass, with `lr`, `wd`, `global_valid_seqs`, `global_valid_toks`;
        `skipped`: why the last step changed nothing, or None; `rank`; from the second step on `engine_busy`: the part
        of the time since the step before in which the engine trained. The rest is loading, calls on their way, and
        whatever else worker and controller did.
        """
        metrics: dict[str, list[float]] = {}
        for step in steps:
            # A rank without rows still reports the step's rates and counts.
            for record in step.records or [{}]:
                shared = {
                    "lr": step.lr,
                    "wd": step.weight_decay,
                    "global_valid_seqs": step.valid_rows,
                    "global_valid_toks": step.valid_tokens,
                }
                for key, value in (record | shared).items():
                    metrics.setdefault(key, []).append(value)
        busy = {} if self._engine_busy is None else {"engine_busy": self._engine_busy}
        return busy | {
            "global_loss": [step.loss for step in steps],
            "grad_norm": steps[-1].grad_norm,
            "all_mb_metrics": metrics,
            "skipped": steps[-1].skipped,
            "rank": self.rank,
        }

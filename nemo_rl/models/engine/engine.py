"""The engine: one model, its optimizer, and the split step `begin, microbatch*, finish or abort`.

Losses and gradients of a step are raw sums. `finish` divides once by the number of trained tokens (or rows) of all
ranks and microbatches, so that the update depends neither on the number of data-parallel ranks, nor on how rows were
cut into microbatches, nor on packing.
"""

import logging
import math
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from nemo_rl.algorithms.loss.interfaces import (
    LossFunction,
    LossInputType,
    LossType,
    MetricNormalizer,
    metric_rule,
    trained_token_mask,
)
from nemo_rl.models.engine.build import BuiltModel, build_model, build_reference
from nemo_rl.models.engine.config import DATA, EngineConfig
from nemo_rl.models.engine.gradients import discard_unreduced, scale_and_clip, sum_over_data_ranks, sync_in_backward
from nemo_rl.models.engine.heads import HEAD, Head, LMHead, ValueHead, watch_projection
from nemo_rl.models.engine.mesh import Mesh
from nemo_rl.models.engine.microbatch import SHAPE_MULTIPLE, Pack, build_pack, filler_pack, plan_packs
from nemo_rl.models.engine.optimizer import build_optimizer, build_schedule
from nemo_rl.models.engine.pass_size import even_pack, measured_pass_tokens, pass_seconds
from nemo_rl.models.engine.precision import compiles_per_shape
from nemo_rl.utils.errors import PeerError
from nemo_rl.utils.phases import phase

log = logging.getLogger(__name__)

Rows = Mapping[str, Any]


@dataclass
class _OpenStep:
    """What has been added up since `begin`."""

    loss_fn: LossFunction
    microbatch_tokens: int
    loss: float = 0.0
    valid_tokens: float = 0.0
    valid_rows: float = 0.0
    records: list[dict[str, float]] = field(default_factory=list)
    failed: bool = False
    summed: bool = False


@dataclass(frozen=True)
class StepResult:
    """One optimizer step, the same on all ranks but for `records`.

    Attributes:
        loss: mean over the step's trained tokens (or rows), nats; 0 when there were none.
        grad_norm: L2 norm before clipping.
        lr: learning rate the step used.
        valid_tokens: trained tokens over all ranks.
        valid_rows: rows with weight over all ranks.
        skipped: why nothing was updated: "no_trained_token", "non_finite_gradient", or None.
        records: this rank's metrics, one dict per forward pass, normalised.
        waited_s: time in which this rank had done its part and waited for the others.
    """

    loss: float
    grad_norm: float
    lr: float
    weight_decay: float
    valid_tokens: float
    valid_rows: float
    skipped: str | None
    records: list[dict[str, float]]
    waited_s: float = 0.0


class Engine:
    """A model that can be trained by any loss over its head's output: a policy or a critic.

    Rows come in as `input_ids [B, S]`, `input_lengths [B]`, `token_mask [B, S]`, `sample_mask [B]` and whatever else
    the loss reads, on the CPU; the engine packs them to its token budget. Passes without gradients may come between the
    calls of an open step and change nothing of it.
    """

    def __init__(self, config: EngineConfig, mesh: Mesh):
        self.config = config
        self.mesh = mesh
        self.model = build_model(config, mesh)
        self.reference = build_reference(config, mesh, sharded=self.model.sharded) if config.reference else None
        self.head: Head = LMHead(config.temperature) if config.head == "lm" else ValueHead()
        self.optimizer = None
        self.schedule = None
        if config.optimizer is not None:
            self.optimizer = build_optimizer(
                config.optimizer, self.model.trainable, fused=not self.model.sharded, section=config.section
            )
            self.schedule = build_schedule(config.schedule, self.optimizer, section=config.section)
        self.num_steps = 0
        self.microbatch_tokens = config.microbatch_tokens
        self.inference_microbatch_tokens = config.inference_microbatch_tokens or config.microbatch_tokens
        self._step: _OpenStep | None = None
        self._head_watch: list[RemovableHandle] = []
        if self.optimizer is not None and (config.torch_compile or config.measure_microbatch_tokens):
            self._try_passes()

    @property
    def num_parameters(self) -> int:
        """Parameters of the whole model, shared ones once."""
        return sum(p.numel() for p in self.model.masters.values())

    # -- the split step -----------------------------------------------------------------------------------------------

    def begin_step(self, loss_fn: LossFunction, microbatch_tokens: int | None = None) -> None:
        """Opens a step with no gradients.

        Raises:
            RuntimeError: a step is open, or the engine was built without an optimizer.
            ValueError: the loss wants something else than the head gives.
        """
        if self._step is not None:
            raise RuntimeError("a training step is already open; finish or abort it first")
        if self.optimizer is None:
            raise RuntimeError("this model was built without an optimizer, so it can't be trained")
        self._check_loss(loss_fn)
        self.optimizer.zero_grad()
        # Dropout draws depend on the step and the rank only, so a resumed run draws what an uninterrupted one does.
        torch.manual_seed(self.config.seed + self.num_steps * dist.get_world_size() + dist.get_rank())
        sync_in_backward(self.model.module, False)
        self._step = _OpenStep(loss_fn, microbatch_tokens or self.microbatch_tokens)

    def microbatch(self, rows: Rows) -> None:
        """Forward and backward over some rows; loss and gradients add up.

        Raises:
            RuntimeError: no step is open.
        """
        step = self._require_step()
        self.model.module.train()  # here, since an inference pass may come between two calls of a step
        step.valid_rows += float(rows["sample_mask"].double().sum())
        step.valid_tokens += float(trained_token_mask(rows).double().sum())
        for pack in self._packs(rows, step.microbatch_tokens):
            loss, metrics = self._loss(step.loss_fn, rows, pack)
            with phase("backward", opaque=True):
                loss.backward()
            if not pack.is_filler:
                step.loss += loss.item()
                step.records.append(metrics)

    def finish_step(self) -> StepResult:
        """Sums gradients over the data ranks, divides once, clips, updates, and closes the step.

        Nothing is updated when no rank had a trained token or when the gradient norm is not finite: no weight decay,
        no tick of the schedule, on no rank.

        Raises:
            RuntimeError: no step is open.
            PeerError: on all ranks, where one of them has failed in this step; it can only be aborted.
        """
        step = self._require_step()
        optimizer, schedule = self.optimizer, self.schedule
        assert optimizer is not None and schedule is not None
        started = time.perf_counter()
        sums = self._sum_over_ranks(step.loss, step.valid_tokens, step.valid_rows, failed=step.failed)
        waited, step.summed = time.perf_counter() - started, True
        loss_sum, valid_tokens, valid_rows = sums
        count = valid_tokens if step.loss_fn.loss_type is LossType.TOKEN_LEVEL else valid_rows
        lr, weight_decay = optimizer.param_groups[0]["lr"], optimizer.param_groups[0].get("weight_decay", 0.0)
        skipped, grad_norm = None, 0.0
        if count == 0:
            skipped = "no_trained_token"
        else:
            with phase("gradient reduction", opaque=True):
                self._reduce_gradients()
            with phase("clip"):
                sharded_over = self.mesh.data_group if self.model.sharded else None
                grad_norm = scale_and_clip(self.model.trainable, 1.0 / count, self.config.max_grad_norm, sharded_over)
            if math.isfinite(grad_norm):
                with phase("optimizer"):
                    optimizer.step()
                    self.model.publish()
                    schedule.step()
            else:
                skipped = "non_finite_gradient"
        if skipped:
            log.warning("step skipped: %s", skipped.replace("_", " "))
        with phase("optimizer"):
            optimizer.zero_grad()
        self.num_steps += 1
        self._step = None
        scales = {
            MetricNormalizer.TOKENS: 1.0 / max(valid_tokens, 1.0),
            MetricNormalizer.SEQUENCES: 1.0 / max(valid_rows, 1.0),
        }
        return StepResult(
            loss=loss_sum / max(count, 1.0),
            grad_norm=grad_norm,
            lr=lr,
            weight_decay=weight_decay,
            valid_tokens=valid_tokens,
            valid_rows=valid_rows,
            skipped=skipped,
            records=[_normalise(record, step.loss_fn, scales) for record in step.records],
            waited_s=waited,
        )

    def fail_step(self) -> None:
        """The open step lacks something: `finish_step` will raise, on all ranks. A no-op without a step."""
        if self._step is not None:
            self._step.failed = True

    def withdraw_step(self) -> None:
        """Ends this rank's part of a step that the other ranks are about to finish: they raise in place of waiting.

        Not where weights are sharded, since they wait inside their passes, nor past the point where they heard of it.
        """
        if not self.model.sharded and not (self._step and self._step.summed):
            with suppress(PeerError):
                self._sum_over_ranks(0.0, 0.0, 0.0, failed=True)
        self.abort_step()

    def abort_step(self) -> None:
        """Discards the open step; a no-op when there is none. `begin_step` works afterwards."""
        if self._step is not None and self.optimizer is not None:
            self.optimizer.zero_grad()
            self.model.reshard()
            discard_unreduced(self.model.module)
        self._step = None

    # -- without gradients --------------------------------------------------------------------------------------------

    @torch.no_grad()
    def evaluate(self, loss_fn: LossFunction, rows: Rows) -> dict[str, float]:
        """Raw sums over this rank's rows: `loss_sum`, `valid_tokens`, `valid_rows`. Changes nothing."""
        self._check_loss(loss_fn)
        self.model.module.eval()
        loss_sum = 0.0
        with phase("validation", opaque=True):
            for pack in self._packs(rows, self.microbatch_tokens):
                loss, _ = self._loss(loss_fn, rows, pack)
                if not pack.is_filler:
                    loss_sum += loss.item()
            self.model.reshard()
        return {
            "loss_sum": loss_sum,
            "valid_tokens": float(trained_token_mask(rows).double().sum()),
            "valid_rows": float(rows["sample_mask"].double().sum()),
        }

    def evaluation_step(self, loss_fn: LossFunction, rows: Rows) -> StepResult:
        """The result that a step over the rows of all ranks would report, without any update."""
        sums = self.evaluate(loss_fn, rows)
        loss_sum, valid_tokens, valid_rows = self._sum_over_ranks(*sums.values())
        count = valid_tokens if loss_fn.loss_type is LossType.TOKEN_LEVEL else valid_rows
        return StepResult(
            loss=loss_sum / max(count, 1.0),
            grad_norm=0.0,
            lr=0.0,
            weight_decay=0.0,
            valid_tokens=valid_tokens,
            valid_rows=valid_rows,
            skipped=None,
            records=[],
        )

    def log_probs(
        self,
        rows: Rows,
        microbatch_tokens: int | None = None,
        *,
        targets: Tensor | None = None,
        reference: bool = False,
    ) -> Tensor:
        """Log-probability of tokens given their prefix, float32 `[B, S]` on the CPU.

        Args:
            rows: `input_ids [B, S]` and `input_lengths [B]` are read.
            targets: `[B, S]`, not 0 where a log-probability is wanted; elsewhere it comes out as 0 and costs no
                vocabulary projection. None wants that of every token. Column 0 has no prefix and is always 0.
            reference: by the frozen weights instead of the trained ones.

        Raises:
            RuntimeError: the model is a critic, or has no reference.
        """
        if self.head.input_type is not LossInputType.LOGPROB:
            raise RuntimeError("a critic gives no log-probabilities")
        model = self.model
        if reference:
            if self.reference is None:
                raise RuntimeError("this model was built without a reference; set init_reference_model")
            model = self.reference
        return self._head_outputs(model, rows, microbatch_tokens, targets)

    def values(self, rows: Rows, microbatch_tokens: int | None = None) -> Tensor:
        """The critic's estimate before each token, float32 `[B, S]` on the CPU: column t is the head's output at t - 1.

        Column 0 and padding are 0.

        Raises:
            RuntimeError: the model is no critic.
        """
        if self.head.input_type is not LossInputType.LOGIT:
            raise RuntimeError("this model has no value head")
        return self._head_outputs(self.model, rows, microbatch_tokens, None)

    # -- where the time goes ------------------------------------------------------------------------------------------

    def watch_head(self) -> None:
        """Phases tell the vocabulary projection from the layers, until `unwatch_head`."""
        self.unwatch_head()
        self._head_watch = watch_projection(self.model.module)

    def unwatch_head(self) -> None:
        """Undoes `watch_head`; a no-op without one."""
        while self._head_watch:
            self._head_watch.pop().remove()

    # -- shared -------------------------------------------------------------------------------------------------------

    def _try_passes(self) -> None:
        """Passes that train nothing, before the first step: so that they compile there, or to find the best size."""
        assert self.optimizer is not None
        self.model.module.train()
        sync_in_backward(self.model.module, False)
        longest_row = self.config.microbatch_tokens
        if self.config.torch_compile:
            # Code for few tokens does without threads, and is compiled apart. Too little memory is for the step to say,
            # which tries smaller passes.
            for tokens in (1, longest_row):
                pass_seconds(self._head_output, even_pack(tokens, longest_row))
        if self.config.measure_microbatch_tokens:
            self.microbatch_tokens = measured_pass_tokens(
                self._head_output,
                longest_row=longest_row,
                data_group=self.mesh.data_group if self.mesh.size(DATA) > 1 else None,
            )
            self.inference_microbatch_tokens = self.config.inference_microbatch_tokens or self.microbatch_tokens
        self.optimizer.zero_grad()
        self.model.reshard()

    def _check_loss(self, loss_fn: LossFunction) -> None:
        if loss_fn.input_type is not self.head.input_type:
            raise ValueError(
                f"the {self.config.head} head gives input of kind {self.head.input_type.value!r}, but the loss wants "
                f"{loss_fn.input_type.value!r}"
            )

    @torch.no_grad()
    def _head_outputs(
        self, model: BuiltModel, rows: Rows, microbatch_tokens: int | None, targets: Tensor | None
    ) -> Tensor:
        """What the head says of the targets, float32 `[B, S]` on the CPU, 0 elsewhere; None means every token."""
        model.module.eval()
        width = rows["input_ids"].size(1)
        out = torch.zeros(rows["input_ids"].shape, dtype=torch.float32)
        columns = torch.arange(width)
        wanted = (columns[None, :] > 0) & (columns[None, :] < rows["input_lengths"][:, None])
        if targets is not None:
            wanted &= targets != 0
        with phase("inference", opaque=True):
            for pack in self._packs(rows, microbatch_tokens or self.inference_microbatch_tokens, wanted):
                values = self._head_output(pack, model)
                if not pack.is_filler:
                    out[pack.rows.cpu()] = pack.to_rows(values, width).cpu()
            model.reshard()
        return out

    def _require_step(self) -> _OpenStep:
        if self._step is None:
            raise RuntimeError("no training step is open; call begin first")
        return self._step

    def _sum_over_ranks(self, *values: float, failed: bool = False) -> list[float]:
        totals = torch.tensor([*values, float(failed)], dtype=torch.float64)
        if self.mesh.size(DATA) > 1:
            with phase("waiting for other ranks"):
                dist.all_reduce(totals, group=self.mesh.data_group)
        *sums, num_failed = totals.tolist()
        if num_failed:
            raise PeerError(f"{num_failed:.0f} of {self.mesh.size(DATA)} ranks failed before the end of the step")
        return sums

    def _packs(self, rows: Rows, budget: int, target_mask: Tensor | None = None) -> list[Pack]:
        """The rows that have a target, packed; fillers behind them where ranks must make equally many passes."""
        if target_mask is None:
            target_mask = torch.zeros_like(rows["input_ids"], dtype=torch.bool)
            target_mask[:, 1:] = trained_token_mask(rows) != 0
        active = target_mask.any(1).nonzero().squeeze(1).tolist()
        lengths = rows["input_lengths"].tolist()
        groups = plan_packs([lengths[i] for i in active], budget)
        multiple = SHAPE_MULTIPLE if compiles_per_shape(self.mesh.device, self.model.compute_dtype) else 1
        with phase("packing"):
            packs = [build_pack(rows, [active[i] for i in group], target_mask, multiple) for group in groups]
        if self.model.sharded:
            most = torch.tensor([len(packs)])
            dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self.mesh.data_group)
            packs += [filler_pack()] * (int(most) - len(packs))
        return packs

    def _head_output(self, pack: Pack, model: BuiltModel | None = None) -> Tensor:
        return self.head((model or self.model).module, pack.to(self.mesh.device))

    def _loss(self, loss_fn: LossFunction, rows: Rows, pack: Pack) -> tuple[Tensor, dict[str, float]]:
        """The raw-sum loss of a pack and its metrics."""
        values = self._head_output(pack)
        if pack.is_filler:
            return values.sum() * 0.0, {}
        width = int(rows["input_ids"].size(1))
        data = {
            key: value[pack.rows].to(values.device)
            for key, value in rows.items()
            if isinstance(value, Tensor) and value.size(0) == rows["input_ids"].size(0)
        }
        with phase(HEAD):
            by_column = pack.to_rows(values, width)
            if loss_fn.input_type is LossInputType.LOGIT:
                return loss_fn(data, 1.0, 1.0, logits=by_column)
            return loss_fn(data, 1.0, 1.0, next_token_logprobs=by_column[:, 1:])

    def _reduce_gradients(self) -> None:
        if self.model.sharded:
            # A sharded module reduces in backward only. One pass of weight zero carries the sums of all others.
            sync_in_backward(self.model.module, True)
            (self._head_output(filler_pack()).sum() * 0.0).backward()
        elif self.mesh.size(DATA) > 1:
            sum_over_data_ranks(self.model.trainable, self.mesh.data_group)


def _normalise(
    record: dict[str, float], loss_fn: LossFunction, scales: dict[MetricNormalizer, float]
) -> dict[str, float]:
    """Each metric times what its rule asks for; a rule without a scale leaves it as it is."""
    rules = {key: metric_rule(key, loss_fn.metric_normalizations, loss_fn.loss_type) for key in record}
    return {key: value * scales.get(rules[key], 1.0) for key, value in record.items()}

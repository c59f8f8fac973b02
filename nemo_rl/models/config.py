"""Config sections that the policy and the critic share, and how they become an engine's."""

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from nemo_rl.models.engine.config import EngineConfig, OptimizerSpec, ParallelSizes, ScheduleSpec
from nemo_rl.utils.config import ConfigModel
from nemo_rl.utils.errors import UserError


class TokenizerConfig(ConfigModel):
    """Where the tokenizer comes from and how it renders a conversation."""

    name: str | None = None
    """Local directory or hub name; null takes the model's."""
    chat_template: str | None = None
    """A Jinja template as text, or the path of a file with one; null takes the tokenizer's own."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables the template sees on every row, such as `enable_thinking`."""
    use_processor: bool = False
    """Load a multimodal processor. Only text is supported, so it must be false."""


class TokenBudgetConfig(ConfigModel):
    """`sequence_packing` and `dynamic_batching`: the engine always packs; an enabled block gives its token budget."""

    enabled: bool = False
    """Take the budgets of this block."""
    train_mb_tokens: int | None = Field(default=None, ge=1)
    """Tokens of a forward pass in training."""
    logprob_mb_tokens: int | None = Field(default=None, ge=1)
    """Tokens of a forward pass without gradients."""


class OptimizerConfig(ConfigModel):
    """An optimizer of `torch.optim`."""

    name: str = "torch.optim.AdamW"
    """A class of `torch.optim`."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Its arguments, such as `lr`."""


class SchedulerConfig(ConfigModel):
    """One phase of the schedule, or the milestones between phases (in optimizer steps)."""

    name: str | None = None
    """A class of `torch.optim.lr_scheduler`."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Its arguments."""
    milestones: list[Annotated[int, Field(ge=1)]] | None = None
    """Steps at which the next phase starts; the only key of its entry."""

    @model_validator(mode="after")
    def _milestones_stand_alone(self) -> Self:
        if self.milestones is not None and (self.name is not None or self.kwargs):
            raise ValueError("milestones is the only key of its entry; phases are entries of their own")
        return self


class DTensorConfig(ConfigModel):
    """The `dtensor_cfg` (also `automodel_cfg`) block of existing recipes, as far as it has a meaning here."""

    enabled: bool = False
    """Take the settings of this block."""
    tensor_parallel_size: int = Field(default=1, ge=1)
    """Must be 1 for now."""
    context_parallel_size: int = Field(default=1, ge=1)
    """Must be 1 for now."""
    activation_checkpointing: bool = False
    """As `policy.activation_checkpointing`."""


class MegatronOptimizerConfig(ConfigModel):
    """Megatron's optimizer keys, translated to `torch.optim`."""

    optimizer: Literal["adam", "sgd"] = "adam"
    """`adam` becomes AdamW, which is what Megatron's adam is."""
    lr: float = Field(ge=0)
    """Peak learning rate."""
    min_lr: float = Field(default=0.0, ge=0)
    """Rate at the end of a decay."""
    weight_decay: float = Field(default=0.01, ge=0)
    """Decoupled with `adam`, part of the gradient with `sgd`."""
    adam_beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of the first moment."""
    adam_beta2: float = Field(default=0.999, ge=0, lt=1)
    """Decay of the second moment."""
    adam_eps: float = Field(default=1e-8, ge=0)
    """Added to the root of the second moment."""
    sgd_momentum: float = Field(default=0.9, ge=0)
    """Momentum of `sgd`."""
    clip_grad: float | None = Field(default=None, ge=0)
    """Overrides `max_grad_norm` where it is set; 0 never clips, as in Megatron."""

    def spec(self) -> OptimizerSpec:
        """The torch optimizer that these keys describe; Megatron's adam decays weights apart from the gradient."""
        if self.optimizer == "sgd":
            kwargs = {"lr": self.lr, "momentum": self.sgd_momentum, "weight_decay": self.weight_decay}
            return OptimizerSpec(name="torch.optim.SGD", kwargs=kwargs)
        betas = (self.adam_beta1, self.adam_beta2)
        kwargs = {"lr": self.lr, "weight_decay": self.weight_decay, "betas": betas, "eps": self.adam_eps}
        return OptimizerSpec(name="torch.optim.AdamW", kwargs=kwargs)


class MegatronSchedulerConfig(ConfigModel):
    """Megatron's schedule: linear warm-up from `lr_warmup_init`, then a decay to `min_lr` that stays there."""

    lr_decay_style: Literal["constant", "linear", "cosine"] = "constant"
    """Course of the rate after the warm-up."""
    lr_decay_iters: int | None = Field(default=None, ge=1)
    """Step at which `min_lr` is reached; null is the length of the run."""
    lr_warmup_iters: int = Field(default=0, ge=0)
    """Steps of the linear warm-up."""
    lr_warmup_init: float = Field(default=0.0, ge=0)
    """Rate at the start of the warm-up."""

    def spec(self, lr: float, min_lr: float, train_iters: int | None, *, section: str = "policy") -> ScheduleSpec:
        """The torch schedulers that give the same rate at every step; `section` is where this block stands.

        Raises:
            UserError: a decay without an end.
        """
        phases: list[OptimizerSpec] = []
        milestones: list[int] = []
        warmup = self.lr_warmup_iters
        if warmup and lr > 0:
            # torch's LinearLR wants a start above 0.
            start = max(self.lr_warmup_init / lr, 1e-8)
            kwargs = {"start_factor": min(start, 1.0), "end_factor": 1.0, "total_iters": warmup}
            phases.append(OptimizerSpec(name="LinearLR", kwargs=kwargs))
            milestones.append(warmup)
        if self.lr_decay_style == "constant" or lr == 0:
            phases.append(OptimizerSpec(name="ConstantLR", kwargs={"factor": 1.0, "total_iters": 0}))
            return ScheduleSpec(phases=tuple(phases), milestones=tuple(milestones))
        end = self.lr_decay_iters or train_iters
        if end is None or end <= warmup:
            raise UserError(
                f"{section}.megatron_cfg.scheduler.lr_decay_iters is {end}; a {self.lr_decay_style} decay needs more "
                f"steps than lr_warmup_iters ({warmup})"
            )
        if self.lr_decay_style == "linear":
            kwargs = {"start_factor": 1.0, "end_factor": min_lr / lr, "total_iters": end - warmup}
            phases.append(OptimizerSpec(name="LinearLR", kwargs=kwargs))
        else:
            cosine = {"T_max": end - warmup, "eta_min": min_lr}
            phases.append(OptimizerSpec(name="CosineAnnealingLR", kwargs=cosine))
            # After T_max torch's cosine rises again; the rate is to stay at its floor.
            phases.append(OptimizerSpec(name="ConstantLR", kwargs={"factor": min_lr / lr, "total_iters": 2**60}))
            milestones.append(end)
        return ScheduleSpec(phases=tuple(phases), milestones=tuple(milestones))


class MegatronConfig(ConfigModel):
    """The `megatron_cfg` block of existing recipes, translated onto the engine."""

    enabled: bool = False
    """Take the settings of this block."""
    tensor_model_parallel_size: int = Field(default=1, ge=1)
    """Must be 1 for now."""
    pipeline_model_parallel_size: int = Field(default=1, ge=1)
    """Must be 1 for now."""
    context_parallel_size: int = Field(default=1, ge=1)
    """Must be 1 for now."""
    activation_checkpointing: bool = False
    """As `policy.activation_checkpointing`."""
    use_fused_linear_logprobs: bool = False
    """Accepted: the head runs at trained positions only, which is what the fused kernel would save."""
    train_iters: int | None = None
    """Set by `setup_sft_v2`: the length of the run in optimizer steps, the schedule's horizon."""
    optimizer: MegatronOptimizerConfig | None = None
    """Wins over `policy.optimizer`."""
    scheduler: MegatronSchedulerConfig | None = None
    """Wins over `policy.scheduler`."""


class ModelConfig(ConfigModel):
    """What a trained model needs, whatever its role."""

    section: ClassVar[str] = "policy"
    """Where a model of this role stands in the run's config, for messages."""

    model_name: str
    """Local directory or hub name of a causal language model."""
    tokenizer: TokenizerConfig = Field(default_factory=TokenizerConfig)
    train_global_batch_size: int = Field(ge=1)
    """Rows of an optimizer step, over all workers."""
    train_micro_batch_size: int = Field(default=1, ge=1)
    """With `max_total_sequence_length`, the token budget of a forward pass, unless a budget is given."""
    train_mb_tokens: Annotated[int, Field(ge=1)] | Literal["auto"] | None = None
    """Token budget of a forward pass in training; the first choice of all. `auto` finds it by trying at the start, in
    some seconds; losses do not depend on it beyond rounding."""
    logprob_batch_size: int | None = Field(default=None, ge=1)
    """Like `train_micro_batch_size`, for passes without gradients; null takes the token budget of training."""
    max_total_sequence_length: int = Field(ge=2)
    """Longest row in tokens."""
    make_sequence_length_divisible_by: int = Field(default=1, ge=1)
    """Padded views get a width that is a multiple of this; the engine itself does not pad."""
    precision: Literal["auto", "bfloat16", "bf16", "float32", "fp32"] = "auto"
    """Compute dtype; weights and optimizer state are float32. `auto`: bfloat16 where the hardware multiplies in it."""
    max_grad_norm: float | None = Field(default=1.0, gt=0)
    """Gradients with a larger L2 norm are scaled down to it; null never."""
    optimizer: OptimizerConfig | None = None
    """Required, unless `megatron_cfg` is enabled and has one."""
    scheduler: SchedulerConfig | list[SchedulerConfig] | None = None
    """Phases of the learning rate and, between them, milestones; null is a constant rate."""
    activation_checkpointing: bool = False
    """Compute activations again in backward instead of keeping them: less memory, about a third more time."""
    torch_compile: bool = False
    """Compile the decoder's blocks at the start, in 10 to 50 s on a CPU; then passes are some percent faster."""
    data_parallel: Literal["auto", "replicate", "shard"] = "auto"
    """Weights whole on every worker, or sharded over them; `auto` replicates when they fit with room to spare."""
    dynamic_batching: TokenBudgetConfig = Field(default_factory=TokenBudgetConfig)
    sequence_packing: TokenBudgetConfig = Field(default_factory=TokenBudgetConfig)
    megatron_cfg: MegatronConfig | None = None
    dtensor_cfg: DTensorConfig | None = None
    automodel_cfg: DTensorConfig | None = None
    hf_config_overrides: dict[str, Any] | None = None
    """Fields of the model's `config.json` to replace."""
    max_consecutive_skipped_steps: int = Field(default=10, ge=1)
    """Steps in a row with a non-finite gradient norm that end the run."""

    @property
    def megatron(self) -> MegatronConfig | None:
        """The Megatron block when it is enabled."""
        return self.megatron_cfg if self.megatron_cfg is not None and self.megatron_cfg.enabled else None

    @property
    def dtensor(self) -> DTensorConfig | None:
        """The DTensor block, under either of its names, when it is enabled."""
        for block in (self.dtensor_cfg, self.automodel_cfg):
            if block is not None and block.enabled:
                return block
        return None

    @property
    def parallel(self) -> ParallelSizes:
        """Sizes of the axes inside a replica, from the enabled backend block."""
        if self.megatron is not None:
            return ParallelSizes(
                tensor=self.megatron.tensor_model_parallel_size,
                context=self.megatron.context_parallel_size,
                pipeline=self.megatron.pipeline_model_parallel_size,
            )
        if self.dtensor is not None:
            return ParallelSizes(tensor=self.dtensor.tensor_parallel_size, context=self.dtensor.context_parallel_size)
        return ParallelSizes()

    def microbatch_tokens(self, micro_batch_size: int | None = None, *, training: bool = True) -> int:
        """Token budget of a forward pass: `train_mb_tokens`, else an enabled block's, else rows times their length.

        With `train_mb_tokens: auto` it is the least that is tried: one row of the greatest length.
        Without gradients it is an enabled block's `logprob_mb_tokens`, else that of `logprob_batch_size` rows, else the
        budget of training.
        """
        if micro_batch_size is not None:
            return micro_batch_size * self.max_total_sequence_length
        enabled = [block for block in (self.dynamic_batching, self.sequence_packing) if block.enabled]
        if not training:
            for block in enabled:
                if block.logprob_mb_tokens is not None:
                    return block.logprob_mb_tokens
            if self.logprob_batch_size is not None:
                return self.logprob_batch_size * self.max_total_sequence_length
        if self.train_mb_tokens == "auto":
            return self.max_total_sequence_length
        if self.train_mb_tokens is not None:
            return self.train_mb_tokens
        for block in enabled:
            if block.train_mb_tokens is not None:
                return block.train_mb_tokens
        return self.train_micro_batch_size * self.max_total_sequence_length

    def _inference_tokens(self) -> int | None:
        """The budget without gradients; None where it follows one that is found by trying."""
        tokens = self.microbatch_tokens(training=False)
        return None if self.train_mb_tokens == "auto" and tokens == self.microbatch_tokens() else tokens

    def optimizer_spec(self) -> OptimizerSpec:
        """The optimizer of the enabled Megatron block, else `optimizer`.

        Raises:
            UserError: there is none.
        """
        if self.megatron is not None and self.megatron.optimizer is not None:
            return self.megatron.optimizer.spec()
        if self.optimizer is None:
            raise UserError(
                f"{self.section}.optimizer is missing; give for example "
                "{name: torch.optim.AdamW, kwargs: {lr: 1.0e-5}}"
            )
        return OptimizerSpec(name=self.optimizer.name, kwargs={k: _number(v) for k, v in self.optimizer.kwargs.items()})

    def schedule_spec(self) -> ScheduleSpec:
        """The schedule of the enabled Megatron block, else `scheduler`; empty is a constant rate.

        Raises:
            UserError: a scheduler without a name, or a decay without an end.
        """
        megatron = self.megatron
        if megatron is not None and megatron.optimizer is not None:
            if megatron.scheduler is None:
                return ScheduleSpec()
            lr, min_lr = megatron.optimizer.lr, megatron.optimizer.min_lr
            return megatron.scheduler.spec(lr, min_lr, megatron.train_iters, section=self.section)
        entries = self.scheduler if isinstance(self.scheduler, list) else [self.scheduler] if self.scheduler else []
        phases, milestones = [], []
        for entry in entries:
            if entry.milestones is not None:
                milestones += entry.milestones
            elif entry.name is None:
                raise UserError(f"{self.section}.scheduler has an entry with neither a name nor milestones")
            else:
                phases.append(OptimizerSpec(name=entry.name, kwargs={k: _number(v) for k, v in entry.kwargs.items()}))
        return ScheduleSpec(phases=tuple(phases), milestones=tuple(milestones))

    def engine_config(self, *, seed: int, init_optimizer: bool = True, temperature: float = 1.0) -> EngineConfig:
        """What the engine of this model is built from.

        Args:
            seed: of dropout.
            init_optimizer: False builds a model for inference only.
            temperature: the one that the tokens are sampled at, so that log-probabilities are those of the sampler.
        """
        megatron, dtensor = self.megatron, self.dtensor
        clip = megatron.optimizer.clip_grad if megatron is not None and megatron.optimizer is not None else None
        return EngineConfig(
            model_name=self.model_name,
            hf_config_overrides=dict(self.hf_config_overrides or {}),
            precision=self.precision,
            parallel=self.parallel,
            data_parallel=self.data_parallel,
            max_grad_norm=self.max_grad_norm if clip is None else clip or None,
            optimizer=self.optimizer_spec() if init_optimizer else None,
            schedule=self.schedule_spec() if init_optimizer else ScheduleSpec(),
            activation_checkpointing=self.activation_checkpointing
            or (megatron is not None and megatron.activation_checkpointing)
            or (dtensor is not None and dtensor.activation_checkpointing),
            torch_compile=self.torch_compile,
            microbatch_tokens=self.microbatch_tokens(),
            measure_microbatch_tokens=self.train_mb_tokens == "auto",
            inference_microbatch_tokens=self._inference_tokens(),
            temperature=temperature,
            seed=seed,
            section=self.section,
        )


def _number(value: Any) -> Any:
    """A number that YAML read as text, such as `1e-5`; other values as they are."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


class PolicyConfig(ModelConfig):
    """The `policy` section."""

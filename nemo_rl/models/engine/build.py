"""From a model directory to a trainable module: weights, attention, precision, and its place on the data axis."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from nemo_rl.models.engine.attention import ATTENTION_NAME, register_attention
from nemo_rl.models.engine.compiled_blocks import compile_blocks
from nemo_rl.models.engine.config import DATA, EngineConfig
from nemo_rl.models.engine.mesh import Mesh
from nemo_rl.models.engine.model_config import packing_problem, read_model_config
from nemo_rl.models.engine.precision import compute_dtype
from nemo_rl.models.engine.value_model import ValueModel, fill_value_head
from nemo_rl.utils.errors import UserError

# fp32 weights, gradients and two Adam moments, with as much again for activations and the bf16 copies.
_BYTES_PER_PARAMETER = 16
_ROOM = 2.0


@dataclass
class BuiltModel:
    """A model ready to train, or a frozen one that only computes.

    Attributes:
        module: runs forward and backward, in the compute dtype.
        masters: the float32 parameters by name, each once, that the optimizer updates and a checkpoint keeps. They are
            the module's own, or stand beside its copies in the compute dtype. A frozen model has none.
        compute_dtype: of parameters and activations in forward and backward.
        sharded: the parameters are split over the data axis.
    """

    module: PreTrainedModel | ValueModel
    masters: dict[str, nn.Parameter]
    compute_dtype: torch.dtype
    sharded: bool

    @property
    def trainable(self) -> list[nn.Parameter]:
        """The masters that get gradients."""
        return [p for p in self.masters.values() if p.requires_grad]

    @torch.no_grad()
    def publish(self) -> None:
        """Copies the masters to the module that computes; after an update and after a load."""
        for name, parameter in self.module.named_parameters():
            if parameter is not self.masters[name]:
                parameter.copy_(self.masters[name])

    def reshard(self) -> None:
        """Gives up gathered parameters, which a forward without backward leaves in place of the sharded ones."""
        for part in self.module.modules():
            if isinstance(part, FSDPModule):
                part.reshard()


def _load(config: EngineConfig, hf_config: PretrainedConfig) -> PreTrainedModel | ValueModel:
    """The model of the role: a causal language model as it is, or its decoder under a value head."""
    register_attention()
    try:
        model = AutoModelForCausalLM.from_pretrained(
            config.model_name,
            config=hf_config,
            dtype=torch.float32,
            attn_implementation=ATTENTION_NAME,
            trust_remote_code=False,
        )
    except (OSError, ValueError) as error:
        first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(f"{config.section}.model_name: {config.model_name}: {first_line}") from error
    if config.head == "lm":
        return model
    critic = ValueModel(model.base_model)
    fill_value_head(
        critic.value_head, config.model_name, config.value_head_init, seed=config.seed, section=config.section
    )
    return critic


def _should_shard(config: EngineConfig, module: nn.Module, mesh: Mesh) -> bool:
    """`auto` replicates when weights, gradients and optimizer state fit on each rank with room to spare."""
    if mesh.size(DATA) == 1:
        return False
    if config.data_parallel != "auto":
        return config.data_parallel == "shard"
    needed = sum(p.numel() for p in module.parameters()) * _BYTES_PER_PARAMETER * _ROOM
    if mesh.device.type == "cuda":
        available = float(torch.cuda.get_device_properties(mesh.device).total_memory)
    else:
        pages = {k: int(v.split()[0]) for k, v in _meminfo()}
        available = pages.get("MemAvailable", 0) * 1024 / min(dist.get_world_size(), mesh.size(DATA))
    # The ranks must decide alike: the smallest memory counts.
    fits = torch.tensor(float(needed <= available))
    dist.all_reduce(fits, op=dist.ReduceOp.MIN)
    return not bool(fits)


def _meminfo() -> list[tuple[str, str]]:
    path = Path("/proc/meminfo")
    lines = path.read_text().splitlines() if path.exists() else []
    return [(name, value) for name, _, value in (line.partition(":") for line in lines)]


def _blocks(module: PreTrainedModel | ValueModel) -> list[nn.Module]:
    """The repeated layers, which are sharded and recomputed one by one."""
    names = set(module._no_split_modules or ())
    return [m for m in module.modules() if type(m).__name__ in names]


def _shard(module: PreTrainedModel | ValueModel, mesh: Mesh, dtype: torch.dtype) -> None:
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    data_mesh = mesh.device_mesh[DATA]
    for block in _blocks(module):
        fully_shard(block, mesh=data_mesh, mp_policy=policy)
    fully_shard(module, mesh=data_mesh, mp_policy=policy)
    for part in module.modules():
        if isinstance(part, FSDPModule):
            # Gradients are sums over ranks here; the step divides once by the number of trained tokens.
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)


def _split_off_masters(module: nn.Module, dtype: torch.dtype) -> dict[str, nn.Parameter]:
    """Gives the module parameters of `dtype` and returns the float32 ones, which collect their gradients.

    A gradient is added to its master as soon as backward has made it: sums over passes are float32, and no more than
    one gradient in the compute dtype is alive.
    """
    masters = {}

    def hand_over_to(master: nn.Parameter) -> Callable[[torch.Tensor], None]:
        def hand_over(parameter: torch.Tensor) -> None:
            gradient, parameter.grad = parameter.grad, None
            assert gradient is not None
            if master.grad is None:
                master.grad = gradient.float()
            else:
                master.grad.add_(gradient)

        return hand_over

    for name, parameter in module.named_parameters():
        master = nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad)
        parameter.data = parameter.data.to(dtype)
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(hand_over_to(master))
        masters[name] = master
    return masters


def build_model(config: EngineConfig, mesh: Mesh, *, frozen: bool = False) -> BuiltModel:
    """Loads the weights as float32 and prepares them for training on this rank.

    Args:
        frozen: for inference only: no gradients, and where weights are whole no float32 copy of them.

    Raises:
        UserError: the model can't be loaded, or can't be packed.
    """
    hf_config = read_model_config(config.model_name, config.hf_config_overrides, section=config.section)
    problem = packing_problem(hf_config)
    if problem:
        raise UserError(f"{config.section}.model_name: {problem}")
    dtype = compute_dtype(config.precision, mesh.device)
    module = _load(config, hf_config).train()
    nn.Module.to(module, mesh.device)
    if config.activation_checkpointing:
        module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if config.torch_compile:
        compile_blocks(_blocks(module))
    sharded = _should_shard(config, module, mesh)
    if sharded:
        _shard(module, mesh, dtype)
    if frozen:
        module.eval().requires_grad_(False)
        if not sharded:
            for parameter in module.parameters():
                parameter.data = parameter.data.to(dtype)
        return BuiltModel(module=module, masters={}, compute_dtype=dtype, sharded=sharded)
    own = sharded or dtype == torch.float32
    masters = dict(module.named_parameters()) if own else _split_off_masters(module, dtype)
    return BuiltModel(module=module, masters=masters, compute_dtype=dtype, sharded=sharded)


def build_reference(config: EngineConfig, mesh: Mesh, *, sharded: bool) -> BuiltModel:
    """A frozen model with the weights of `model_name`, laid out like the trained one beside it."""
    layout = "shard" if sharded else "replicate"
    return build_model(replace(config, data_parallel=layout, activation_checkpointing=False), mesh, frozen=True)

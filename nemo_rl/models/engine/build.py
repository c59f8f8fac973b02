"""From a model directory to a trainable module: weights, attention, precision, and its place on the data axis."""

import contextlib
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from nemo_rl.models.engine.attention import ATTENTION_NAME, register_attention
from nemo_rl.models.engine.config import DATA, EngineConfig
from nemo_rl.models.engine.mesh import Mesh
from nemo_rl.models.engine.model_config import packing_problem, read_model_config
from nemo_rl.models.engine.precision import compute_dtype
from nemo_rl.utils.errors import UserError

# fp32 weights, gradients and two Adam moments, with as much again for activations and the bf16 copies.
_BYTES_PER_PARAMETER = 16
_ROOM = 2.0


@dataclass
class BuiltModel:
    """A model ready to train. `sharded` says whether its parameters are split over the data axis."""

    module: PreTrainedModel
    compute_dtype: torch.dtype
    sharded: bool

    def reshard(self) -> None:
        """Gives up gathered parameters, which a forward without backward leaves in place of the sharded ones."""
        for part in self.module.modules():
            if isinstance(part, FSDPModule):
                part.reshard()

    def autocast(self, device: torch.device, *, enabled: bool = True) -> torch.autocast:
        """Matmuls in the compute dtype on float32 weights; a sharded module casts its own parameters."""
        enabled = enabled and self.compute_dtype != torch.float32 and not self.sharded
        return torch.autocast(device.type, dtype=self.compute_dtype, enabled=enabled)

    @contextlib.contextmanager
    def weights_cast_once(self, device: torch.device) -> Generator[None]:
        """Around several passes: each weight is cast to the compute dtype at its first use only.

        The casts live as long as the outermost autocast context. Nothing but what `autocast` encloses is cast: a second
        context, switched off, lies inside.
        """
        with self.autocast(device), self.autocast(device, enabled=False):
            yield


def _load(config: EngineConfig, hf_config: PretrainedConfig) -> PreTrainedModel:
    register_attention()
    try:
        return AutoModelForCausalLM.from_pretrained(
            config.model_name,
            config=hf_config,
            dtype=torch.float32,
            attn_implementation=ATTENTION_NAME,
            trust_remote_code=False,
        )
    except (OSError, ValueError) as error:
        first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(f"policy.model_name: {config.model_name}: {first_line}") from error


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


def _blocks(module: PreTrainedModel) -> list[nn.Module]:
    """The repeated layers, which are sharded and recomputed one by one."""
    names = set(module._no_split_modules or ())
    return [m for m in module.modules() if type(m).__name__ in names]


def _shard(module: PreTrainedModel, mesh: Mesh, dtype: torch.dtype) -> None:
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


def build_model(config: EngineConfig, mesh: Mesh) -> BuiltModel:
    """Loads the weights as float32 and prepares them for training on this rank.

    Raises:
        UserError: the model can't be loaded, or can't be packed.
    """
    hf_config = read_model_config(config.model_name, config.hf_config_overrides)
    problem = packing_problem(hf_config)
    if problem:
        raise UserError(f"policy.model_name: {problem}")
    dtype = compute_dtype(config.precision, mesh.device)
    module = _load(config, hf_config).train()
    nn.Module.to(module, mesh.device)
    if config.activation_checkpointing:
        module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    sharded = _should_shard(config, module, mesh)
    if sharded:
        _shard(module, mesh, dtype)
    return BuiltModel(module=module, compute_dtype=dtype, sharded=sharded)

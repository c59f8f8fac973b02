"""A critic: a decoder without its vocabulary projection, and a linear head that gives one number per position."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from nemo_rl.models.engine.config import ValueHeadInit
from nemo_rl.models.engine.heads import HEAD
from nemo_rl.utils.errors import UserError
from nemo_rl.utils.phases import phase

VALUE_HEAD_FILE = "value_head.safetensors"
"""Beside the weights of an exported critic: `weight [1, hidden]` and `bias [1]`."""

_INIT_STD = 0.02


class ValueModel(nn.Module):
    """The decoder under the name `model`, as in a causal language model, and `value_head`, a linear layer to 1.

    Args:
        decoder: gives the last hidden state, after its final norm.
    """

    def __init__(self, decoder: PreTrainedModel):
        super().__init__()
        self.model = decoder
        config = decoder.config.get_text_config()
        self.value_head = nn.Linear(config.hidden_size, 1, device=decoder.device, dtype=torch.float32)

    def forward(self, input_ids: Tensor, position_ids: Tensor, head_positions: Tensor, **options: Any) -> Tensor:
        """Float32 `[K]`: the head at the `K` positions `head_positions` of the pack `input_ids [1, T]`.

        The head multiplies in float32 whatever the decoder computes in: bfloat16 would keep two digits of a value.
        """
        states = self.model(input_ids=input_ids, position_ids=position_ids, use_cache=False, **options)
        with phase(HEAD):
            wanted = states.last_hidden_state[0, head_positions].float()
            return F.linear(wanted, self.value_head.weight.float(), self.value_head.bias.float()).squeeze(-1)

    @property
    def config(self) -> PretrainedConfig:
        """The decoder's, which is that of the causal language model it came from."""
        return self.model.config

    @property
    def _no_split_modules(self) -> Iterable[str] | None:
        return self.model._no_split_modules

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: dict[str, Any]) -> None:
        """Recomputes the decoder's layers in backward."""
        self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=gradient_checkpointing_kwargs)


@torch.no_grad()
def fill_value_head(head: nn.Linear, model_name: str, init: ValueHeadInit, *, seed: int, section: str) -> None:
    """Loads the head that stands beside the model's weights, else makes a new one; the same on all ranks.

    Raises:
        UserError: the file is damaged or of another size.
    """
    path = Path(model_name) / VALUE_HEAD_FILE
    if path.is_file():
        try:
            head.load_state_dict(load_file(path))
        except (SafetensorError, RuntimeError) as error:
            first_line = (str(error).strip().splitlines() or [type(error).__name__])[-1].strip()
            raise UserError(f"{section}.model_name: {path} holds no value head of this model: {first_line}") from error
        return
    head.weight.zero_()
    head.bias.zero_()
    if init == "normal":
        generator = torch.Generator().manual_seed(seed)
        head.weight.copy_(torch.randn(head.weight.shape, generator=generator) * _INIT_STD)


def save_value_head(head: nn.Linear, directory: Path) -> None:
    """Writes the head, as float32, where `fill_value_head` finds it."""
    tensors = {name: value.detach().to("cpu", torch.float32) for name, value in head.state_dict().items()}
    save_file(tensors, directory / VALUE_HEAD_FILE)

"""New weights into a module, in place."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn


@torch.no_grad()
def copy_weights(module: nn.Module, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Copies tensors to the parameters and persistent buffers of their names, converted to their dtype and device.

    Of tied weights one name is enough.

    Raises:
        ValueError: an unknown name, another shape, or a weight that is missing; the module is then a mixture.
    """
    state = module.state_dict(keep_vars=True)
    written: set[int] = set()
    for name, tensor in weights:
        target = state.get(name)
        if target is None:
            raise ValueError(f"the model has no weight {name!r}")
        if target.shape != tensor.shape:
            raise ValueError(f"{name!r} is {tuple(tensor.shape)}, but {tuple(target.shape)} in the model")
        target.data.copy_(tensor)
        written.add(target.data_ptr())
    missing = [name for name, target in state.items() if target.data_ptr() not in written]
    if missing:
        raise ValueError(f"the new weights lack {missing[0]!r}")

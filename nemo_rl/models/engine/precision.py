"""The dtype of matmuls. Weights, gradients and optimizer state are float32 whatever it is."""

import torch

_PRECISIONS = {
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float32": torch.float32,
    "fp32": torch.float32,
}


def has_bfloat16(device: torch.device) -> bool:
    """Whether the hardware multiplies in bfloat16; where it does not, that is slower than float32 by far."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def compute_dtype(precision: str, device: torch.device) -> torch.dtype:
    """The dtype of matmuls for `policy.precision`.

    `auto` is bfloat16 where the hardware multiplies in it (a CPU with avx512_bf16 or amx, a GPU), else float32.

    Raises:
        ValueError: unknown name.
    """
    if precision == "auto":
        return torch.bfloat16 if has_bfloat16(device) else torch.float32
    if precision not in _PRECISIONS:
        raise ValueError(f"policy.precision is {precision!r}; use auto, bfloat16 or float32")
    return _PRECISIONS[precision]


def compiles_per_shape(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether matmuls in `dtype` compile a kernel for every shape they meet, so that few shapes are better than many.

    oneDNN, which multiplies bfloat16 on the CPU, takes 2 to 25 ms for each; with sizes as they come that was 28 % of
    the step of a 10 M parameter model. Other back ends take any shape at no cost.
    """
    return device.type == "cpu" and dtype == torch.bfloat16

"""One seed for every random source of a process."""

from __future__ import annotations

import random


def set_seed(seed: int) -> None:
    """Seeds Python's, NumPy's and torch's generators (all CUDA devices included) of this process."""
    import numpy as np
    import torch

    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)

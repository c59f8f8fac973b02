"""torch.compile for what of a decoder is no matrix product: norms, and the activation between an MLP's products.

Each of them reads and writes its tensors several times in eager mode; compiled it does so once. The attention function
stays as it is: its loop over the documents of a pack would be compiled anew for every pack.
"""

import os
import shutil

from torch import nn

# Class names in transformers end so, whatever the model: LlamaRMSNorm, Qwen3MLP.
_PARTS = ("RMSNorm", "LayerNorm", "MLP")


def compiler_problem(key: str) -> str | None:
    """Why nothing can be compiled on this machine's CPU, or None."""
    if shutil.which(os.environ.get("CXX", "g++")) or shutil.which("clang++"):
        return None
    return f"{key}: true needs a C++ compiler, and there is no g++ here; install one, or set it to false"


def compile_parts(module: nn.Module) -> int:
    """Compiles the parts in place, for any number of tokens; how many there are. The first pass takes seconds longer.

    Parameters keep their names, and numbers change by rounding only.
    """
    parts = [part for part in module.modules() if type(part).__name__.endswith(_PARTS)]
    for part in parts:
        part.compile(dynamic=True)
    return len(parts)

"""torch.compile for the repeated blocks of a decoder, each in two pieces with the attention function between them.

What is no matrix product (norms, rotation, activation, residual sums) reads and writes its tensors several times in
eager mode; compiled it does so once. Attention stays outside, see `per_document_attention`: its loop over the documents
of a pack would be compiled anew for every pack.
"""

import os
import shutil
from collections.abc import Iterable

import torch
from torch import nn


def compiler_problem(key: str) -> str | None:
    """Why nothing can be compiled on this machine's CPU, or None."""
    if shutil.which(os.environ.get("CXX", "g++")) or shutil.which("clang++"):
        return None
    return f"{key}: true needs a C++ compiler, and there is no g++ here; install one, or set it to false"


def compile_blocks(blocks: Iterable[nn.Module]) -> None:
    """Compiles the blocks in place, for any number of tokens. The first pass takes seconds longer.

    Parameters keep their names, and numbers change by rounding only. Hooks on a block, such as those that gather its
    shards, run outside of what is compiled.
    """
    # In this process: a pool of compilers would outlive a killed worker, and has no core of its own anyway.
    torch._inductor.config.compile_threads = 1
    for block in blocks:
        block.forward = torch.compile(block.forward, dynamic=True)

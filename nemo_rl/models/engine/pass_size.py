"""How many tokens a forward pass should hold on this machine, by trying: `train_mb_tokens: auto`."""

import logging
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_rl.models.engine.microbatch import Pack, build_pack

log = logging.getLogger(__name__)

_FIRST, _LAST = 512, 32768
_LONG_S = 2.0  # what a pass costs besides its tokens is nothing beside this
_NEAR = 0.01
_ROUNDS = 4
_ROW_TOKENS = 128


def measured_pass_tokens(
    forward: Callable[[Pack], Tensor], *, longest_row: int, data_group: dist.ProcessGroup | None
) -> int:
    """The least number of tokens that is within 1 % of the fastest per token, in forward and backward.

    Sizes are doubled as long as memory suffices and a pass stays below two seconds, and then tried in turn, so that a
    slow moment of the machine hits them all. Rows of 128 tokens, or of `longest_row` if that is less, stand for the
    data. Gradients are added to the parameters: the caller discards them.

    Args:
        forward: one number per target of a pack, with a graph.
        longest_row: a pass holds at least one row, so no smaller number is of use.
        data_group: ranks that have to agree, and do; None for one rank.
    """

    def seconds(pack: Pack) -> float:
        slowest = torch.tensor(pass_seconds(forward, pack))
        if data_group is not None:
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=data_group)
        return float(slowest)

    least = max(_FIRST, longest_row)
    packs: list[Pack] = []
    fastest: list[float] = []
    while (tokens := least << len(packs)) <= max(_LAST, least):
        pack = even_pack(tokens, longest_row)
        seconds(pack)  # the first pass of a size may compile, and gets its memory from the system
        taken = seconds(pack)
        if taken == float("inf"):
            break
        packs.append(pack)
        fastest.append(taken)
        if taken > _LONG_S:
            break
    for _ in range(_ROUNDS - 1):
        fastest = [min(before, seconds(pack)) for before, pack in zip(fastest, packs, strict=True)]
    sizes = [least << i for i in range(len(packs))]
    speeds = [size / taken for size, taken in zip(sizes, fastest, strict=True)]
    for size, speed in zip(sizes, speeds, strict=True):
        log.info("passes of %d tokens: %.0f tokens/s", size, speed)
    near = [size for size, speed in zip(sizes, speeds, strict=True) if speed >= max(speeds) * (1 - _NEAR)]
    return near[0] if near else least  # no memory even for the least: that is for the run itself to say


def even_pack(tokens: int, longest_row: int) -> Pack:
    """About `tokens` tokens in rows of 128, or of `longest_row` if that is less, all of them targets but the first."""
    width = min(_ROW_TOKENS, longest_row)
    rows = max(1, tokens // width)
    batch = {"input_ids": torch.ones(rows, width, dtype=torch.int64), "input_lengths": torch.full((rows,), width)}
    targets = torch.ones(rows, width, dtype=torch.bool)
    targets[:, 0] = False
    return build_pack(batch, list(range(rows)), targets)


def pass_seconds(forward: Callable[[Pack], Tensor], pack: Pack) -> float:
    """What a pass takes, forward and backward; infinite where memory does not suffice."""
    started = time.perf_counter()
    try:
        loss = forward(pack).sum()
        loss.backward()
        loss.item()  # waits for the device
    except torch.OutOfMemoryError:
        return float("inf")
    return time.perf_counter() - started

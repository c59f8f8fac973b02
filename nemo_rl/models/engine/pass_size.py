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
_GAIN = 0.03  # a pass twice as long has to be faster per token by this part
_REPEATS = 2
_ROW_TOKENS = 128


def measured_pass_tokens(
    forward: Callable[[Pack], Tensor], *, longest_row: int, data_group: dist.ProcessGroup | None
) -> int:
    """The least number of tokens whose double is not faster per token, in forward and backward; the same on all ranks.

    Rows of 128 tokens, or of `longest_row` if that is less, stand for the data. Gradients are added to the parameters:
    the caller discards them.

    Args:
        forward: one number per target of a pack, with a graph.
        longest_row: a pass holds at least one row, so no smaller number is of use.
        data_group: ranks that have to agree; None for one rank.
    """
    best, best_speed, tokens = max(_FIRST, longest_row), 0.0, max(_FIRST, longest_row)
    while tokens <= max(_LAST, longest_row):
        seconds = torch.tensor(_seconds(forward, _pack(tokens, min(_ROW_TOKENS, longest_row))))
        if data_group is not None:
            dist.all_reduce(seconds, op=dist.ReduceOp.MAX, group=data_group)
        speed = tokens / float(seconds)
        log.info("passes of %d tokens: %.0f tokens/s", tokens, speed)
        if not speed > best_speed * (1 + _GAIN):  # nothing gained, or no memory even for the first
            break
        best, best_speed, tokens = tokens, speed, tokens * 2
    return best


def _pack(tokens: int, width: int) -> Pack:
    rows = tokens // width
    batch = {"input_ids": torch.ones(rows, width, dtype=torch.int64), "input_lengths": torch.full((rows,), width)}
    targets = torch.ones(rows, width, dtype=torch.bool)
    targets[:, 0] = False
    return build_pack(batch, list(range(rows)), targets)


def _seconds(forward: Callable[[Pack], Tensor], pack: Pack) -> float:
    """Of the fastest of some passes after one that does not count; infinite where memory does not suffice."""
    fastest = float("inf")
    try:
        for number in range(_REPEATS + 1):
            started = time.perf_counter()
            loss = forward(pack).sum()
            loss.backward()
            loss.item()  # waits for the device
            if number:
                fastest = min(fastest, time.perf_counter() - started)
    except torch.OutOfMemoryError:
        return float("inf")
    return fastest

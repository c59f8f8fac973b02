"""Rows that change ranks, over a group of three gloo ranks. Groups over machines and GPUs are not covered."""

import os
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from nemo_rl.data_plane.leveling import RowMove
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.row_exchange import exchange_rows

MOVES = [RowMove(2, 0, 1), RowMove(0, 1, 2), RowMove(1, 0, 2), RowMove(0, 2, 2), RowMove(0, 0, 1)]
AFTER = {0: [], 1: [(1, 1), (0, 0), (2, 0)], 2: [(2, 1), (0, 1), (0, 2), (1, 0)]}
ROWS = {0: 3, 1: 2, 2: 2}


def rows_of(owners: list[tuple[int, int]]) -> BatchedDataDict:
    """What rank and row alone decide, in the types that batches have."""
    numbers = torch.tensor([100 * rank + row for rank, row in owners])
    return BatchedDataDict(
        {
            "input_ids": numbers[:, None] * 1000 + torch.arange(5),
            "token_mask": (numbers[:, None] + torch.arange(5)).to(torch.bfloat16),
            "sample_mask": numbers.float() / 3,
            "truncated": numbers % 2 == 0,
        }
    )


def run_rank(rank: int, store: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    # One more rank in front, so that ranks of the group are not those of the world.
    dist.init_process_group("gloo", store=dist.FileStore(store, 4), rank=rank, world_size=4)
    group = dist.new_group([1, 2, 3])
    if rank > 0:
        me = rank - 1
        mine = rows_of([(me, row) for row in range(ROWS[me])])
        after, wanted = exchange_rows(mine, MOVES, group), AFTER[me]
        assert after.size == len(wanted)
        if wanted:
            for name, column in rows_of(wanted).items():
                assert after[name].dtype == column.dtype, name
                assert torch.equal(after[name], column), (me, name)
        assert exchange_rows(mine, [], group) is mine
        with pytest.raises(TypeError, match="'text'"):
            exchange_rows(BatchedDataDict({**mine, "text": ["a"] * mine.size}), MOVES, group)
        dist.barrier(group)
    dist.destroy_process_group()


def test_rows_arrive_bit_equal_behind_those_that_stay() -> None:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run_rank, args=(str(Path(folder) / "store"),), nprocs=4, join=True)

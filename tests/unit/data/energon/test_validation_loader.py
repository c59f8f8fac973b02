"""Validation batches of the loaders: every row once, from the start each time."""

from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

from nemo_rl.data.energon.sft_types import LoadedBatch

from .conftest import loaders, write_rows


def ids(batch: LoadedBatch) -> list[str]:
    return [row.source_id for row in batch.rows]


@pytest.mark.parametrize(("processes", "num_shards"), [(0, 4), (1, 1)])
def test_b11_validation_gives_every_row_once_and_starts_over(
    tokenizer: PreTrainedTokenizerBase, case: Callable[[str], Path], processes: int, num_shards: int
):
    """Ten rows, on four shards among others, in file order, twice, between training batches."""
    source = loaders(
        tokenizer,
        case("b11_val_ten_rows.jsonl"),
        shards=tuple(range(num_shards)),
        num_shards=num_shards,
        rows_per_shard=256 // num_shards,
        validation=True,
        energon={"num_workers": processes},
    )
    for _ in range(2):
        source.next_train()
        batch = source.next_validation()
        assert batch is not None
        assert source.next_validation() is None
        real = [row for row in batch.rows if row.weight]
        assert [row.source_id for row in real] == [str(row) for row in range(10)]
        assert [int(row.token_mask.sum()) for row in real] == list(range(2, 12))
        assert len(batch.rows) == 256
        assert batch.states == {}
    source.close()


def test_validation_can_end_early_and_then_starts_over(tokenizer: PreTrainedTokenizerBase, tmp_path: Path):
    path = write_rows(tmp_path / "rows.jsonl", 10)
    source = loaders(tokenizer, path, rows_per_shard=2, validation=True, max_validation_batches=2)
    for _ in range(2):
        batches = [source.next_validation() for _ in range(3)]
        assert batches[2] is None
        assert [ids(batch) for batch in batches[:2]] == [
            ["rows.jsonl:0", "rows.jsonl:1"],
            ["rows.jsonl:2", "rows.jsonl:3"],
        ]
    source.close()

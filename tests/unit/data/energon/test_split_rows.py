"""`data.overlong: split`: all pieces of a row in the batch of the row, so that passes keep their length.

Not covered: how the engine packs the pieces, which are rows to it.
"""

import json
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

from nemo_rl.data.energon.replica import ReplicaLoaders
from nemo_rl.data.energon.sft_types import LoadedBatch

from .conftest import loaders

WINDOW = 40
SPLIT = {"overlong": "split"}
# Such that each last piece has a trained token.
ANSWER_BYTES = [4, 95, 4, 4, 70, 4, 4, 4, 130, 4, 4]
HEADERS = 22  # 20 tokens up to the answer, a tag counting as one, and the closing tag with its newline


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """11 rows, three of them longer than the window."""
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"question": "q", "answer": "a" * n}) + "\n" for n in ANSWER_BYTES))
    return path


def names(batch: LoadedBatch) -> list[str]:
    return [row.source_id for row in batch.rows]


def take(source: ReplicaLoaders, steps: int) -> list[LoadedBatch]:
    batches = [source.next_train() for _ in range(steps)]
    source.close()
    return batches


def test_pieces_are_the_row_cut_up(tokenizer: PreTrainedTokenizerBase, path: Path):
    options = {"rows_per_shard": 11, "data": {"shuffle": False}}
    (whole,) = take(loaders(tokenizer, path, max_length=1000, **options), 1)
    options["data"] |= SPLIT
    (batch,) = take(loaders(tokenizer, path, max_length=WINDOW, **options), 1)
    assert [len(row.input_ids) for row in whole.rows] == [n + HEADERS for n in ANSWER_BYTES]
    assert batch.dropped == {}
    assert max(len(row.input_ids) for row in batch.rows) == WINDOW
    assert all(row.token_mask[0] == 0 and row.token_mask.any() for row in batch.rows)
    for row in whole.rows:
        pieces = [piece for piece in batch.rows if piece.source_id.split("[")[0] == row.source_id]
        assert [token for piece in pieces for token in piece.input_ids] == list(row.input_ids)
        if len(pieces) > 1:
            numbered = [f"{row.source_id}[{n + 1}/{len(pieces)}]" for n in range(len(pieces))]
            assert [piece.source_id for piece in pieces] == numbered
            # The first token of a piece has nothing before it that predicts it.
            lost = sum(int(row.token_mask[WINDOW * n]) for n in range(1, len(pieces)))
            assert sum(int(piece.token_mask.sum()) for piece in pieces) == row.token_mask.sum() - lost


def test_passes_keep_their_length_and_every_cut_resumes(tokenizer: PreTrainedTokenizerBase, path: Path):
    """6 batches of 2 rows, the last with a filler, however many pieces there are."""
    options = {"rows_per_shard": 2, "max_length": WINDOW, "data": SPLIT}
    batches = take(loaders(tokenizer, path, **options), 12)
    assert [batch.epoch for batch in batches] == [0] * 6 + [1] * 6
    for one_pass in (batches[:6], batches[6:]):
        rows = [[name.split("[")[0] for name in names(batch)] for batch in one_pass]
        assert [len(set(batch)) for batch in rows] == [2] * 6
        assert sorted(name for batch in rows for name in set(batch) if name) == sorted(
            f"rows.jsonl:{line}" for line in range(11)
        )
        pieces = [-(-(n + HEADERS) // WINDOW) for n in ANSWER_BYTES]
        assert sum(len(batch) for batch in rows) == sum(pieces) + 1
    for cut in range(1, 12):
        states = {int(shard): state for shard, state in json.loads(json.dumps(batches[cut - 1].states)).items()}
        after = take(loaders(tokenizer, path, restored=states, **options), 12 - cut)
        assert [names(batch) for batch in after] == [names(batch) for batch in batches[cut:]]


def test_a_loader_process_hands_the_pieces_over(tokenizer: PreTrainedTokenizerBase, path: Path):
    options = {"rows_per_shard": 2, "max_length": WINDOW, "data": SPLIT}
    straight, other = (
        take(loaders(tokenizer, path, energon={"num_workers": processes}, **options), 6) for processes in (0, 1)
    )
    assert [names(batch) for batch in straight] == [names(batch) for batch in other]


def test_shards_do_not_wait_for_each_others_pieces(tokenizer: PreTrainedTokenizerBase, path: Path):
    """A replica may get more sequences than another in the same step; both take equally many steps."""
    options = {"num_shards": 2, "rows_per_shard": 2, "max_length": WINDOW, "data": SPLIT}
    alone = [take(loaders(tokenizer, path, shards=(shard,), **options), 3) for shard in (0, 1)]
    together = take(loaders(tokenizer, path, shards=(0, 1), **options), 3)
    for step, batch in enumerate(together):
        assert names(batch) == names(alone[0][step]) + names(alone[1][step])
    assert len({len(batch.rows) for batches in alone for batch in batches}) > 1


def test_validation_splits_too(tokenizer: PreTrainedTokenizerBase, path: Path):
    source = loaders(tokenizer, path, rows_per_shard=4, max_length=WINDOW, data=SPLIT, validation=True)
    seen: list[str] = []
    while (batch := source.next_validation()) is not None:
        seen += [name.split("[")[0] for name in names(batch) if name]
    source.close()
    assert list(dict.fromkeys(seen)) == [f"rows.jsonl:{line}" for line in range(11)]

"""A whole pass over real rows: the 1,319 of GSM8K's test split, each trained once or counted as dropped."""

import json
from collections import Counter
from pathlib import Path

import pytest
from plain_sft import plain_tokens
from sft_runs import REPO, losses, metrics_by_step, run_sft, trained_rows, write_config
from tiny import make_model_dir

GSM8K = REPO.parent / "shared" / "data" / "gsm8k" / "test.jsonl"
LONGEST_ROW, GLOBAL_BATCH = 900, 32
"""In tokens of T0, which are bytes: some rows are longer."""


@pytest.mark.slow
def test_each_row_is_trained_once_or_counted_as_dropped(tmp_path: Path) -> None:
    """Default shards, one per worker; question and answer are found without options."""
    if not GSM8K.exists():
        pytest.skip(f"{GSM8K} is not there; it holds the test split of GSM8K, one JSON object a line")
    config = write_config(
        tmp_path,
        model=make_model_dir(tmp_path / "model", positions=1024),
        train=GSM8K,
        data__overlong="drop",
        policy__train_global_batch_size=GLOBAL_BATCH,
        policy__max_total_sequence_length=LONGEST_ROW,
        policy__train_mb_tokens=4096,
        sft__max_num_epochs=1,
        sft__max_num_steps=1000,
        checkpointing__enabled=False,
    )
    run = run_sft(config)
    rows = [json.loads(line) for line in GSM8K.read_text().split("\n") if line]
    lengths = [
        len(
            plain_tokens(
                [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": row["answer"]}]
            )[0]
        )
        for row in rows
    ]
    assert len(rows) == 1319
    short = {f"test.jsonl:{number}" for number, length in enumerate(lengths) if length <= LONGEST_ROW}
    trained = Counter(source for step in trained_rows(run.logs) for _, source in step)
    assert trained == Counter(short)
    metrics = metrics_by_step(run.logs)
    last = metrics[max(metrics)]
    assert last["dropped/overlong"] == last["dropped_samples"] == len(rows) - len(short) > 0
    assert last["consumed_samples"] == len(short)
    assert {line["epoch"] for line in metrics.values()} == {0}
    assert losses(run.logs)[-1] < losses(run.logs)[0] / 1.5

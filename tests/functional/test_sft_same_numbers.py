"""Rows, order and losses of a run do not depend on its workers or its token budget, and are those of a plain loop.

Float32 on CPU workers; sharded weights are in `tests/parity/test_engine.py`. Not covered here: GPUs, more than two
replicas.
"""

from pathlib import Path

import pytest
from plain_sft import plain_sft, read_rows
from sft_runs import (
    LEARNING_RATE,
    MAX_GRAD_NORM,
    STEPS,
    WEIGHT_DECAY,
    FinishedRun,
    Inputs,
    losses,
    metrics_by_step,
    run_sft,
    trained_rows,
    write_config,
)

ONE_ROW, WHOLE_STEP = 1, 4096
"""Token budgets: a forward pass per row, and one per worker and step."""


def test_the_losses_are_those_of_a_plain_loop(straight_run: FinishedRun, inputs: Inputs) -> None:
    rows = read_rows(inputs.train)
    steps = [[rows[source] for _, source in step] for step in trained_rows(straight_run.logs)]
    assert len(steps) == STEPS >= 20
    plain, _ = plain_sft(
        inputs.model,
        steps,
        learning_rate=LEARNING_RATE,
        weight_decay=WEIGHT_DECAY,
        max_grad_norm=MAX_GRAD_NORM,
    )
    norms = [line["grad_norm"] for line in metrics_by_step(straight_run.logs).values()]
    assert max(norms) > MAX_GRAD_NORM, "the clip has something to do"
    assert losses(straight_run.logs) == pytest.approx(plain, rel=1e-5)


@pytest.mark.parametrize(
    ("workers", "budget"),
    [
        (1, WHOLE_STEP),
        pytest.param(1, ONE_ROW, marks=pytest.mark.slow),
        pytest.param(2, ONE_ROW, marks=pytest.mark.slow),
        pytest.param(2, WHOLE_STEP, marks=pytest.mark.slow),
    ],
)
def test_every_layout_trains_the_same(
    straight_run: FinishedRun, inputs: Inputs, tmp_path: Path, workers: int, budget: int
) -> None:
    """The run on two workers packs rows to 256 tokens; this one has other workers, another budget, or both."""
    config = write_config(
        tmp_path,
        model=inputs.model,
        train=inputs.train,
        data__energon={"topology_mapper": "elastic", "logical_shards": 2},
        cluster__gpus_per_node=workers,
        policy__train_mb_tokens=budget,
        checkpointing__enabled=False,
    )
    run = run_sft(config)
    assert metrics_by_step(run.logs)[1]["num_ranks"] == workers
    assert trained_rows(run.logs) == trained_rows(straight_run.logs)
    assert losses(run.logs) == pytest.approx(losses(straight_run.logs), rel=1e-5)

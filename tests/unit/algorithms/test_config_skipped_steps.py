"""`policy.max_consecutive_skipped_steps`: when the controller gives up, and what it counts until then.

The controller's own bookkeeping with results handed to it; that a step is skipped on all ranks together is tested in
tests/parity/test_engine_cases.py.
"""

from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest

from nemo_rl.algorithms.sft_state import _initial_save_state
from nemo_rl.algorithms.sft_v2 import SFTSingleControllerActor
from nemo_rl.utils.errors import RunError

LIMIT = 3


def controller() -> Any:
    """A controller without workers, loaders or files."""
    actor = object.__new__(SFTSingleControllerActor.__ray_metadata__.modified_class)
    actor._config = SimpleNamespace(policy=SimpleNamespace(max_consecutive_skipped_steps=LIMIT))
    actor._state = _initial_save_state("hash")
    actor._skipped_in_a_row = 0
    actor._logger = SimpleNamespace(log_rows=lambda step, rows: None)
    actor._args = SimpleNamespace(
        loader_settings=SimpleNamespace(train=SimpleNamespace(bad_lines={})),
        loss_fn=SimpleNamespace(metric_normalizations=MappingProxyType({})),
    )
    return actor


def count(actor: Any, skipped: str | None) -> dict[str, Any]:
    """The metrics of one more step over two rows of five tokens."""
    envelope = SimpleNamespace(
        source_ids=("0", "1"), shards=(0, 0), valid_tokens=4, dropped={}, epoch=0, sequence_lengths=(5, 5)
    )
    results = {"skipped": skipped, "loss": 1.0, "grad_norm": 1.0, "all_mb_metrics": {}}
    return actor._count([envelope], results)


def test_so_many_steps_in_a_row_end_the_run() -> None:
    actor = controller()
    for _ in range(LIMIT - 1):
        count(actor, "non_finite_gradient")
    with pytest.raises(RunError, match=r"step 3: 3 steps in a row .*policy\.max_consecutive_skipped_steps"):
        count(actor, "non_finite_gradient")
    assert actor._state.skipped_steps == {"non_finite_gradient": 3}


def test_a_step_that_trains_starts_the_count_again() -> None:
    actor = controller()
    for _ in range(3):
        for skipped in ("non_finite_gradient",) * (LIMIT - 1):
            count(actor, skipped)
        metrics = count(actor, None)
    assert metrics["skipped_steps"] == 3 * (LIMIT - 1)
    assert actor._state.total_steps == 3 * LIMIT
    assert metrics["consumed_samples"] == 2 * 3 * LIMIT


def test_steps_without_a_trained_token_are_counted_and_end_nothing() -> None:
    actor = controller()
    for _ in range(2 * LIMIT):
        metrics = count(actor, "no_trained_token")
    assert metrics["skipped_steps"] == 2 * LIMIT
    assert actor._state.skipped_steps == {"no_trained_token": 2 * LIMIT}

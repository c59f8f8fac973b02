"""The loader thread: the same batches as without it, states of the batch that was taken, and failures that say why.

Not covered: a fork of the loader process inside a Ray worker.
"""

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

from nemo_rl.data.energon.prefetch import LoaderThread
from nemo_rl.data.energon.replica import ReplicaLoaders
from nemo_rl.data.energon.sft_types import LoadedBatch
from nemo_rl.utils.errors import RunError, UserError

from .conftest import loaders, write_rows

WAIT_S = 60.0


def ids(batch: LoadedBatch | None) -> list[str]:
    assert batch is not None
    return [row.source_id for row in batch.rows]


class SlowLoaders(ReplicaLoaders):
    """Loaders without data whose batches wait for a permit."""

    def __init__(self) -> None:
        super().__init__([], [], (3, 4))
        self.permits = threading.Semaphore(0)
        self.made = 0
        self.closed = False

    def next_train(self) -> LoadedBatch:
        self.permits.acquire()
        self.made += 1
        return LoadedBatch((), self.made, {}, {}, 0.0)

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize(("depth", "processes"), [(1, 0), (3, 0), (2, 1)])
def test_resume_with_prefetch_after_every_step_of_two_passes(
    tokenizer: PreTrainedTokenizerBase, case: Callable[[str], Path], depth: int, processes: int
):
    """B-15: batches that were made ahead and never taken are neither lost nor repeated."""
    path = case("b14_twentyfour_rows.jsonl")

    def thread(restored: dict | None) -> LoaderThread:
        energon = {"num_workers": processes}
        return LoaderThread(
            lambda: loaders(
                tokenizer, path, shards=(0, 1), num_shards=2, rows_per_shard=2, restored=restored, energon=energon
            ),
            depth,
        )

    straight = loaders(tokenizer, path, shards=(0, 1), num_shards=2, rows_per_shard=2)
    expected = [ids(straight.next_train()) for _ in range(13)]
    straight.close()
    # With a process every restart forks twice; a cut in the pass and one at its border cover it.
    cuts = range(1, 13) if processes == 0 else (3, 6)
    for cut in cuts:
        first = thread(None)
        batches = [first.next_train(WAIT_S) for _ in range(cut)]
        assert [ids(batch) for batch in batches] == expected[:cut]
        first.close()
        states = {int(shard): state for shard, state in json.loads(json.dumps(batches[-1].states)).items()}
        second = thread(states)
        assert ids(second.next_train(WAIT_S)) == expected[cut]
        second.close()


def test_validation_in_the_middle_of_training(tokenizer: PreTrainedTokenizerBase, tmp_path: Path):
    path = write_rows(tmp_path / "rows.jsonl", 10)
    plain = loaders(tokenizer, path, rows_per_shard=4)
    expected = [ids(plain.next_train()) for _ in range(3)]
    plain.close()
    thread = LoaderThread(lambda: loaders(tokenizer, path, rows_per_shard=4, validation=True), 2)
    for step in range(3):
        assert ids(thread.next_train(WAIT_S)) == expected[step]
        names = [name for _ in range(3) for name in ids(thread.next_validation(WAIT_S))]
        assert names == [*(f"rows.jsonl:{line}" for line in range(10)), "", ""]
        assert thread.next_validation(WAIT_S) is None
    thread.close()


def test_it_keeps_depth_batches_ready_and_not_more():
    slow = SlowLoaders()
    thread = LoaderThread(lambda: slow, 2)
    for _ in range(10):
        slow.permits.release()
    deadline = time.monotonic() + WAIT_S
    while slow.made < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.1)
    assert slow.made == 2
    assert thread.next_train(WAIT_S).epoch == 1
    thread.close()
    assert slow.closed
    with pytest.raises(RuntimeError, match="closed"):
        for _ in range(4):
            thread.next_train(WAIT_S)


def test_a_wait_over_its_limit_says_for_what_and_what_is_going_on():
    slow = SlowLoaders()
    thread = LoaderThread(lambda: slow, 1)
    thread.wait_ready(WAIT_S)
    with pytest.raises(
        RunError, match=r"waited 0 s for the next training batch of shards \[3, 4\].*reading a training"
    ):
        thread.next_train(0.2)
    slow.permits.release()
    assert thread.next_train(WAIT_S).epoch == 1
    slow.permits.release()
    thread.close()


def test_errors_of_the_thread_reach_every_caller(tokenizer: PreTrainedTokenizerBase, tmp_path: Path):
    thread = LoaderThread(lambda: loaders(tokenizer, tmp_path / "absent.jsonl"), 1)
    for call in (thread.wait_ready, thread.next_train, thread.next_validation):
        with pytest.raises(UserError, match=r"absent.jsonl does not exist"):
            call(WAIT_S)
    thread.close()
    path = tmp_path / "bad.jsonl"
    path.write_text('{"text": "?"}\n' * 30)
    thread = LoaderThread(lambda: loaders(tokenizer, path, energon={"max_consecutive_bad_rows": 9}), 1)
    thread.wait_ready(WAIT_S)
    with pytest.raises(UserError, match="unusable rows in a row"):
        thread.next_train(WAIT_S)
    thread.close()
    thread.close()

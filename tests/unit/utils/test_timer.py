"""Timers and the time budget, against a clock that the test moves."""

import random
import statistics
import threading

import numpy as np
import pytest
import torch

from nemo_rl.utils import timer as timer_module
from nemo_rl.utils.seed import set_seed
from nemo_rl.utils.timer import ThreadSafeTimer, TimeoutChecker, Timer, convert_to_seconds


class Clock:
    """Stands in for the `time` module of the code under test."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    perf_counter = time = monotonic


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(timer_module, "time", clock)
    return clock


@pytest.mark.parametrize("kind", [Timer, ThreadSafeTimer])
def test_stretches_and_their_reductions(kind: type[Timer], clock: Clock):
    timer = kind("train")
    lengths = [1.0, 2.0, 6.0]
    for length in lengths:
        timer.start("step")
        clock.now += length
        assert timer.stop("step") == length
    assert timer.get_elapsed("step") == lengths
    assert timer.get_latest_elapsed("step") == 6.0
    expected = {
        "mean": 3.0,
        "median": 2.0,
        "min": 1.0,
        "max": 6.0,
        "std": statistics.pstdev(lengths),
        "sum": 9.0,
        "count": 3.0,
    }
    assert {op: timer.reduce("step", op) for op in expected} == expected
    timer.record("load", 0.5)
    assert timer.get_timing_metrics() == {"train/step": 3.0, "train/load": 0.5}
    assert timer.get_timing_metrics({"step": "sum"}) == {"train/step": 9.0, "train/load": 0.5}
    timer.reset("step")
    assert timer.get_timing_metrics("max") == {"train/load": 0.5}
    timer.reset()
    assert timer.get_timing_metrics() == {}


def test_wrong_use_is_refused(clock: Clock):
    timer = Timer()
    with pytest.raises(ValueError, match="'a' is not running"):
        timer.stop("a")
    timer.start("a")
    with pytest.raises(ValueError, match="'a' is already running"):
        timer.start("a")
    timer.stop("a")
    with pytest.raises(ValueError, match="op: expected one of mean"):
        timer.reduce("a", "mode")
    for call in (timer.get_elapsed, timer.get_latest_elapsed, timer.reduce):
        with pytest.raises(KeyError):
            call("b")


def test_a_body_that_raises_is_measured(clock: Clock):
    timer = Timer()
    with pytest.raises(RuntimeError), timer.time("a"):
        clock.now += 2
        raise RuntimeError
    assert timer.get_elapsed("a") == [2.0]


def test_markers(clock: Clock):
    timer = Timer()
    assert timer.mark("saved", {"step": 3}) == 100.0
    clock.now = 101.0
    timer.mark("loaded")
    assert timer.get_markers("saved") == {"saved": [(100.0, {"step": 3})]}
    assert list(timer.get_markers()) == ["saved", "loaded"]


def test_threads_lose_no_stretch():
    timer = ThreadSafeTimer()
    threads = [threading.Thread(target=lambda: [timer.record("x", 1.0) for _ in range(500)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert timer.reduce("x", "sum") == 2000.0


def test_convert_to_seconds():
    assert convert_to_seconds("01:02:03:04") == 86_400 + 2 * 3_600 + 3 * 60 + 4
    for text in ("10:00", "a:b:c:d", "", "00:00:-1:00"):
        with pytest.raises(ValueError, match="expected DD:HH:MM:SS"):
            convert_to_seconds(text)


def test_the_budget_is_reported_once(clock: Clock):
    checker = TimeoutChecker("00:00:00:10")
    clock.now += 9.9
    assert not checker.check_save()
    clock.now += 0.1
    assert [checker.check_save() for _ in range(3)] == [True, False, False]


def test_the_last_iteration_fits_the_budget(clock: Clock):
    checker = TimeoutChecker("00:00:00:10", fit_last_save_time=True)
    checker.start_iterations()
    for seconds in (2.0, 4.0):
        clock.now += seconds
        checker.mark_iteration()
    clock.now += 0.9
    assert not checker.check_save()
    clock.now += 0.1
    assert checker.check_save()


def test_marking_before_starting_only_begins_an_iteration(clock: Clock):
    checker = TimeoutChecker("00:00:00:10", fit_last_save_time=True)
    clock.now += 5
    checker.mark_iteration()
    clock.now += 1
    checker.mark_iteration()
    clock.now += 2.9
    assert not checker.check_save()
    clock.now += 0.1
    assert checker.check_save()


def test_no_budget_never_ends(clock: Clock):
    checker = TimeoutChecker(None)
    clock.now += 1e12
    assert not checker.check_save()


def test_one_seed_repeats_every_generator():
    draws = []
    for _ in range(2):
        set_seed(7)
        draws.append((random.random(), float(np.random.rand()), float(torch.rand(()))))
    assert draws[0] == draws[1]

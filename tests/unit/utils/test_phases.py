"""Seconds by phase: each counted once, in the innermost phase, in one thread. Not covered: waiting for a GPU."""

import threading
import time

import pytest

from nemo_rl.utils.phases import WAITING, phase, start_profile, stop_profile


def test_each_second_belongs_to_the_innermost_phase() -> None:
    started = time.perf_counter()
    start_profile()
    time.sleep(0.02)
    with phase("outer"):
        time.sleep(0.03)
        with phase("inner"):
            time.sleep(0.05)
        with phase("inner"):
            time.sleep(0.01)
    seconds = stop_profile()
    elapsed = time.perf_counter() - started
    assert seconds.keys() == {WAITING, "outer", "inner"}
    assert seconds[WAITING] >= 0.02 and seconds["outer"] >= 0.03 and seconds["inner"] >= 0.06
    assert sum(seconds.values()) == pytest.approx(elapsed, abs=0.005)


def test_phases_inside_an_opaque_one_count_as_it() -> None:
    start_profile()
    with phase("backward", opaque=True), phase("forward attention"):
        time.sleep(0.01)
    with phase("forward attention"):
        pass
    seconds = stop_profile()
    assert seconds["backward"] >= 0.01 > seconds["forward attention"]


def test_an_error_ends_its_phase() -> None:
    start_profile()
    with pytest.raises(ZeroDivisionError), phase("broken"):
        _ = 1 / 0
    time.sleep(0.01)
    assert stop_profile()[WAITING] >= 0.01


def test_other_threads_do_not_count() -> None:
    def other() -> None:
        with phase("elsewhere"):
            time.sleep(0.01)

    start_profile()
    thread = threading.Thread(target=other)
    with phase("here"):
        thread.start()
        thread.join()
    assert "elsewhere" not in stop_profile()


def test_the_device_is_waited_for_at_every_border() -> None:
    calls: list[str] = []
    start_profile(lambda: calls.append("settled"))
    with phase("forward"):
        calls.append("asked")
    stop_profile()
    assert calls == ["settled", "asked", "settled", "settled"]


def test_without_a_profile_nothing_is_counted() -> None:
    with phase("anything"):
        pass
    with pytest.raises(RuntimeError, match="no profile is open"):
        stop_profile()

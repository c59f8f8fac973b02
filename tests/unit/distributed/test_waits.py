"""Bounded waits: which failure is named, how fast, and what the message says. Loss of a node is not covered."""

import time
from collections.abc import Callable

import pytest

from nemo_rl.distributed.waits import wait_for
from nemo_rl.distributed.worker_groups import RayWorkerGroup
from nemo_rl.utils.errors import ConfigError, RunError, UserError


def test_the_limit_names_who_is_silent_and_who_answered(make_group: Callable[..., RayWorkerGroup]) -> None:
    group = make_group("PlainWorker")
    refs = group.run_all_workers_single_data("sleep_on", rank=1, seconds=30)
    started = time.monotonic()
    with pytest.raises(RunError) as caught:
        group.get_all_worker_results(refs, reason="training step 3", timeout_s=1.0)
    assert time.monotonic() - started < 2.0
    text = str(caught.value)
    assert "within 1 s during training step 3" in text
    silent, answered = text.split("; answered: ")
    assert "rank 1 (w-1, pid" in silent and "rank 0" not in silent and "rank 0 (w-0, pid" in answered


def test_a_dead_worker_ends_the_wait_while_others_are_busy(make_group: Callable[..., RayWorkerGroup]) -> None:
    group = make_group("PlainWorker")
    pid = group.worker_metadata[1].pid
    refs = group.run_all_workers_single_data("fail_on", rank=1, kind="kill", others_sleep_s=30)
    started = time.monotonic()
    with pytest.raises(RunError, match=rf"^rank 1 \(w-1, pid {pid} on .*\) died .* during training step 3$"):
        group.get_all_worker_results(refs, reason="training step 3")
    assert time.monotonic() - started < 5.0
    # Later calls fail at once as well, and shutting down neither raises nor hangs.
    with pytest.raises(RunError, match=r"rank 1 .* died"):
        group.get_all_worker_results(group.run_all_workers_single_data("echo"))
    assert group.shutdown(cleanup_method="echo", timeout=5) is False


def test_the_death_is_named_and_not_the_peer_that_lost_its_connection(
    make_group: Callable[..., RayWorkerGroup],
) -> None:
    group = make_group("TorchWorker")
    refs = group.run_all_workers_single_data("die_in_collective", rank=1)
    with pytest.raises(RunError, match=r"^rank 1 \(w-1.* died "):
        group.get_all_worker_results(refs, reason="training step 3", timeout_s=30)


def test_a_user_error_of_a_worker_stays_one(make_group: Callable[..., RayWorkerGroup]) -> None:
    group = make_group("PlainWorker")
    refs = group.run_all_workers_single_data("fail_on", rank=1, kind="user", others_sleep_s=30)
    started = time.monotonic()
    with pytest.raises(UserError, match=r"^rank 1 \(w-1.*\): row 3 has no messages$"):
        group.get_all_worker_results(refs)
    assert time.monotonic() - started < 5.0


def test_a_config_error_keeps_its_problems(make_group: Callable[..., RayWorkerGroup]) -> None:
    group = make_group("PlainWorker", workers=1)
    with pytest.raises(ConfigError) as caught:
        group.get_all_worker_results([group.run_single_worker_single_data("fail_on", 0, rank=0, kind="config")])
    assert [p.split(": ", 1)[1] for p in caught.value.problems] == [
        "policy.lr: -1 is below 0",
        "policy.mb: 0 is below 1",
    ]
    assert all(problem.startswith("rank 0 (w-0") for problem in caught.value.problems)


def test_any_other_error_becomes_one_line_with_its_cause(make_group: Callable[..., RayWorkerGroup]) -> None:
    group = make_group("PlainWorker")
    refs = group.run_all_workers_single_data("fail_on", rank=0, kind="error")
    with pytest.raises(RunError, match=r"^rank 0 .* failed with RuntimeError: first line during a call") as caught:
        group.get_all_worker_results(refs)
    assert "\n" not in str(caught.value)
    assert "in fail_on" in str(caught.value.__cause__), "the worker's traceback is kept"


def test_who_failed_is_named_and_not_who_heard_of_it_first(make_group: Callable[..., RayWorkerGroup]) -> None:
    group = make_group("PlainWorker")
    refs = group.run_all_workers_single_data("fail_on", rank=1, kind="peers")
    with pytest.raises(RunError, match=r"^rank 1 .* failed with RuntimeError: first line"):
        group.get_all_worker_results(refs)


def test_names_and_refs_must_match() -> None:
    with pytest.raises(ValueError, match="0 refs and 1 names"):
        wait_for([], reason="x", timeout_s=1, names=["a"])
    assert wait_for([], reason="x", timeout_s=1, names=[]) == []

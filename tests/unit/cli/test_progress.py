"""The progress line on a terminal and in a log file."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from nemo_rl.cli.progress import ProgressLine, format_seconds


def _event(step: int, **more: object) -> dict[str, object]:
    return {
        "step": step,
        "max_steps": 1000,
        "loss": 2.5,
        "lr": 5e-6,
        "tokens_per_s": 5396.2,
        "eta_s": 3725.0,
        "dropped": {"overlong": 2, "bad_line": 0},
        **more,
    }


def _run(console: Console, steps: range) -> str:
    assert isinstance(console.file, io.StringIO)
    with ProgressLine(console) as progress:
        for step in steps:
            progress(_event(step, val_loss=3.0 if step >= 33 else None))
    return console.file.getvalue()


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0:00"), (75, "1:15"), (3725, "1:02:05"), (90_000, "1d 1:00:00"), (59.6, "1:00")]
)
def test_seconds_read_as_a_clock(seconds, text) -> None:
    assert format_seconds(seconds) == text


def test_a_log_file_gets_the_first_the_last_some_between_and_every_validation() -> None:
    text = _run(Console(file=io.StringIO(), width=40), range(1, 1001))
    lines = text.splitlines()
    steps = [int(line.split()[1].split("/")[0]) for line in lines]
    assert steps == sorted({1, 33, *range(20, 1001, 20)})
    assert lines[0] == "step 1/1000  loss 2.5000  5,396 tok/s  1:02:05 left  lr 5.00e-06  dropped 2"
    assert "val 3.0000" in lines[2]


def test_steps_that_come_twice_or_never_make_no_gap_in_a_log_file() -> None:
    console = Console(file=io.StringIO(), width=40)
    assert isinstance(console.file, io.StringIO)
    with ProgressLine(console) as progress:
        for step in (0, 7, 7, 19, 19, 47, 999, 1000, 1000):
            progress(_event(step))
    steps = [int(line.split()[1].split("/")[0]) for line in console.file.getvalue().splitlines()]
    assert steps == [7, 47, 999, 1000]


@pytest.mark.parametrize("terminal", [True, False])
def test_each_notice_is_printed_once(terminal: bool) -> None:
    console = Console(file=io.StringIO(), width=80, force_terminal=terminal)
    assert isinstance(console.file, io.StringIO)
    with ProgressLine(console) as progress:
        for notices in ((), ("disk is full",), ("disk is full", "step 3 [skipped]")):
            progress(_event(len(notices) + 1, notices=notices))
        progress(_event(3, notices=("disk is full", "step 3 [skipped]")))
    assert [console.file.getvalue().count(text) for text in ("disk is full", "step 3 [skipped]")] == [1, 1]


def test_a_terminal_gets_one_line_that_fits() -> None:
    """The whole stream has one line feed, at the end: each state of the line replaces the last."""
    text = _run(Console(file=io.StringIO(), force_terminal=True, width=60, color_system=None), range(1, 4))
    assert text.count("\n") == 1
    assert "step 3/1,000" in text
    assert "loss 2.5000" in text
    assert "dropped" not in text  # the tail that a narrow terminal loses


def test_a_run_with_rewards_shows_them_first_and_their_validation() -> None:
    console = Console(file=io.StringIO(), width=40)
    assert isinstance(console.file, io.StringIO)
    with ProgressLine(console) as progress:
        for step, val_reward in ((1, None), (2, 0.25), (3, 0.25), (1000, 0.5)):
            progress(_event(step, reward=0.03125 * step, val_reward=val_reward, loss=None, epoch=0))
    lines = console.file.getvalue().splitlines()
    assert [line.split()[1] for line in lines] == ["1/1000", "2/1000", "1000/1000"]
    assert lines[0] == "step 1/1000  reward 0.031  5,396 tok/s  1:02:05 left  lr 5.00e-06  epoch 1  dropped 2"
    assert "val 0.250" in lines[1]
    assert lines[2].startswith("step 1000/1000  reward 31.250  ")


def test_missing_facts_are_left_out() -> None:
    console = Console(file=io.StringIO(), width=80)
    with ProgressLine(console) as progress:
        progress({"step": 1, "max_steps": 1})
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue() == "step 1/1\n"

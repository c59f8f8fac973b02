"""`onehop data inspect --json` from the command line: the counts of the written cases, and every switch.

The colours and refusals of the library call behind it are in `test_inspect`.
"""

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from unit.data.chat_cases import DATA, PLAIN

from nemo_rl.cli.main import main

T0 = DATA / "t0"
Inspect = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def inspect(capfd: pytest.CaptureFixture[str]) -> Iterator[Inspect]:
    """Runs the command over a case, or a path, with a template of the cases; gives the objects it prints."""

    def run(case: str | Path, template: str | Path, *switches: str) -> list[dict[str, Any]]:
        path = DATA / "cases" / f"{case}.jsonl" if isinstance(case, str) else case
        template = DATA / "templates" / f"{template}.jinja" if isinstance(template, str) else template
        words = ["data", "inspect", str(path), "--model", str(T0), "--template", str(template), "--json", *switches]
        assert main(words) == 0
        return [json.loads(line) for line in capfd.readouterr().out.split("\n") if line]

    root, ours = logging.getLogger(), logging.getLogger("nemo_rl")
    handlers, level, our_level = list(root.handlers), root.level, ours.level
    yield run
    logging.captureWarnings(False)
    root.handlers[:] = handlers
    root.setLevel(level)
    ours.setLevel(our_level)


def counts(rows: list[dict[str, Any]]) -> list[tuple[int, int]]:
    return [(row["tokens"], row["trained"]) for row in rows]


def trained_text(row: dict[str, Any]) -> str:
    """The trained ids as text; special tokens, which T0 numbers from 256 on, as their number."""
    trained = [row["ids"][position] for position in row["trained_positions"]]
    return "".join(f"<{token}>" if token > 255 else chr(token) for token in trained)


@pytest.mark.parametrize("template", ["c0_plain", "c0_marked"])
def test_b01_without_and_with_markers(inspect: Inspect, template: str):
    (row,) = inspect("b01_three_turns", template)
    assert (row["row"], row["tokens"], row["trained"], row["dropped"]) == (0, 95, 13, None)
    assert row["trained_positions"] == [*range(51, 57), *range(87, 94)]
    assert len(row["ids"]) == 95
    (row,) = inspect("b01_three_turns", template, "--only-unmask-final")
    assert row["trained_positions"] == [*range(87, 94)]


@pytest.mark.parametrize("marked", ["", "_marked"])
def test_b02_templates_that_break_a_prefix(inspect: Inspect, marked: str):
    (row,) = inspect("b02_reasoning_history", f"c1_drops_old_thinking{marked}")
    assert counts([row]) == [(79, 20)]
    assert trained_text(row) == "Plum<260><262>not plum<263>Kiwi<260>"
    (row,) = inspect("b02_system_first", f"c2_needs_user{marked}")
    assert counts([row]) == [(65, 5)]
    assert trained_text(row) == "Blue<260>"


@pytest.mark.parametrize(
    ("template", "switches", "tokens"),
    [
        ("c3_writes_bos", [], 66),
        ("c3_writes_bos", ["--add-bos"], 66),
        ("c3_writes_bos_marked", ["--add-bos"], 66),
        ("c0_plain", ["--add-bos"], 66),
        ("c0_plain", ["--add-bos", "--add-eos"], 67),
    ],
)
def test_b04_one_bos(inspect: Inspect, template: str, switches: list[str], tokens: int):
    (row,) = inspect("b02_system_first", template, *switches)
    assert row["tokens"] == tokens
    assert row["ids"][:2] == [257, 259]
    assert row["ids"].count(257) == 1
    assert trained_text(row) == "Blue<260>" + "<258>" * ("--add-eos" in switches)


@pytest.mark.parametrize("template", ["c4_tools", "c4_tools_marked"])
def test_b05_both_spellings_of_a_call(inspect: Inspect, template: str):
    (mapping,) = inspect("b05_tool_args_mapping", template)
    (text,) = inspect("b05_tool_args_string", template)
    assert mapping == text
    assert counts([mapping]) == [(106, 41)]
    assert trained_text(mapping) == '<264>weather {"city": "Oslo"}<265><260>Cold and wet.<260>'
    whole = bytes(token for token in mapping["ids"] if token < 256)
    assert b"None" not in whole
    assert b"null" not in whole


def test_b06_prompt_that_fills_the_window(inspect: Inspect):
    assert [row["tokens"] for row in inspect("b06_prompt_fills_window", "c0_plain")] == [29, 103, 31]
    rows = inspect("b06_prompt_fills_window", "c0_plain", "--max-length", "40")
    assert counts(rows) == [(29, 3), (40, 0), (31, 4)]
    assert [row["dropped"] for row in rows] == [None, "no_trained_token", None]
    assert sum(row["trained"] for row in rows if row["dropped"] is None) == 7


def test_b13_unicode_separators(inspect: Inspect):
    rows = inspect("b13_unicode_separators", "c0_plain")
    assert [row["tokens"] for row in rows] == [75, 45]
    assert "👩\u200d🔬".encode() in bytes(token for token in rows[0]["ids"] if token < 256)


def test_b08_each_policy(inspect: Inspect):
    def shown(policy: str) -> list[tuple[int, int, int, str | None]]:
        rows = inspect("b08_lengths_30_150_50_64_34", "c0_plain", "--max-length", "64", "--overlong", policy)
        return [(row["row"], row["piece"], row["tokens"], row["dropped"]) for row in rows]

    kept = [(0, 0, 30, None), (2, 0, 50, None), (3, 0, 64, None), (4, 0, 34, None)]
    assert shown("truncate") == [kept[0], (1, 0, 64, "no_trained_token"), *kept[1:]]
    assert shown("drop") == [kept[0], (1, 0, 64, "overlong"), *kept[1:]]
    assert shown("fail") == shown("drop")
    # Only the last 22 tokens of the long row have something to train.
    assert shown("split") == [kept[0], (1, 0, 22, None), *kept[1:]]


def test_fields_and_template_variables(inspect: Inspect, tmp_path: Path):
    path, template = tmp_path / "rows.jsonl", tmp_path / "moody.jinja"
    path.write_text('{"in": "q", "out": "a", "chat": [{"role": "assistant", "content": "b"}]}\n')
    template.write_text(PLAIN + "{{- mood or '' -}}")
    pair = ("--prompt-field", "in", "--completion-field", "out", "--system-prompt", "S")
    (row,) = inspect(path, template, *pair, "--template-kwargs", '{"mood": "!"}')
    assert bytes(token for token in row["ids"] if token < 256).decode() == "system\nS\nuser\nq\nassistant\na\n!"
    (row,) = inspect(path, template, "--messages-field", "chat")
    assert trained_text(row) == "b<260>"


def test_wrong_switches_are_one_line(inspect: Inspect, capfd: pytest.CaptureFixture[str]):
    words = ["data", "inspect", str(DATA / "cases" / "b01_three_turns.jsonl"), "--model", str(T0)]
    for switches, said in {
        ("--template-kwargs", "[1]"): "--template-kwargs: [1] is not a JSON object",
        ("--template-kwargs", "{"): "--template-kwargs: { is not a JSON object",
        ("--prompt-field", "in"): "prompt_field and completion_field must be given together",
    }.items():
        assert main([*words, *switches]) == 2
        err = capfd.readouterr().err
        assert err.startswith("error: ") and err.count("\n") == 1
        assert said in err
    assert main([*words, "--overlong", "keep"]) == 2
    assert "'keep' is not one of" in capfd.readouterr().err

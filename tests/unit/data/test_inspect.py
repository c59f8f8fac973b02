"""What `onehop data inspect` shows of rows, good and bad."""

import io
import json

import pytest
from rich.console import Console
from unit.data.chat_cases import DATA, case_tokenizer

from nemo_rl.data.conversation import ConversationFields
from nemo_rl.data.inspect import InspectOptions, inspect_rows, render_row
from nemo_rl.utils.errors import UserError

CASES = DATA / "cases"
TOKENIZER = case_tokenizer("c0_plain")


def shown(row, **options) -> str:
    console = Console(file=io.StringIO(), width=200, **options)
    render_row(console, row)
    return console.file.getvalue()


def test_b01_row():
    (row,) = inspect_rows(CASES / "b01_three_turns.jsonl", TOKENIZER)
    assert (row.row, row.source_id, row.tokens, row.trained) == (0, "b01_three_turns.jsonl:0", 95, 13)
    assert row.trained_positions == (*range(51, 57), *range(87, 94))
    assert len(row.ids) == 95
    assert [text for text, trained in row.stretches if trained] == ["Four.<|e|>", "Forty.<|e|>"]
    assert row.dropped is None


def test_b06_cut_row_shows_as_far_as_it_got():
    rows = list(inspect_rows(CASES / "b06_prompt_fills_window.jsonl", TOKENIZER, InspectOptions(max_length=40)))
    assert [(row.tokens, row.trained, row.dropped) for row in rows] == [
        (29, 3, None),
        (40, 0, "no_trained_token"),
        (31, 4, None),
    ]


def test_only_the_final_turn():
    (row,) = inspect_rows(CASES / "b01_three_turns.jsonl", TOKENIZER, InspectOptions(only_unmask_final=True))
    assert row.trained_positions == tuple(range(87, 94))


def test_b13_lines_end_at_lf_only():
    rows = list(inspect_rows(CASES / "b13_unicode_separators.jsonl", TOKENIZER))
    assert [(row.source_id, row.tokens) for row in rows] == [("ls", 75), ("combining", 45)]
    assert "ok 👩\u200d🔬 done<|e|>" in dict(rows[0].stretches)


@pytest.fixture
def faulty(tmp_path):
    path = tmp_path / "rows.jsonl"
    good = {"question": "q", "answer": "a"}
    lines = [good, "{", "", [1], {"messages": []}, {"id": 7, "question": "q", "answer": "\ud800"}, good]
    path.write_text("\r\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


def test_faulty_rows_carry_the_reason_a_run_counts(faulty):
    rows = list(inspect_rows(faulty, TOKENIZER))
    assert [(row.row, row.dropped) for row in rows] == [
        (0, None),
        (1, "bad_line"),
        (3, "bad_line"),
        (4, "cook_error"),
        (5, "encode_error"),
        (6, None),
    ]
    assert rows[3].detail == "messages is empty"
    assert rows[4].source_id == "7"
    assert "dropped: cook_error (messages is empty)" in shown(rows[3])


def test_one_row(faulty):
    assert [row.row for row in inspect_rows(faulty, TOKENIZER, row=6)] == [6]
    with pytest.raises(UserError, match="has no row 7; its rows are 0 to 6"):
        list(inspect_rows(faulty, TOKENIZER, row=7))


def test_other_fields(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"in": "q", "out": "a"}\n')
    fields = ConversationFields(prompt_field="in", completion_field="out", system_prompt="S")
    (row,) = inspect_rows(path, TOKENIZER, InspectOptions(fields=fields))
    assert row.stretches[0] == ("<|s|>system\nS<|e|>\n<|s|>user\nq<|e|>\n<|s|>assistant\n", False)


def test_missing_file_is_refused_at_the_call(tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        inspect_rows(tmp_path / "none.jsonl", TOKENIZER)
    with pytest.raises(UserError, match="is a folder"):
        inspect_rows(tmp_path, TOKENIZER)


def test_render_marks_trained_text_by_colour_or_brackets():
    (row,) = inspect_rows(CASES / "b01_three_turns.jsonl", TOKENIZER)
    plain = shown(row)
    assert "row 0  b01_three_turns.jsonl:0  95 tokens, 13 trained" in plain
    assert "⟦Four.<|e|>⟧" in plain
    assert "⟦70⟧ ⟦111⟧" in plain
    coloured = shown(row, force_terminal=True, color_system="truecolor")
    assert "\x1b[1;32mFour.<|e|>" in coloured
    assert "⟦" not in coloured


def test_render_spells_out_control_characters(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"id": "\x1b[31m", "question": "[bold]\x1b[2J\u202e", "answer": "a"}))
    (row,) = inspect_rows(path, TOKENIZER)
    text = shown(row)
    assert "\x1b" not in text
    assert "[bold]\\x1b[2J\\u202e" in text

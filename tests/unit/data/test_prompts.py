"""Prompts: the shapes of a row, ids, what is left out and why, the order of a pass, the case B-21 file.

Not covered: files that change while they are read; the index has its own tests.
"""

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from tiny import DATA, make_tokenizer

from nemo_rl.data.prompts import PromptDataConfig, PromptDataset, RLDataConfig, prompt_order
from nemo_rl.utils.errors import UserError

B21 = DATA / "cases" / "b21_prompts.jsonl"


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def open_rows(path: Path, *rows: Any, **options: Any) -> PromptDataset:
    config = {name: options.pop(name) for name in list(options) if name in PromptDataConfig.model_fields}
    file = write(path / "prompts.jsonl", *rows)
    return PromptDataset(PromptDataConfig(path=str(file), **config), make_tokenizer(), **options)


def test_the_case_file_as_chat(tmp_path: Path):
    path = tmp_path / B21.name
    path.write_bytes(B21.read_bytes())
    dataset = PromptDataset(PromptDataConfig(path=str(path)), make_tokenizer(), needs_gold=True)
    assert len(dataset) == 4
    assert not dataset.counts
    prompt = dataset.row(2)
    assert (prompt.index, prompt.source_id, prompt.gold, prompt.extra) == (2, "p2", "left", {"id": "p2"})
    assert prompt.messages == ({"role": "user", "content": "Say left"},)
    assert prompt.text == "<|s|>user\nSay left<|e|>\n<|s|>assistant\n"
    assert list(prompt.prompt_ids) == make_tokenizer()(prompt.text, add_special_tokens=False)["input_ids"]


def test_a_text_prompt_is_tokenized_as_it_is(tmp_path: Path):
    prompt = open_rows(tmp_path, {"prompt": "012+034=", "answer": "6400"}, template="text").row(0)
    assert prompt.prompt_ids == tuple(b"012+034=")
    assert prompt.source_id == "prompts.jsonl:0"
    assert prompt.gold == "6400"


def test_a_bos_token_comes_once(tmp_path: Path):
    rows = [{"prompt": "x"}, {"prompt": "<|bos|>x"}]
    dataset = open_rows(tmp_path, *rows, template="text", add_bos=True)
    assert dataset.row(0).prompt_ids == dataset.row(1).prompt_ids == (257, ord("x"))


def test_shapes_of_a_row(tmp_path: Path):
    turns = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    rows = [
        {"question": "q", "answer": 7, "level": 3},
        {"messages": [*turns, {"role": "assistant", "content": "gold"}], "id": "x"},
        {"messages": [*turns, {"role": "assistant", "content": "weak"}], "answer": "strong"},
        {"messages": turns},
        {"messages": [{"role": "system", "content": "own"}, *turns]},
    ]
    dataset = open_rows(tmp_path, *rows, system_prompt="be brief")
    found = [dataset.row(index) for index in range(5)]
    assert [prompt.gold for prompt in found] == [7, "gold", "strong", None, None]
    assert [dict(prompt.extra) for prompt in found] == [{"level": 3}, {"id": "x"}, {}, {}, {}]
    system = {"role": "system", "content": "be brief"}
    assert found[0].messages == (system, {"role": "user", "content": "q"})
    assert all(prompt.messages == (system, *turns) for prompt in found[1:4])
    assert found[4].messages == ({"role": "system", "content": "own"}, *turns)


def test_named_fields(tmp_path: Path):
    row = {"ask": "q", "gold": "g", "chat": [{"role": "user", "content": "m"}], "answer": "other"}
    by_field = open_rows(tmp_path, row, prompt_field="ask", answer_field="gold").row(0)
    assert (by_field.messages[0]["content"], by_field.gold) == ("q", "g")
    assert set(by_field.extra) == {"chat", "answer"}
    by_messages = open_rows(tmp_path, row, messages_field="chat").row(0)
    assert (by_messages.messages[0]["content"], by_messages.gold) == ("m", "other")


def test_what_cannot_be_used_is_counted_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    rows = [
        {"prompt": "short", "answer": "1"},
        "not json",
        {"prompt": "much too long for this limit", "answer": "1"},
        {"text": "no prompt"},
        "",
        {"prompt": "no gold"},
        {"prompt": 5, "answer": "1"},
        {"prompt": "fits", "answer": "2"},
    ]
    with caplog.at_level(logging.WARNING):
        dataset = open_rows(tmp_path, *rows, template="text", max_prompt_length=10, needs_gold=True)
    assert [dataset.row(index).gold for index in range(len(dataset))] == ["1", "2"]
    assert [dataset.row(index).index for index in range(len(dataset))] == [0, 1]
    assert dataset.counts == {"bad_line": 1, "overlong": 1, "bad_row": 2, "no_gold": 1}
    for part in ("prompts.jsonl:1 (bad_line)", "prompts.jsonl:2 (overlong): 28 tokens, 10 are allowed", "jsonl:5 (no"):
        assert part in caplog.text
    with pytest.raises(IndexError, match="prompt 2 of 2"):
        dataset.row(2)


def test_what_the_user_can_do_wrong(tmp_path: Path):
    with pytest.raises(UserError, match=r"data.train.path: .*nothing.jsonl does not exist"):
        PromptDataset(PromptDataConfig(path=str(tmp_path / "nothing.jsonl")))
    with pytest.raises(UserError, match="has no usable prompt, it is empty"):
        open_rows(tmp_path)
    with pytest.raises(UserError, match=r"no usable prompt; prompts.jsonl:0 \(bad_row\): row has no field ask; it has"):
        open_rows(tmp_path, {"prompt": "x"}, prompt_field="ask")
    with pytest.raises(UserError, match=r"row has no field gold; it has prompt, answer"):
        open_rows(tmp_path, {"prompt": "x", "answer": "y"}, answer_field="gold")
    with pytest.raises(UserError, match=r"suffix '.txt'"):
        PromptDataset(PromptDataConfig(path=str(write(tmp_path / "prompts.txt", "x"))))
    with pytest.raises(UserError, match="nothing before its last assistant turn"):
        open_rows(tmp_path, {"messages": [{"role": "assistant", "content": "x"}]})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"messages_field": "m", "prompt_field": "p"}, "keep one"),
        ({"template": "text", "system_prompt": "s"}, "no place for system_prompt"),
        ({"template": "text", "messages_field": "m"}, "no use for messages_field"),
    ],
)
def test_options_that_exclude_each_other(values: dict[str, Any], message: str):
    with pytest.raises(ValidationError, match=message):
        PromptDataConfig(path="x.jsonl", **values)


def test_both_sources_have_one_template():
    with pytest.raises(ValidationError, match="make them the same"):
        RLDataConfig(
            train=PromptDataConfig(path="a.jsonl"), validation=PromptDataConfig(path="b.jsonl", template="text")
        )


def test_each_pass_holds_every_prompt_once_in_its_own_order():
    first, second = (prompt_order(50, epoch=epoch, seed=3, shuffle=True) for epoch in (0, 1))
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second
    assert first == prompt_order(50, epoch=0, seed=3, shuffle=True)
    assert first != prompt_order(50, epoch=0, seed=4, shuffle=True)
    assert prompt_order(5, epoch=1, seed=3, shuffle=False) == [0, 1, 2, 3, 4]


def test_the_order_is_the_same_in_every_version():
    assert prompt_order(8, epoch=2, seed=7, shuffle=True) == [0, 1, 7, 4, 6, 2, 3, 5]


def test_limit_takes_the_first_rows(tmp_path: Path):
    dataset = open_rows(tmp_path, *({"prompt": str(i), "answer": str(i)} for i in range(9)), limit=4)
    assert [dataset.row(index).gold for index in dataset.order(0, 0, shuffle=False)] == ["0", "1", "2", "3"]


def test_rows_are_counted_without_torch_and_without_a_tokenizer(tmp_path: Path):
    path = write(tmp_path / "prompts.jsonl", {"prompt": "a"}, "bad", {"prompt": "b"})
    code = (
        "import sys; from nemo_rl.data.prompts import PromptDataConfig, PromptDataset\n"
        f"dataset = PromptDataset(PromptDataConfig(path={str(path)!r}))\n"
        "print(len(dataset), 'torch' in sys.modules, 'transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["2", "False", "False"]

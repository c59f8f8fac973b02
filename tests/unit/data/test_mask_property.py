"""Masks of generated conversations under five templates, each with and without generation markers.

The reference says in two lines per template which text an assistant turn contributes; it knows nothing of tokens or
positions. Not covered: what stands between the turns, which the written cases and `test_tokenize` compare.
"""

import json
from collections.abc import Callable, Iterator
from itertools import groupby
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase
from unit.data.chat_cases import case_tokenizer

from nemo_rl.data.tokenize import TokenizedConversation, tokenize_conversation

Turn = dict[str, Any]
BOS = 257

# Words, and everything that could be taken for a border: tags, headers, marks, line separators.
FRAGMENTS = (
    *("a", "Plum ", " ", "\n", "é", "e\u0301", "👩\u200d🔬", "\u2028", "\x85", "\ue000", "\ue001", "{{ x }}", "None"),
    *("<|e|>", "<|e|>\n", "<|s|>assistant\n", "<|s|>user\n", "<|eos|>", "<|pad|>", "<", "assistant"),
    *("<think>", "</think>", "<think>no</think>", "<tool>", "</tool>"),
)
texts = st.lists(st.sampled_from(FRAGMENTS), max_size=6).map("".join)
arguments = st.dictionaries(
    st.sampled_from(["city", "é", "n"]), st.none() | st.integers(-9, 9) | texts | st.lists(st.booleans(), max_size=2)
)


@st.composite
def conversations(draw: st.DrawFn) -> list[Turn]:
    """Turns in any order, with a user turn somewhere; an assistant turn may hold `calls`, each with its arguments."""
    turns: list[Turn] = []
    for role in draw(st.lists(st.sampled_from(["user", "assistant", "assistant", "tool"]), min_size=1, max_size=6)):
        turn: Turn = {"role": role, "content": draw(texts)}
        if role == "assistant" and draw(st.booleans()):
            turn["calls"] = draw(st.lists(arguments, min_size=1, max_size=2))
        turns.append(turn)
    if all(turn["role"] != "user" for turn in turns):
        turns.insert(draw(st.integers(0, len(turns))), {"role": "user", "content": draw(texts)})
    if draw(st.booleans()):
        turns.insert(0, {"role": "system", "content": draw(texts)})
    return turns


def without_calls(turns: list[Turn]) -> list[Turn]:
    return [{"role": turn["role"], "content": turn["content"]} for turn in turns]


def with_calls(turns: list[Turn], *, as_text: bool) -> list[Turn]:
    return [
        {
            "role": turn["role"],
            "content": turn["content"] or (None if turn.get("calls") else ""),
            "tool_calls": [
                {"function": {"name": "weather", "arguments": json.dumps(call) if as_text else call}}
                for call in turn.get("calls", [])
            ],
        }
        for turn in turns
    ]


def plain_answers(turns: list[Turn]) -> Iterator[str]:
    return (turn["content"] + "<|e|>" for turn in turns if turn["role"] == "assistant")


def answers_without_old_thinking(turns: list[Turn]) -> Iterator[str]:
    last_user = max(index for index, turn in enumerate(turns) if turn["role"] == "user")
    for index, turn in enumerate(turns):
        if turn["role"] == "assistant":
            yield (turn["content"].split("</think>")[-1] if index < last_user else turn["content"]) + "<|e|>"


def answers_with_calls(turns: list[Turn]) -> Iterator[str]:
    for turn in turns:
        if turn["role"] == "assistant":
            calls = (json.dumps(call, ensure_ascii=False) for call in turn.get("calls", []))
            yield turn["content"] + "".join(f"<tool>weather {call}</tool>" for call in calls) + "<|e|>"


def trained_runs(tokenizer: PreTrainedTokenizerBase, row: TokenizedConversation) -> list[str]:
    """The ids of each unbroken run of trained tokens, decoded."""
    runs = groupby(zip(row.input_ids, row.token_mask, strict=True), key=lambda token: token[1])
    return [
        tokenizer.decode([token for token, _ in run], clean_up_tokenization_spaces=False)
        for trained, run in runs
        if trained
    ]


ANSWERS: dict[str, Callable[[list[Turn]], Iterator[str]]] = {
    "c0": plain_answers,
    "c1_drops_old_thinking": answers_without_old_thinking,
    "c2_needs_user": plain_answers,
    "c3_writes_bos": plain_answers,
    "c4_tools": answers_with_calls,
}
TOKENIZERS = {
    name: (case_tokenizer("c0_plain" if name == "c0" else name), case_tokenizer(f"{name}_marked")) for name in ANSWERS
}


@pytest.mark.parametrize("name", ANSWERS)
@settings(max_examples=300, derandomize=True, deadline=None)
@given(turns=conversations(), final=st.booleans(), add_bos=st.booleans(), as_text=st.booleans())
@example(turns=[{"role": "user", "content": ""}], final=True, add_bos=True, as_text=False)
def test_both_ways_give_one_mask_and_its_ids_decode_to_the_answers(
    name: str, turns: list[Turn], final: bool, add_bos: bool, as_text: bool
):
    plain, marked = TOKENIZERS[name]
    messages = with_calls(turns, as_text=as_text) if name == "c4_tools" else without_calls(turns)
    rows = [
        tokenize_conversation(tokenizer, messages, only_unmask_final=final, add_bos=add_bos)
        for tokenizer in (plain, marked)
    ]
    assert rows[0] == rows[1]
    row = rows[0]
    answers = list(ANSWERS[name](turns))
    assert trained_runs(plain, row) == (answers[-1:] if final else answers)
    # One tokenization of the whole: what the library itself renders, after at most one BOS.
    mappings = with_calls(turns, as_text=False) if name == "c4_tools" else messages
    whole = plain.apply_chat_template(mappings, return_dict=True)["input_ids"]
    extra = [BOS] if add_bos and name != "c3_writes_bos" else []
    assert row.input_ids == extra + whole
    assert row.input_ids.count(BOS) == (1 if add_bos or name == "c3_writes_bos" else 0)

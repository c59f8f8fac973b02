"""The documented rules for odd rows, one by one."""

import copy

import pytest

from nemo_rl.data.conversation import ConversationFields, normalize_messages, to_conversation
from nemo_rl.utils.errors import UserError

TURNS = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]


@pytest.mark.parametrize(
    ("row", "options"),
    [
        ({"messages": TURNS}, {}),
        ({"question": "q", "answer": "a"}, {}),
        ({"prompt": "q", "completion": "a"}, {}),
        ({"chat": TURNS, "messages": []}, {"messages_field": "chat"}),
        ({"in": "q", "out": "a", "messages": []}, {"prompt_field": "in", "completion_field": "out"}),
        ({"messages": TURNS, "question": "other", "answer": "other"}, {}),
    ],
)
def test_fields(row, options):
    kept = copy.deepcopy(row)
    assert to_conversation(row, ConversationFields(**options)).messages == TURNS
    assert row == kept


def test_system_prompt_is_for_rows_without_one():
    fields = ConversationFields(system_prompt="S")
    assert to_conversation({"messages": TURNS}, fields).messages == [{"role": "system", "content": "S"}, *TURNS]
    own = [{"role": "system", "content": "mine"}, *TURNS]
    assert to_conversation({"messages": own}, fields).messages == own


def test_tools_as_list_or_text():
    tool = {"type": "function", "function": {"name": "f"}}
    assert to_conversation({"messages": TURNS, "tools": [tool]}).tools == [tool]
    assert to_conversation({"messages": TURNS, "tools": '[{"type": "function", "function": {"name": "f"}}]'}).tools == [
        tool
    ]
    assert to_conversation({"messages": TURNS, "tools": []}).tools is None


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({}, "has no field messages, question and answer, or prompt and completion; it has no fields"),
        ({"text": "x", "id": 1}, "it has text, id"),
        ({"messages": []}, "messages is empty"),
        ({"messages": None}, "messages is null, a list of turns is needed"),
        ({"messages": "hi"}, "messages is text"),
        ({"messages": ["hi"]}, "turn 0 is text, an object with role and content is needed"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "turn 0 has role 'robot'"),
        ({"messages": [{"content": "x"}]}, "turn 0 has role None"),
        ({"messages": [{"role": "user", "content": None}]}, "content of turn 0 is null"),
        ({"messages": [TURNS[0], {"role": "assistant"}]}, "content of turn 1 is null"),
        ({"messages": [{"role": "user", "content": 3}]}, "content of turn 0 is a number"),
        ({"messages": [{"role": "user", "content": {"text": "x"}}]}, "content of turn 0 is an object"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "a part of type 'image'"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "content of turn 0 holds text"),
        ({"question": "q", "answer": 42}, "answer is a number, text is needed"),
        ({"messages": [{"role": "assistant", "content": "", "tool_calls": "f()"}]}, "tool_calls of turn 0 is text"),
        ({"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]}, "has no function name"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{"}]}]}, "aren't JSON"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": "[1]"}]}]}, "are a list"),
        ({"messages": TURNS, "tools": "{"}, "tools is text but isn't JSON"),
        ({"messages": TURNS, "tools": {"a": 1}}, "tools is an object, a list of objects is needed"),
    ],
)
def test_refused_rows_say_why(row, message):
    with pytest.raises(UserError, match=message):
        to_conversation(row)


@pytest.mark.parametrize(
    "turn",
    [
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]},
        {"role": "assistant", "content": None, "reasoning_content": "hm"},
        {"role": "tool", "content": None, "tool_call_id": "c"},
    ],
)
def test_null_content_is_empty_text_where_it_may_stand(turn):
    (message,) = normalize_messages([turn])
    assert message["content"] == ""
    assert None not in message.values()


def test_text_parts_are_joined():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert normalize_messages([{"role": "user", "content": parts}]) == [{"role": "user", "content": "ab"}]


def test_tool_arguments_have_one_form():
    spellings = [
        {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"k": "é"}}},
        {"id": "c", "function": {"name": "f", "arguments": '{"k": "\\u00e9"}'}},
        {"id": "c", "name": "f", "arguments": {"k": "é"}},
    ]
    forms = [normalize_messages([{"role": "assistant", "content": "", "tool_calls": [call]}]) for call in spellings]
    assert forms[0] == forms[1] == forms[2]
    assert forms[0][0]["tool_calls"] == [spellings[0]]
    for arguments in (None, "", "{}", {}):
        (turn,) = normalize_messages([{"role": "assistant", "tool_calls": [{"name": "f", "arguments": arguments}]}])
        assert turn["tool_calls"][0]["function"]["arguments"] == {}


def test_odd_orders_pass():
    for messages in ([TURNS[1], TURNS[0]], [TURNS[0]], [TURNS[1], TURNS[1]], [{"role": "system", "content": "s"}]):
        assert normalize_messages(messages) == messages


def test_applying_it_twice_changes_nothing():
    row = [{"role": "assistant", "content": None, "tool_calls": [{"name": "f", "arguments": "{}"}], "name": None}]
    once = normalize_messages(row)
    assert normalize_messages(once) == once


def test_field_options_that_exclude_each_other():
    with pytest.raises(UserError, match="together"):
        ConversationFields(prompt_field="in")
    with pytest.raises(UserError, match="not both"):
        ConversationFields(messages_field="m", prompt_field="in", completion_field="out")

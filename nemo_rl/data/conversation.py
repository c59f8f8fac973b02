"""One raw row -> one conversation in the only shape the chat templates see.

Rules for a row
- A list under `messages` wins. Without it, and without options, the pairs `question` / `answer` and
  `prompt` / `completion` make a user turn and an assistant turn.
- `system_prompt` becomes the first turn, unless the row brings a system turn of its own there.
- An empty row, an unknown role, a turn that isn't an object and content that isn't text are refused.
- Null content counts as "" beside tool calls or a separate reasoning text, and in a tool result; elsewhere it is
  refused. The word "None" never reaches a template.
- Text parts (`[{"type": "text", "text": ...}]`) are joined; any other part is refused.
- Tool arguments given as JSON text become the mapping they spell, so both spellings render alike.
- Assistant-first rows and rows without an assistant turn pass: the first trains its opening turn, the second trains
  nothing and is dropped for that reason later.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nemo_rl.utils.errors import UserError

Message = dict[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool")
SYSTEM_ROLES = ("system", "developer")
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
PAIRS = (("question", "answer"), ("prompt", "completion"))


@dataclass(frozen=True)
class ConversationFields:
    """Which fields of a row hold the conversation.

    Attributes:
        messages_field: a list of `{"role", "content"}` objects; null looks for `messages`, then for the known pairs.
        prompt_field: the user text; given together with `completion_field`, and then only these two are read.
        completion_field: the assistant text.
        system_prompt: a system turn for rows that bring none.
    """

    messages_field: str | None = None
    prompt_field: str | None = None
    completion_field: str | None = None
    system_prompt: str | None = None

    def __post_init__(self) -> None:
        if (self.prompt_field is None) != (self.completion_field is None):
            raise UserError("prompt_field and completion_field must be given together")
        if self.messages_field is not None and self.prompt_field is not None:
            raise UserError("give either messages_field or prompt_field and completion_field, not both")


@dataclass(frozen=True)
class Conversation:
    """Normalised turns and, where the row has them, the JSON schemas of its tools."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None


DEFAULT_FIELDS = ConversationFields()


def to_conversation(row: Mapping[str, Any], fields: ConversationFields = DEFAULT_FIELDS) -> Conversation:
    """Read the conversation of one row by the rules above; the row is not changed.

    Raises:
        UserError: the row breaks a rule. The message names the field or turn; the caller adds file and row.
    """
    messages = normalize_messages(_raw_messages(row, fields))
    if fields.system_prompt is not None and messages[0]["role"] not in SYSTEM_ROLES:
        messages.insert(0, {"role": "system", "content": fields.system_prompt})
    return Conversation(messages, _tools(row.get("tools")))


def normalize_messages(messages: Any) -> list[Message]:
    """Turns with text content, mapping arguments and no null values. Applying it twice changes nothing more.

    Raises:
        UserError: naming the 0-based turn and what is wrong with it.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        raise UserError(f"messages is {_kind(messages)}, a list of turns is needed")
    if not messages:
        raise UserError("messages is empty")
    return [_normalize_turn(index, turn) for index, turn in enumerate(messages)]


def _raw_messages(row: Mapping[str, Any], fields: ConversationFields) -> Any:
    if fields.prompt_field is not None and fields.completion_field is not None:
        return _pair(row, fields.prompt_field, fields.completion_field)
    name = fields.messages_field or "messages"
    if name in row:
        return row[name]
    if fields.messages_field is None:
        for prompt, completion in PAIRS:
            if prompt in row and completion in row:
                return _pair(row, prompt, completion)
    known = "messages, question and answer, or prompt and completion" if fields.messages_field is None else name
    raise UserError(f"row has no field {known}; it has {', '.join(map(str, row)) or 'no fields'}")


def _pair(row: Mapping[str, Any], prompt: str, completion: str) -> list[Message]:
    for name in (prompt, completion):
        if name not in row:
            raise UserError(f"row has no field {name}; it has {', '.join(map(str, row)) or 'no fields'}")
        if not isinstance(row[name], str):
            raise UserError(f"{name} is {_kind(row[name])}, text is needed")
    return [{"role": "user", "content": row[prompt]}, {"role": "assistant", "content": row[completion]}]


def _normalize_turn(index: int, turn: Any) -> Message:
    if not isinstance(turn, Mapping):
        raise UserError(f"turn {index} is {_kind(turn)}, an object with role and content is needed")
    message: Message = {key: value for key, value in turn.items() if value is not None}
    role = message.get("role")
    if role not in ROLES:
        raise UserError(f"turn {index} has role {role!r}, one of {', '.join(ROLES)} is needed")
    calls = message.pop("tool_calls", None)
    if calls:
        message["tool_calls"] = _tool_calls(index, calls)
    may_be_null = role == "tool" or bool(calls) or any(key in message for key in REASONING_KEYS)
    message["content"] = _text(index, message.get("content"), may_be_null=may_be_null)
    return message


def _text(index: int, content: Any, *, may_be_null: bool) -> str:
    if isinstance(content, str):
        return content
    if content is None and may_be_null:
        return ""
    if isinstance(content, Sequence):
        return "".join(_part_text(index, part) for part in content)
    raise UserError(f"content of turn {index} is {_kind(content)}, text is needed")


def _part_text(index: int, part: Any) -> str:
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return part["text"]
    shown = f"a part of type {part.get('type')!r}" if isinstance(part, Mapping) else _kind(part)
    raise UserError(f"content of turn {index} holds {shown}, only text parts are supported")


def _tool_calls(index: int, calls: Any) -> list[dict[str, Any]]:
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise UserError(f"tool_calls of turn {index} is {_kind(calls)}, a list is needed")
    return [_tool_call(index, call) for call in calls]


def _tool_call(index: int, call: Any) -> dict[str, Any]:
    # The call's own fields are also accepted without the `function` object around them.
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise UserError(f"a tool call of turn {index} has no function name")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except json.JSONDecodeError as error:
            raise UserError(
                f"arguments of tool call {function['name']!r} in turn {index} aren't JSON: {error}"
            ) from None
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, Mapping):
        raise UserError(
            f"arguments of tool call {function['name']!r} in turn {index} are {_kind(arguments)}, an object is needed"
        )
    kept = {key: call[key] for key in ("id",) if isinstance(call.get(key), str)}
    return {**kept, "type": "function", "function": {"name": function["name"], "arguments": dict(arguments)}}


def _tools(tools: Any) -> list[dict[str, Any]] | None:
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except json.JSONDecodeError as error:
            raise UserError(f"tools is text but isn't JSON: {error}") from None
    if not tools:
        return None
    if not isinstance(tools, Sequence) or not all(isinstance(tool, Mapping) for tool in tools):
        raise UserError(f"tools is {_kind(tools)}, a list of objects is needed")
    return [dict(tool) for tool in tools]


def _kind(value: Any) -> str:
    """The JSON name of a value's type, for messages."""
    names: dict[type, str] = {type(None): "null", bool: "a boolean", int: "a number", float: "a number", str: "text"}
    if isinstance(value, Mapping):
        return "an object"
    return names.get(type(value), "a list" if isinstance(value, Sequence) else type(value).__name__)

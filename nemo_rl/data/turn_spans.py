"""Where assistant turns lie in a rendered conversation, for chat templates without generation markers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from nemo_rl.data.conversation import REASONING_KEYS, Message
from nemo_rl.utils.errors import UserError

Span = tuple[int, int]
"""Characters `[start, end)` of a rendered conversation."""

_MARK_FIRST, _MARK_LAST = 0xE000, 0xF8FF  # Unicode's private use area: no text means anything by these


class Render(Protocol):
    """Messages -> text; raises UserError when the template refuses them."""

    def __call__(self, messages: Sequence[Message], *, add_generation_prompt: bool = False) -> str: ...


@dataclass(frozen=True)
class TurnStyle:
    """The fixed text a template puts around the words of an assistant turn.

    Attributes:
        header: before the turn, written by the generation prompt too, such as `<|im_start|>assistant\\n`.
        forced: written after the header although the generation prompt doesn't hold it, such as an empty reasoning
            block. The model has to write it, so it is part of the turn.
        prompted: the rest of the generation prompt, such as `<think>\\n`. Never part of a turn.
        closing: the tag that ends a turn, wherever the turn stands.
        final_closing: what ends the last turn; differs from `closing` where only the last turn is closed.
    """

    header: str = ""
    forced: str = ""
    prompted: str = ""
    closing: str = ""
    final_closing: str = ""

    def fit(self, text: str, span: Span) -> Span:
        """A span from the end of the header on, less what else the generation prompt writes and up to the closing tag.

        The tag is added where it follows, and white space after it is taken away where the span has both.
        """
        start, end = span
        if text.startswith(self.prompted, start, end):
            start += len(self.prompted)
        closing = self.closing or self.final_closing
        if not closing:
            return start, end
        if text.startswith(closing, end):
            return start, end + len(closing)
        written_end = start + len(text[start:end].rstrip())
        return (start, written_end) if text.endswith(closing, start, written_end) else (start, end)


def find_turns(text: str, messages: Sequence[Message], render: Render, style: TurnStyle) -> list[Span | None]:
    """The span of each assistant turn of `messages` in `text`, their render; None where the template leaves it out.

    One more render with a mark in place of every assistant turn usually settles it. Where the text between the marks
    doesn't fit `text` in exactly one way, each turn is looked for alone.

    Raises:
        UserError: a turn can't be placed for certain.
    """
    indices = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    mark = unused_mark(text)
    spans = _spans_between(text, _pieces(messages, indices, mark, render), len(indices), style)
    if spans is not None:
        return [style.fit(text, span) for span in spans]
    return [_find_turn(text, messages, index, mark, render, style) for index in indices]


def unused_mark(text: str) -> str:
    """A character that doesn't occur in `text`."""
    for code in range(_MARK_FIRST, _MARK_LAST + 1):
        if chr(code) not in text:
            return chr(code)
    raise UserError("the conversation uses every private use character, so no mark is left to find assistant turns")


def shared_length(left: str, right: str) -> int:
    """How many characters two texts share from the start."""
    for index, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return index
    return min(len(left), len(right))


def _find_turn(
    text: str, messages: Sequence[Message], index: int, mark: str, render: Render, style: TurnStyle
) -> Span | None:
    pieces = _pieces(messages, [index], mark, render)
    if pieces == [text]:
        return None
    spans = _spans_between(text, pieces, 1, style)
    if spans is not None:
        return style.fit(text, spans[0])
    # Templates that check how tool calls and turns follow each other refuse a turn whose call was replaced.
    return _turn_by_prefix(text, messages, index, render, style)


def _pieces(messages: Sequence[Message], indices: Sequence[int], mark: str, render: Render) -> list[str]:
    """The text before, between and after the marks that replace turns; nothing if the template refuses that."""
    marked = [_marked(message, mark) if index in indices else message for index, message in enumerate(messages)]
    try:
        return render(marked).split(mark)
    except UserError:
        return []


def _spans_between(text: str, pieces: Sequence[str], num_turns: int, style: TurnStyle) -> list[Span] | None:
    """The turns between the pieces, or None if a mark is missing or repeated, or the pieces don't fit `text`."""
    if len(pieces) != num_turns + 1:
        return None
    *before, after = pieces
    return _align(text, [*(piece.removesuffix(style.forced) for piece in before), after])


def _marked(message: Message, mark: str) -> Message:
    dropped = {"tool_calls", *REASONING_KEYS}
    return {**{key: value for key, value in message.items() if key not in dropped}, "content": mark}


def _align(text: str, pieces: Sequence[str]) -> list[Span] | None:
    """The gaps between `pieces` laid out in order over the whole of `text`, or None unless exactly one layout fits.

    Every layout lies between the one that places each piece as early as it can and the one as late as it can; where
    these two agree there is no other.
    """
    first, *between, last = pieces
    if not text.startswith(first) or not text.endswith(last) or len(first) + len(last) > len(text):
        return None
    limit = len(text) - len(last)
    early: list[int] = []
    position = len(first)
    for piece in between:
        position = text.find(piece, position, limit)
        if position < 0:
            return None
        early.append(position)
        position += len(piece)
    late: list[int] = []
    position = limit
    for piece in reversed(between):
        position = text.rfind(piece, len(first), position)
        late.append(position)
    if early != late[::-1]:
        return None
    starts = [len(first), *(at + len(piece) for at, piece in zip(early, between, strict=True))]
    return list(zip(starts, [*early, limit], strict=True))


def _turn_by_prefix(text: str, messages: Sequence[Message], index: int, render: Render, style: TurnStyle) -> Span:
    """The turn as what the conversation up to and with it adds to the one before it; both must begin `text`."""
    try:
        before = render(messages[:index], add_generation_prompt=True) if index else ""
        through = render(messages[: index + 1])
    except UserError as error:
        raise _not_found(index) from error
    end = shared_length(text, through)
    if not text.startswith(before) or end <= len(before):
        raise _not_found(index)
    start = len(before)
    # A template without a generation prompt leaves the header to the turn itself.
    if not before.endswith(style.header) and text.startswith(style.header, start, end):
        start += len(style.header)
    return style.fit(text, (start, end))


def _not_found(index: int) -> UserError:
    return UserError(
        f"the assistant text of turn {index} can't be told from the rest of what the chat template renders; "
        "put {% generation %} and {% endgeneration %} around it in the template"
    )

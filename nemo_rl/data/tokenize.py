"""Messages -> token ids and the mask of trained tokens: the one place where training text becomes numbers."""

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from nemo_rl.data.chat_template import ChatTemplate
from nemo_rl.data.conversation import Message, normalize_messages
from nemo_rl.data.turn_spans import Span
from nemo_rl.utils.errors import UserError

LongRowPolicy = Literal["truncate", "drop", "fail", "split"]


class DropReason(StrEnum):
    """Why a row is not trained; the values are the keys of every count of dropped rows."""

    OVERLONG = "overlong"
    NO_TRAINED_TOKEN = "no_trained_token"
    EMPTY = "empty"
    BAD_LINE = "bad_line"
    COOK_ERROR = "cook_error"
    ENCODE_ERROR = "encode_error"


@dataclass(frozen=True)
class TokenizedConversation:
    """One conversation as the model sees it.

    Attributes:
        text: the rendered conversation, before any cut.
        input_ids: token ids [S].
        token_mask: [S], 1 where the token is trained; column 0 is always 0, because nothing predicts it.
        spans: trained stretches of `text` in characters, `[start, end)`, in order.
    """

    text: str
    input_ids: list[int]
    token_mask: list[int]
    spans: tuple[Span, ...]

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def num_trained(self) -> int:
        """The number of trained tokens."""
        return sum(self.token_mask)

    def cut(self, start: int, end: int | None) -> "TokenizedConversation":
        """Tokens `[start, end)`; the first of them is not trained. `text` and `spans` stay those of the whole."""
        mask = self.token_mask[start:end]
        return replace(self, input_ids=self.input_ids[start:end], token_mask=[0, *mask[1:]] if mask else [])


def tokenize_conversation(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[dict[str, Any]] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    only_unmask_final: bool = False,
    add_bos: bool = False,
    add_eos: bool = False,
) -> TokenizedConversation:
    """One tokenization of the whole rendered conversation, with the assistant's tokens marked as trained.

    - A token is trained if it covers at least one character of an assistant turn: its words, its tool calls and the
      tag that closes it. The role header, the rest of the generation prompt and white space after the tag are not.
      The mask is the same whether the template has generation markers or not.
    - The tokenizer adds no special tokens of its own: the template decides, and the two switches complete it.

    Args:
        tokenizer: a fast tokenizer with a chat template.
        messages: turns as in `nemo_rl.data.conversation`; they are normalised here and not changed.
        tools: JSON schemas of the tools, for templates that list them.
        chat_template_kwargs: further template variables, such as `enable_thinking`.
        only_unmask_final: train the last assistant turn only.
        add_bos: begin with exactly one BOS token, also if the template writes it; no effect without a BOS token.
        add_eos: end with the EOS token, trained if the assistant has the last turn; no effect without one.

    Raises:
        UserError: the messages break a rule, the template refuses them or leaves out a tool call, or a turn can't be
            placed. The message names the turn; the caller adds file and row.
    """
    turns = normalize_messages(messages)
    text, spans_of_turn = ChatTemplate.of(tokenizer, chat_template_kwargs).render_with_turns(turns, tools)
    _check_tool_calls_shown(text, turns)
    if only_unmask_final:
        spans_of_turn = spans_of_turn[-1:]
    spans = [span for spans in spans_of_turn for span in spans]
    bos, eos = tokenizer.bos_token, tokenizer.eos_token
    if add_bos and bos and not text.lstrip().startswith(bos):
        text = bos + text
        spans = [(start + len(bos), end + len(bos)) for start, end in spans]
    if add_eos and eos and not text.rstrip().endswith(eos):
        if turns[-1]["role"] == "assistant":
            spans.append((len(text), len(text) + len(eos)))
        text += eos
    ids, offsets = _encode(tokenizer, text)
    return TokenizedConversation(text, ids, _mask(offsets, spans), tuple(spans))


def fit_row(
    row: TokenizedConversation, max_length: int, policy: LongRowPolicy = "truncate"
) -> list[TokenizedConversation] | DropReason:
    """The row as pieces of at most `max_length` tokens, or the reason why nothing of it can be trained.

    - `truncate` keeps the first `max_length` tokens, `split` cuts the row into consecutive pieces, `drop` gives up a
      longer row, `fail` refuses it.
    - Every piece returned has a trained token. In a piece of a split, column 0 loses its mark like in any row.

    Raises:
        UserError: `policy` is "fail" and the row is longer; names both lengths, the caller adds file and row.
    """
    if not row.input_ids:
        return DropReason.EMPTY
    if len(row) <= max_length:
        pieces = [row]
    elif policy == "drop":
        return DropReason.OVERLONG
    elif policy == "fail":
        raise UserError(f"{len(row)} tokens, {max_length} allowed; raise the maximum length or choose another policy")
    else:
        starts = range(0, len(row), max_length) if policy == "split" else (0,)
        pieces = [row.cut(start, start + max_length) for start in starts]
    return [piece for piece in pieces if any(piece.token_mask)] or DropReason.NO_TRAINED_TOKEN


def _encode(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[list[int], list[tuple[int, int]]]:
    """Token ids of `text` and, for each, the characters `[start, end)` it stands for."""
    try:
        text.encode()
    # A JSON escape can spell half a surrogate pair, which is no character and has no UTF-8 form.
    except UnicodeEncodeError as error:
        raise UserError(f"the text isn't valid Unicode: {error}") from None
    encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, return_attention_mask=False)
    return encoding["input_ids"], encoding["offset_mapping"]


def _mask(offsets: Sequence[tuple[int, int]], spans: Sequence[Span]) -> list[int]:
    """[S]: 1 for tokens that overlap a span; both are in text order, so each span is one run of tokens."""
    mask = [0] * len(offsets)
    starts = [start for start, _ in offsets]
    ends = [end for _, end in offsets]
    for start, end in spans:
        first, stop = bisect_right(ends, start), bisect_left(starts, end)
        if first < stop:
            mask[first:stop] = [1] * (stop - first)
    if mask:
        mask[0] = 0
    return mask


def _check_tool_calls_shown(text: str, turns: Sequence[Message]) -> None:
    for index, turn in enumerate(turns):
        for call in turn.get("tool_calls", ()):
            if call["function"]["name"] not in text:
                raise UserError(
                    f"the chat template leaves out the tool call {call['function']['name']!r} of turn {index}"
                )

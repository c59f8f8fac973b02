"""Render conversations through a tokenizer's chat template and say which text each assistant turn contributes.

Generation markers (`{% generation %}`) say where that text lies. Most stock templates have none; then each assistant
turn is rendered once more with a mark in place of its words, and what stands around the mark is found again in the
real text. This needs no prefix property, so templates that drop old reasoning or demand a user turn work, and the
text is always one render of the whole conversation.

Both ways end in the same span: what the model has to write after the generation prompt, with the tag that closes the
turn and without the white space after that tag.
"""

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import jinja2
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from nemo_rl.data.conversation import Message
from nemo_rl.data.turn_spans import Span, TurnStyle, find_turns, shared_length, unused_mark
from nemo_rl.utils.errors import UserError

Tools = Sequence[dict[str, Any]] | None

_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_TAG_OR_WORD = re.compile(r"\s*(?:<[^<>\s]*>|[^<\s]+|<)")
_SYSTEM: Message = {"role": "system", "content": "S"}
_QUESTION: Message = {"role": "user", "content": "Q"}


class ChatTemplate:
    """A chat template and its variables. What it does with turns in general is found out once, on first use."""

    def __init__(self, template: str, variables: Mapping[str, Any]):
        self._template = template
        self._variables = dict(variables)

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, variables: Mapping[str, Any] | None = None) -> "ChatTemplate":
        """The chat template of `tokenizer`; the same object again for the same template and variables.

        Raises:
            UserError: the tokenizer has no chat template.
        """
        template = tokenizer.chat_template
        if isinstance(template, dict):
            template = template.get("default")
        if not template:
            raise UserError(
                f"tokenizer {tokenizer.name_or_path!r} has no chat template; give one as text or as a path in "
                "policy.tokenizer.chat_template"
            )
        of_tokenizer = _TEMPLATES.setdefault(tokenizer, {})
        key = (template, json.dumps(variables, sort_keys=True, default=str) if variables else "")
        if key not in of_tokenizer:
            of_tokenizer[key] = cls(template, {**tokenizer.special_tokens_map, **(variables or {})})
        return of_tokenizer[key]

    def render(self, messages: Sequence[Message], tools: Tools = None, *, add_generation_prompt: bool = False) -> str:
        """The text of normalised `messages`.

        Raises:
            UserError: the template can't be compiled or refuses the conversation, with its reason.
        """
        return self._render(messages, tools, add_generation_prompt=add_generation_prompt)[0]

    def check_syntax(self) -> None:
        """Compile the template.

        Raises:
            UserError: it has a syntax error; names the line.
        """
        try:
            self._render_as_given([_QUESTION])
        except UserError as error:
            # A template that compiles may still refuse this conversation.
            if isinstance(error.__cause__, jinja2.TemplateSyntaxError):
                raise

    def render_with_turns(self, messages: Sequence[Message], tools: Tools = None) -> tuple[str, list[list[Span]]]:
        """The text, and for each assistant turn its spans in that text: none if the template leaves the turn out.

        Raises:
            UserError: as `render`; or the place of an assistant turn can't be told for certain.
        """
        num_turns = sum(message["role"] == "assistant" for message in messages)
        if not num_turns:
            return self.render(messages, tools), []
        lead = self._marked_lead
        if lead is None:
            text = self.render(messages, tools)
            return text, [[turn] if turn else [] for turn in self._find_turns(text, messages, tools)]
        text, marked = self._render(messages, tools, track=True)
        starts = [start + len(lead) if text.startswith(lead, start) else start for start, _ in marked]
        spans = [self.style.fit(text, (start, end)) for start, (_, end) in zip(starts, marked, strict=True)]
        if len(spans) == num_turns:
            return text, [[span] for span in spans]
        # A template may mark several stretches of one turn, and none of a turn that it drops.
        turns = self._find_turns(text, messages, tools)
        return text, [[span for span in spans if turn and span[0] < turn[1] and span[1] > turn[0]] for turn in turns]

    @cached_property
    def style(self) -> TurnStyle:
        """What stands around an assistant turn, learnt from renders of a made-up one.

        Raises:
            UserError: the template can't render a question followed by an answer.
        """
        mark = unused_mark(self._template)
        answer: Message = {"role": "assistant", "content": mark}
        last = self.render([*self._opening, answer]).split(mark)
        inner = self.render([*self._opening, answer, _QUESTION]).split(mark)
        if len(last) != 2 or len(inner) != 2:
            raise UserError("the chat template doesn't show the content of an assistant turn exactly once")
        before, after = last
        closing, tags = "", _TAG_OR_WORD.findall(after)
        for tag in tags:
            if not inner[1].startswith(closing + tag):
                break
            closing += tag
        asked = self.render(self._opening)
        prompt = self.render(self._opening, add_generation_prompt=True)
        shared = shared_length(before, prompt)
        if prompt == asked or shared < len(asked):
            # The template ignores the wish for a generation prompt: all that it adds before the words is header.
            prompt, shared = before, len(before)
        return TurnStyle(
            header=before[len(asked) : shared] if before.startswith(asked) else "",
            forced=before[shared:],
            prompted=prompt[shared:],
            closing=closing,
            final_closing="".join(tags),
        )

    @cached_property
    def _opening(self) -> list[Message]:
        """Made-up turns before an answer: a user turn, after a system turn where the template demands one."""
        return [_QUESTION] if self._try([_QUESTION]) is not None else [_SYSTEM, _QUESTION]

    @cached_property
    def _marked_lead(self) -> str | None:
        """What the generation markers take in of the header, normally nothing; None without markers that work.

        The tracking measures finished output, so that a marker inside a macro reports a wrong place; such a template
        counts as one without markers.
        """
        if not _GENERATION.search(self._template):
            return None
        mark = unused_mark(self._template)
        text, spans = self._render_as_given([*self._opening, {"role": "assistant", "content": mark}], track=True)
        for start, end in spans:
            before, found, _ = text[start:end].partition(mark)
            if found:
                return self.style.header if before.startswith(self.style.header) else ""
        return None

    @cached_property
    def _wants_text_arguments(self) -> bool:
        """Whether tool arguments must be JSON text: a mapping raises, or is shown as Python would print it."""
        mapping = {"k": "v"}
        call = {"id": "callabcde", "type": "function", "function": {"name": "f", "arguments": mapping}}
        turns: list[Message] = [*self._opening, {"role": "assistant", "content": "", "tool_calls": [call]}]
        if (shown := self._try(turns)) is not None and str(mapping) not in shown:
            return False
        shown = self._try(_with_text_arguments(turns))
        return shown is not None and json.dumps(mapping) in shown

    def _try(self, messages: Sequence[Message]) -> str | None:
        try:
            return self._render_as_given(messages)[0]
        except UserError:
            return None

    def _find_turns(self, text: str, messages: Sequence[Message], tools: Tools) -> list[Span | None]:
        def render(messages: Sequence[Message], *, add_generation_prompt: bool = False) -> str:
            return self.render(messages, tools, add_generation_prompt=add_generation_prompt)

        return find_turns(text, messages, render, self.style)

    def _render(
        self, messages: Sequence[Message], tools: Tools, *, track: bool = False, add_generation_prompt: bool = False
    ) -> tuple[str, list[Span]]:
        if any("tool_calls" in message for message in messages) and self._wants_text_arguments:
            messages = _with_text_arguments(messages)
        return self._render_as_given(messages, tools, track=track, add_generation_prompt=add_generation_prompt)

    def _render_as_given(
        self,
        messages: Sequence[Message],
        tools: Tools = None,
        *,
        track: bool = False,
        add_generation_prompt: bool = False,
    ) -> tuple[str, list[Span]]:
        """The text and, with `track`, the spans that generation markers report."""
        try:
            # Its annotation says str; it returns texts and spans, one of each per conversation.
            rendered: Any = render_jinja_template(
                [list(messages)],
                tools=list(tools) if tools else None,
                chat_template=self._template,
                return_assistant_tokens_mask=track,
                add_generation_prompt=add_generation_prompt,
                **self._variables,
            )
        except jinja2.TemplateSyntaxError as error:
            raise UserError(f"the chat template has a syntax error in line {error.lineno}: {error.message}") from error
        # A template is a small program: besides its own refusals it fails as programs do, on types and lookups.
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            raise UserError(f"the chat template refuses the conversation: {error}") from error
        texts, spans = rendered
        return texts[0], spans[0] if track else []


_TEMPLATES: WeakKeyDictionary[PreTrainedTokenizerBase, dict[tuple[str, str], ChatTemplate]] = WeakKeyDictionary()


def _with_text_arguments(messages: Sequence[Message]) -> list[Message]:
    return [
        {**message, "tool_calls": [_with_text_argument(call) for call in message["tool_calls"]]}
        if "tool_calls" in message
        else message
        for message in messages
    ]


def _with_text_argument(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}

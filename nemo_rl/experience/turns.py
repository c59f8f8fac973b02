"""Between tokens and turns: the text of a response, and the tokens that an observation adds to the context."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from nemo_rl.data.chat_template import ChatTemplate
from nemo_rl.data.conversation import Message, normalize_messages
from nemo_rl.data.prompts import Prompt
from nemo_rl.data.turn_spans import unused_mark
from nemo_rl.utils.errors import UserError


class TurnTokens:
    """Tokens are only ever added: a drawn token is never rendered or tokenized again.

    Args:
        template: as in `PromptDataConfig.template`.
        stop_token_ids: what ends a response.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        template: str,
        stop_token_ids: Sequence[int],
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ):
        self._tokenizer = tokenizer
        self._stop_token_ids = frozenset(stop_token_ids)
        self._chat = ChatTemplate.of(tokenizer, chat_template_kwargs) if template == "chat" else None

    def response_text(self, token_ids: Sequence[int]) -> str:
        """The text of drawn tokens, without a stop token at the end and without special tokens."""
        return self._decode(token_ids[:-1] if self._stopped(token_ids) else token_ids, skip_special_tokens=True)

    def observation_ids(
        self, prompt: Prompt, messages: Sequence[Message], observation: Sequence[Message], response_ids: Sequence[int]
    ) -> list[int]:
        """What follows the last response up to the next one: its closing tag where it was not drawn, the observation,
        the generation prompt. Of a text prompt only the observation's text.

        Args:
            messages: the conversation, the last response as its last turn.
            response_ids: the tokens of that response.

        Raises:
            UserError: the template refuses the conversation, or does not show an assistant turn exactly once.
        """
        turns = normalize_messages(list(observation))
        if self._chat is None:
            return self._encode("".join(turn["content"] for turn in turns))
        history = list(messages[:-1])
        mark = unused_mark("".join(str(turn) for turn in (*history, *turns)))
        answer: Message = {"role": "assistant", "content": mark}
        text = self._chat.render([*history, answer, *turns], prompt.tools or None, add_generation_prompt=True)
        _, found, after = text.partition(mark)
        if not found or mark in after:
            raise UserError("the chat template doesn't show the content of an assistant turn exactly once")
        if self._stopped(response_ids):
            after = after.removeprefix(self._decode(response_ids[-1:], skip_special_tokens=False))
        return self._encode(after)

    def _stopped(self, token_ids: Sequence[int]) -> bool:
        return bool(token_ids) and token_ids[-1] in self._stop_token_ids

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer(text, add_special_tokens=False, return_attention_mask=False)["input_ids"]

    def _decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        # Its annotation allows a list of texts, which only a list of lists gives.
        text: Any = self._tokenizer.decode(
            list(token_ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return text


def default_stop_token_ids(tokenizer: PreTrainedTokenizerBase, template: str) -> tuple[int, ...]:
    """The EOS token and, for chat prompts, the tag that closes an assistant turn where that is one token.

    Raises:
        UserError: there is neither.
    """
    ids = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
    if template == "chat":
        closing = ChatTemplate.of(tokenizer).style.closing
        tag = tokenizer(closing, add_special_tokens=False)["input_ids"] if closing else []
        if len(tag) == 1 and tag[0] not in ids:
            ids.append(tag[0])
    if not ids:
        raise UserError("policy.tokenizer: no EOS token, so nothing ends a response; give generation a stop token")
    return tuple(ids)

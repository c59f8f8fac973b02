"""Prompts of a PPO run: a JSON Lines file, the ids of each prompt, the gold answer, and the order of a pass.

A row is read in one of three shapes; the first that fits is taken.

- `messages_field`, or a list under `messages`: the conversation so far. A last assistant turn is no part of the prompt
  but the gold answer.
- `prompt_field` with `answer_field`.
- `question` or `prompt`, with `answer`.

An answer field, where there is one, is stronger than a last assistant turn. The remaining fields of the row go to the
reward as `extra`.
"""

from __future__ import annotations

import logging
import random
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, model_validator

from nemo_rl.data.conversation import SYSTEM_ROLES, Message, to_conversation
from nemo_rl.data.energon.index import JsonlReader, ensure_index, parse_row, source_id
from nemo_rl.utils.config import ConfigModel
from nemo_rl.utils.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

PROMPT_FIELDS = ("question", "prompt")
ANSWER_FIELD = "answer"
_INDEX_CACHE = "~/.cache/onehop"
_LOGGED_ROWS = 5
_ROWS_TOKENIZED_TOGETHER = 256

PromptDropReason = Literal["bad_line", "bad_row", "no_gold", "overlong"]


class PromptDataConfig(ConfigModel):
    """Where prompts come from: `data.train` and `data.validation` of a PPO run."""

    path: str = Field(min_length=1)
    """A `.jsonl` file."""
    prompt_field: str | None = None
    """The field with the prompt's text; null looks for `messages`, `question` and `prompt`, in this order."""
    answer_field: str | None = None
    """The field with the gold answer, which every row must have; null takes `answer` where there is one."""
    messages_field: str | None = None
    """The field with a list of chat turns; its last assistant turn, if it ends with one, is the gold answer."""
    system_prompt: str | None = None
    """A system turn for rows that bring none; for `template: chat`."""
    template: Literal["chat", "text"] = "chat"
    """`chat` renders the tokenizer's chat template with its generation prompt; `text` takes the text of the prompt as
    it is, for base and character models."""
    limit: int | None = Field(default=None, ge=1)
    """Use the first rows only."""

    @model_validator(mode="after")
    def _one_shape(self) -> PromptDataConfig:
        if self.messages_field is not None and self.prompt_field is not None:
            raise ValueError("has both messages_field and prompt_field: keep one")
        if self.template == "text" and self.messages_field is not None:
            raise ValueError("template: text has no use for messages_field: name a prompt_field or take template: chat")
        if self.template == "text" and self.system_prompt is not None:
            raise ValueError("template: text has no place for system_prompt: write it into the prompts")
        return self


class RLDataConfig(ConfigModel):
    """The `data` section of a PPO run."""

    train: PromptDataConfig
    """The prompts that are trained on."""
    validation: PromptDataConfig | None = None
    """The prompts of validation; null = no validation."""
    max_prompt_length: int | None = Field(default=None, ge=1)
    """The longest prompt, in tokens; longer ones are left out and counted. null = whatever leaves room for a token."""
    shuffle: bool = True
    """Training prompts come in a new order each pass."""
    add_bos: bool = False
    """Start a prompt with exactly one BOS token, also where the template does not write it."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Extra variables for the chat template, such as `enable_thinking`."""

    @model_validator(mode="after")
    def _one_template(self) -> RLDataConfig:
        if self.validation is not None and self.validation.template != self.train.template:
            raise ValueError(
                f"train.template is {self.train.template} and validation.template {self.validation.template}: "
                "make them the same"
            )
        return self


@dataclass(frozen=True)
class Prompt:
    """One prompt.

    Attributes:
        index: its number among the usable prompts.
        source_id: the row's own `id`, else `<file>:<line>`.
        messages: the turns; of a text prompt one user turn.
        text: what was tokenized.
        prompt_ids: [P] tokens.
        gold: the gold answer as it stands in the row; None where it has none.
        extra: the row's other fields.
        tools: JSON schemas of the tools that the template lists.
    """

    index: int
    source_id: str
    messages: tuple[Message, ...]
    text: str
    prompt_ids: tuple[int, ...]
    gold: Any = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    tools: tuple[dict[str, Any], ...] = ()


def prompt_order(num_prompts: int, *, epoch: int, seed: int, shuffle: bool) -> list[int]:
    """The prompts of one pass, each once; the same for the same arguments in any process."""
    order = list(range(num_prompts))
    if shuffle:
        random.Random(f"{seed}/{epoch}").shuffle(order)
    return order


class PromptDataset:
    """The usable prompts of a file, read on demand.

    The file is indexed and every row is looked at once, when the object is made. Rows that cannot be used are left
    out, counted in `counts` by reason and, the first ones, logged with file and line. Lines are counted from 0.

    Args:
        tokenizer: without one, nothing is rendered and no length is known: enough to count rows, not for `row`.
        max_prompt_length: longest prompt in tokens; None = any.
        needs_gold: rows without a gold answer cannot be used.
        chat_template_kwargs: further variables of the template.
        add_bos: begin with exactly one BOS token; no effect without one.
        key: the config section that messages name.

    Raises:
        UserError: no such file, no `.jsonl`, no usable row; names the first row that could not be used and why.
    """

    def __init__(
        self,
        config: PromptDataConfig,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        max_prompt_length: int | None = None,
        needs_gold: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_bos: bool = False,
        key: str = "data.train",
    ):
        self.config = config
        self.counts: Counter[str] = Counter()
        """Rows left out, by `PromptDropReason`."""
        self._tokenizer = tokenizer
        self._max_prompt_length = max_prompt_length
        self._needs_gold = needs_gold
        self._template_kwargs = dict(chat_template_kwargs or {})
        self._add_bos = add_bos
        path = Path(config.path).expanduser().absolute()
        if not path.is_file():
            raise UserError(f"{key}.path: {config.path} does not exist or is no file")
        if path.suffix != ".jsonl":
            raise UserError(f"{key}.path: {config.path} has the suffix {path.suffix!r}: give a .jsonl file")
        index = ensure_index(path, Path(_INDEX_CACHE).expanduser())
        self._reader = JsonlReader(str(path), index.index_path, tuple(sorted([*index.bad_lines, *index.blank_lines])))
        self._rows = array("q")
        self._named: list[str] = []
        self.digest = index.digest
        """blake2b of the file's bytes, hex."""
        for line, reason in index.bad_lines.items():
            self._leave_out("bad_line", f"{path.name}:{line}", reason)
        self._find_usable()
        self._report(path, key)

    def __len__(self) -> int:
        """The number of usable prompts."""
        return len(self._rows)

    def row(self, index: int) -> Prompt:
        """Prompt `index`, with its tokens.

        Raises:
            IndexError: there is no such prompt.
            RunError: the file has changed since it was indexed.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"prompt {index} of {len(self)} in {self.config.path}")
        where, row = self._read(self._rows[index])
        parts = self._parts(row)
        text = self._render(parts)
        return Prompt(
            index=index,
            source_id=source_id(row, where),
            messages=tuple(parts.messages),
            text=text,
            prompt_ids=tuple(self._tokenize([text])[0]),
            gold=parts.gold,
            extra=parts.extra,
            tools=tuple(parts.tools or ()),
        )

    def order(self, epoch: int, seed: int, shuffle: bool = True) -> list[int]:
        """See `prompt_order`."""
        return prompt_order(len(self), epoch=epoch, seed=seed, shuffle=shuffle)

    def _find_usable(self) -> None:
        texts: list[tuple[int, str, str]] = []
        for number in range(min(len(self._reader), self.config.limit or len(self._reader))):
            where, row = self._read(number)
            try:
                parts = self._parts(row)
                text = self._render(parts) if self._tokenizer is not None else ""
            except UserError as error:
                self._leave_out("bad_row", where, str(error))
                continue
            if self._needs_gold and parts.gold is None:
                self._leave_out("no_gold", where, f"row has no gold answer; it has {', '.join(row)}")
                continue
            texts.append((number, where, text))
            if len(texts) == _ROWS_TOKENIZED_TOGETHER:
                self._keep_fitting(texts)
                texts = []
        self._keep_fitting(texts)

    def _keep_fitting(self, texts: Sequence[tuple[int, str, str]]) -> None:
        if self._tokenizer is None:
            self._rows.extend(number for number, _, _ in texts)
            return
        ids = self._tokenize([text for _, _, text in texts]) if texts else []
        for (number, where, _), row_ids in zip(texts, ids, strict=True):
            if not row_ids:
                self._leave_out("bad_row", where, "the prompt has no tokens")
            elif self._max_prompt_length is not None and len(row_ids) > self._max_prompt_length:
                self._leave_out("overlong", where, f"{len(row_ids)} tokens, {self._max_prompt_length} are allowed")
            else:
                self._rows.append(number)

    def _leave_out(self, reason: PromptDropReason, where: str, why: str) -> None:
        self.counts[reason] += 1
        if len(self._named) < _LOGGED_ROWS:
            self._named.append(f"{where} ({reason}): {why}")

    def _report(self, path: Path, key: str) -> None:
        if not self._rows:
            why = f"; {self._named[0]}" if self._named else ", it is empty"
            raise UserError(f"{key}.path: {path} has no usable prompt{why}")
        if self.counts:
            counted = ", ".join(f"{count} {reason}" for reason, count in self.counts.items())
            log.warning("%s: left out %s; the first: %s", path, counted, " | ".join(self._named))

    def _read(self, number: int) -> tuple[str, dict[str, Any]]:
        raw = self._reader[number]
        return raw["where"], parse_row(raw["json"])

    def _parts(self, row: Mapping[str, Any]) -> _Parts:
        name, messages = self._messages(row)
        gold = None
        if messages[-1]["role"] == "assistant":
            gold = messages[-1]["content"]
            messages = messages[:-1]
            if all(message["role"] in SYSTEM_ROLES for message in messages):
                raise UserError(f"{name} has nothing before its last assistant turn")
        answer = self.config.answer_field or ANSWER_FIELD
        if answer in row:
            gold = row[answer]
        elif self.config.answer_field is not None:
            raise UserError(f"row has no field {answer}; it has {', '.join(row) or 'no fields'}")
        conversation = to_conversation({"messages": messages, "tools": row.get("tools")})
        turns = list(conversation.messages)
        if self.config.system_prompt is not None and turns[0]["role"] not in SYSTEM_ROLES:
            turns.insert(0, {"role": "system", "content": self.config.system_prompt})
        extra = {key: value for key, value in row.items() if key not in (name, answer)}
        return _Parts(turns, conversation.tools, gold, extra)

    def _messages(self, row: Mapping[str, Any]) -> tuple[str, list[Message]]:
        for name in self._candidates():
            if name in row:
                if name in ("messages", self.config.messages_field) and name != self.config.prompt_field:
                    return name, to_conversation({"messages": row[name]}).messages
                if not isinstance(row[name], str):
                    raise UserError(f"{name} is not text")
                return name, [{"role": "user", "content": row[name]}]
        wanted = " or ".join(self._candidates())
        raise UserError(f"row has no field {wanted}; it has {', '.join(row) or 'no fields'}")

    def _candidates(self) -> Iterator[str]:
        named = self.config.messages_field or self.config.prompt_field
        if named is not None:
            yield named
            return
        if self.config.template == "chat":
            yield "messages"
        yield from PROMPT_FIELDS

    def _render(self, parts: _Parts) -> str:
        tokenizer = self._tokenizer
        if tokenizer is None:
            raise ValueError("this dataset was opened without a tokenizer; it can count rows only")
        if self.config.template == "text":
            text = parts.messages[-1]["content"]
        else:
            # Imported here because counting and ordering prompts must not cost the import of a tokenizer library.
            from nemo_rl.data.chat_template import ChatTemplate

            template = ChatTemplate.of(tokenizer, self._template_kwargs)
            text = template.render(parts.messages, parts.tools, add_generation_prompt=True)
        try:
            text.encode()
        # A JSON escape can spell half a surrogate pair, which is no character and has no UTF-8 form.
        except UnicodeEncodeError as error:
            raise UserError(f"the text isn't valid Unicode: {error}") from None
        bos = tokenizer.bos_token
        return bos + text if self._add_bos and bos and not text.lstrip().startswith(bos) else text

    def _tokenize(self, texts: list[str]) -> list[list[int]]:
        assert self._tokenizer is not None
        return self._tokenizer(texts, add_special_tokens=False, return_attention_mask=False)["input_ids"]


@dataclass(frozen=True)
class _Parts:
    messages: list[Message]
    tools: list[dict[str, Any]] | None
    gold: Any
    extra: dict[str, Any]

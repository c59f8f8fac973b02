"""Look at rows of a file as the trainer sees them: text, ids, and which tokens are trained."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from nemo_rl.data.conversation import ConversationFields, to_conversation
from nemo_rl.data.tokenize import DropReason, TokenizedConversation, fit_row, tokenize_conversation
from nemo_rl.utils.errors import UserError

_TRAINED, _CONTEXT, _DROPPED = "bold green", "dim", "bold red"


@dataclass(frozen=True)
class InspectedRow:
    """One line of a file after chat template, tokenizer and length limit.

    Attributes:
        row: 0-based line of the file, blank and bad lines counted.
        source_id: the row's `id` as text, else `<file name>:<row>`.
        ids: the token ids [S] that a run would use; of a dropped row as far as it got.
        trained_positions: 0-based positions of the trained tokens in `ids`.
        stretches: the text in pieces that are trained (True) or context (False) throughout.
        dropped: the reason why a run leaves the row out, else None.
        detail: what was wrong, where `dropped` names an error.
    """

    row: int
    source_id: str
    ids: tuple[int, ...] = ()
    trained_positions: tuple[int, ...] = ()
    stretches: tuple[tuple[str, bool], ...] = ()
    dropped: str | None = None
    detail: str | None = None

    @property
    def tokens(self) -> int:
        """The number of tokens."""
        return len(self.ids)

    @property
    def trained(self) -> int:
        """The number of trained tokens."""
        return len(self.trained_positions)


def inspect_rows(
    path: str | Path,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int | None = None,
    only_unmask_final: bool = False,
    row: int | None = None,
    cooker_options: Mapping[str, str | None] | None = None,
) -> Iterator[InspectedRow]:
    """The rows of a JSONL file in file order, or only the one of line `row`; blank lines are passed over.

    Rows with a fault are yielded with the reason that a run would count them under.

    Args:
        path: the file; only read, never indexed.
        tokenizer: a fast tokenizer with a chat template.
        max_length: tokens; longer rows are truncated as in a run. None keeps them whole.
        only_unmask_final: train the last assistant turn only.
        row: a 0-based line.
        cooker_options: the options of the conversation cooker, see `ConversationFields`.

    Raises:
        UserError: no such file, no such row, or unknown options.
    """
    file_path = Path(path)
    if not file_path.is_file():
        what = "is a folder, a .jsonl file is needed" if file_path.is_dir() else "does not exist"
        raise UserError(f"{path} {what}")
    unknown = set(cooker_options or ()) - set(ConversationFields.__dataclass_fields__)
    if unknown:
        raise UserError(f"cooker options {', '.join(sorted(unknown))} are unknown")
    fields = ConversationFields(**(cooker_options or {}))
    return _inspect(file_path, tokenizer, max_length, only_unmask_final, row, fields)


def render_row(console: Console, row: InspectedRow) -> None:
    """Show a row: a line of facts, the text, the ids; trained tokens in green, or in ⟦ ⟧ where there is no colour."""
    facts = Text(f"row {row.row}  {_visible(row.source_id)}  {row.tokens} tokens, {row.trained} trained", style="bold")
    if row.dropped is not None:
        facts.append(f"  dropped: {row.dropped}", style=_DROPPED)
        if row.detail:
            facts.append(f" ({_visible(row.detail)})")
    console.print(facts, soft_wrap=True)
    if not row.ids:
        return
    opening, closing = ("⟦", "⟧") if console.color_system is None else ("", "")
    text, ids = Text(), Text("ids", style="bold")
    for stretch, trained in row.stretches:
        shown = _visible(stretch).replace("\n", "↵\n")
        text.append(f"{opening}{shown}{closing}" if trained else shown, style=_TRAINED if trained else _CONTEXT)
    trained_positions = set(row.trained_positions)
    for position, token_id in enumerate(row.ids):
        trained = position in trained_positions
        ids.append(f" {opening}{token_id}{closing}" if trained else f" {token_id}", _TRAINED if trained else _CONTEXT)
    console.print(text, soft_wrap=True)
    console.print(ids, soft_wrap=True)


def _inspect(
    path: Path,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int | None,
    only_unmask_final: bool,
    wanted: int | None,
    fields: ConversationFields,
) -> Iterator[InspectedRow]:
    number = -1
    with path.open("rb") as file:  # as bytes, so that lines end at LF only: U+2028 and its kin are data
        for number, line in enumerate(file):
            if (wanted is None and line.strip()) or number == wanted:
                yield _inspect_line(
                    f"{path.name}:{number}", number, line, tokenizer, max_length, only_unmask_final, fields
                )
            if number == wanted:
                return
    if wanted is not None:
        raise UserError(
            f"{path} has no row {wanted}; its rows are 0 to {number}" if number >= 0 else f"{path} is empty"
        )


def _inspect_line(
    source_id: str,
    number: int,
    line: bytes,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int | None,
    only_unmask_final: bool,
    fields: ConversationFields,
) -> InspectedRow:
    def dropped(reason: DropReason, detail: object) -> InspectedRow:
        return InspectedRow(number, source_id, dropped=reason.value, detail=str(detail))

    try:
        raw: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        return dropped(DropReason.BAD_LINE, error)
    if not isinstance(raw, dict):
        return dropped(DropReason.BAD_LINE, "not an object")
    if raw.get("id") is not None:
        source_id = str(raw["id"])
    try:
        conversation = to_conversation(raw, fields)
    except UserError as error:
        return dropped(DropReason.COOK_ERROR, error)
    try:
        encoded = tokenize_conversation(
            tokenizer, conversation.messages, tools=conversation.tools, only_unmask_final=only_unmask_final
        )
    except UserError as error:
        return dropped(DropReason.ENCODE_ERROR, error)
    fitted = fit_row(encoded, len(encoded) if max_length is None else max_length)
    kept, reason = (encoded.cut(0, max_length), fitted) if isinstance(fitted, DropReason) else (fitted[0], None)
    return InspectedRow(
        number,
        source_id,
        ids=tuple(kept.input_ids),
        trained_positions=tuple(position for position, trained in enumerate(kept.token_mask) if trained),
        stretches=_stretches(tokenizer, kept),
        dropped=reason.value if reason else None,
    )


def _stretches(tokenizer: PreTrainedTokenizerBase, row: TokenizedConversation) -> tuple[tuple[str, bool], ...]:
    """The ids of each run of equal mask turned back into text, so that what is shown is what is trained."""
    runs = groupby(zip(row.input_ids, row.token_mask, strict=True), key=lambda token: token[1])
    return tuple(
        (str(tokenizer.decode([token_id for token_id, _ in run], clean_up_tokenization_spaces=False)), bool(trained))
        for trained, run in runs
    )


def _visible(text: str) -> str:
    """`text` with control and invisible characters spelt out: a row must not be able to steer the terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)

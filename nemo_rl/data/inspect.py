"""Look at rows of a file as the trainer sees them: text, ids, and which tokens are trained."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from nemo_rl.data.conversation import ConversationFields, to_conversation
from nemo_rl.data.energon.index import parse_row, source_id
from nemo_rl.data.tokenize import DropReason, LongRowPolicy, TokenizedConversation, fit_row, tokenize_conversation
from nemo_rl.utils.errors import UserError

_TRAINED, _CONTEXT, _DROPPED = "bold green", "dim", "bold red"


@dataclass(frozen=True)
class InspectOptions:
    """How a run would read the rows; the names and defaults are those of its config.

    Attributes:
        max_length: tokens; None keeps longer rows whole.
        overlong: what happens to longer rows, see `fit_row`.
        only_unmask_final: train the last assistant turn only.
        add_bos: begin with one BOS token, see `tokenize_conversation`.
        add_eos: end with the EOS token, see there.
        chat_template_kwargs: further variables of the chat template.
        fields: the options of the conversation cooker.
    """

    max_length: int | None = None
    overlong: LongRowPolicy = "truncate"
    only_unmask_final: bool = False
    add_bos: bool = False
    add_eos: bool = False
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    fields: ConversationFields = field(default_factory=ConversationFields)


@dataclass(frozen=True)
class InspectedRow:
    """One line of a file after chat template, tokenizer and length limit, or a piece of one that was split.

    Attributes:
        row: 0-based line of the file, blank and bad lines counted.
        source_id: the row's `id` as text, else `<file name>:<row>`.
        ids: the token ids [S] that a run would use; of a dropped row as far as it got.
        trained_positions: 0-based positions of the trained tokens in `ids`.
        stretches: the text in pieces that are trained (True) or context (False) throughout.
        dropped: the reason why a run leaves the row out, else None.
        detail: what was wrong, where `dropped` names an error.
        piece: 0-based number of the piece.
    """

    row: int
    source_id: str
    ids: tuple[int, ...] = ()
    trained_positions: tuple[int, ...] = ()
    stretches: tuple[tuple[str, bool], ...] = ()
    dropped: str | None = None
    detail: str | None = None
    piece: int = 0

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
    options: InspectOptions | None = None,
    *,
    row: int | None = None,
) -> Iterator[InspectedRow]:
    """The rows of a JSONL file in file order, or only the one of line `row`; blank lines are passed over.

    Rows with a fault are yielded with the reason that a run would count them under; a row that is split comes as its
    pieces.

    Args:
        path: the file; only read, never indexed.
        tokenizer: a fast tokenizer with a chat template.
        options: as the run has them.
        row: a 0-based line.

    Raises:
        UserError: no such file, or no such row.
    """
    file_path = Path(path)
    if not file_path.is_file():
        what = "is a folder, a .jsonl file is needed" if file_path.is_dir() else "does not exist"
        raise UserError(f"{path} {what}")
    return _inspect(file_path, tokenizer, options or InspectOptions(), row)


def render_row(console: Console, row: InspectedRow) -> None:
    """Show a row: a line of facts, the text, the ids; trained tokens in green, or in ⟦ ⟧ where there is no colour."""
    place = f"row {row.row}" if not row.piece else f"row {row.row} piece {row.piece}"
    facts = Text(f"{place}  {_visible(row.source_id)}  {row.tokens} tokens, {row.trained} trained", style="bold")
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
    path: Path, tokenizer: PreTrainedTokenizerBase, options: InspectOptions, wanted: int | None
) -> Iterator[InspectedRow]:
    number = -1
    with path.open("rb") as file:  # as bytes, so that lines end at LF only: U+2028 and its kin are data
        for number, line in enumerate(file):
            if (wanted is None and line.strip()) or number == wanted:
                yield from _inspect_line(f"{path.name}:{number}", number, line, tokenizer, options)
            if number == wanted:
                return
    if wanted is not None:
        raise UserError(
            f"{path} has no row {wanted}; its rows are 0 to {number}" if number >= 0 else f"{path} is empty"
        )


def _inspect_line(
    where: str, number: int, line: bytes, tokenizer: PreTrainedTokenizerBase, options: InspectOptions
) -> list[InspectedRow]:
    def dropped(reason: DropReason, detail: object) -> list[InspectedRow]:
        return [InspectedRow(number, name, dropped=reason.value, detail=str(detail))]

    name = where
    try:
        raw = parse_row(line)
    except ValueError as error:
        return dropped(DropReason.BAD_LINE, error)
    name = source_id(raw, where)
    try:
        conversation = to_conversation(raw, options.fields)
    except UserError as error:
        return dropped(DropReason.COOK_ERROR, error)
    try:
        encoded = tokenize_conversation(
            tokenizer,
            conversation.messages,
            tools=conversation.tools,
            chat_template_kwargs=options.chat_template_kwargs,
            only_unmask_final=options.only_unmask_final,
            add_bos=options.add_bos,
            add_eos=options.add_eos,
        )
    except UserError as error:
        return dropped(DropReason.ENCODE_ERROR, error)
    limit = len(encoded) if options.max_length is None else options.max_length
    reason, detail, pieces = None, None, [encoded.cut(0, limit)]
    try:
        fitted = fit_row(encoded, limit, options.overlong)
    except UserError as error:
        reason, detail = DropReason.OVERLONG, str(error)
    else:
        if isinstance(fitted, DropReason):
            reason = fitted
        else:
            pieces = fitted
    return [
        InspectedRow(
            number,
            name,
            ids=tuple(piece.input_ids),
            trained_positions=tuple(position for position, trained in enumerate(piece.token_mask) if trained),
            stretches=_stretches(tokenizer, piece),
            dropped=reason.value if reason else None,
            detail=detail,
            piece=index,
        )
        for index, piece in enumerate(pieces)
    ]


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

"""`onehop data`: index a data set, and look at rows as the trainer sees them."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from nemo_rl.utils.errors import UserError

app = typer.Typer(no_args_is_help=True, help="Index a data set, and look at rows as the trainer sees them.")

_BAD_LINES_SHOWN = 10


@app.command()
def prepare(
    path: Annotated[
        Path, typer.Argument(metavar="PATH", help="A .jsonl file, or a folder of .tar shards.", show_default=False)
    ],
    split: Annotated[str, typer.Option(help="Split of a folder of shards.")] = "train",
) -> None:
    """Write the row index of a data set and count its rows. A run does this by itself on first use."""
    from rich.console import Console

    from nemo_rl.cli.console import print_facts, print_line
    from nemo_rl.data.energon.config import EnergonSourceConfig
    from nemo_rl.data.energon.sources import prepare_source

    prepared = prepare_source(EnergonSourceConfig(path=str(path), split=split))
    console = Console()
    print_facts(
        console,
        {
            "rows": f"{prepared.rows:,}",
            "left out": f"{len(prepared.bad_lines):,} lines that hold no row",
            "index": prepared.index_path,
        },
    )
    for line, reason in list(prepared.bad_lines.items())[:_BAD_LINES_SHOWN]:
        print_line(console, f"  {path}:{line}: {reason}", style="yellow")
    if len(prepared.bad_lines) > _BAD_LINES_SHOWN:
        print_line(console, f"  and {len(prepared.bad_lines) - _BAD_LINES_SHOWN:,} more", style="yellow")


class Overlong(StrEnum):
    """The values of `data.overlong`."""

    TRUNCATE = "truncate"
    DROP = "drop"
    SPLIT = "split"
    FAIL = "fail"


@app.command()
def inspect(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A .jsonl file of chat rows.", show_default=False)],
    model: Annotated[str, typer.Option(help="Directory or hub name with the tokenizer.", show_default=False)],
    template: Annotated[
        Path | None, typer.Option(help="Chat template to use instead of the tokenizer's own.", show_default=False)
    ] = None,
    row: Annotated[int | None, typer.Option(min=0, help="Only this row, counted from 0.", show_default=False)] = None,
    max_length: Annotated[
        int | None, typer.Option(min=2, help="Longest row in tokens, as in a run.", show_default=False)
    ] = None,
    overlong: Annotated[Overlong, typer.Option(help="What happens to longer rows.")] = Overlong.TRUNCATE,
    only_unmask_final: Annotated[
        bool, typer.Option("--only-unmask-final", help="Train the last assistant turn only.")
    ] = False,
    add_bos: Annotated[bool, typer.Option("--add-bos", help="Start rows with exactly one BOS token.")] = False,
    add_eos: Annotated[bool, typer.Option("--add-eos", help="End rows with the EOS token.")] = False,
    template_kwargs: Annotated[
        str, typer.Option(metavar="JSON", help="Further variables of the chat template, as a JSON object.")
    ] = "{}",
    messages_field: Annotated[
        str | None, typer.Option(help="Field with the turns, where it isn't `messages`.", show_default=False)
    ] = None,
    prompt_field: Annotated[
        str | None, typer.Option(help="Field with the user's text; with --completion-field.", show_default=False)
    ] = None,
    completion_field: Annotated[
        str | None, typer.Option(help="Field with the assistant's text.", show_default=False)
    ] = None,
    system_prompt: Annotated[
        str | None, typer.Option(help="System turn for rows that bring none.", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per row.")] = False,
) -> None:
    """Show text, token ids and the trained tokens of chat rows in colour."""
    from rich.console import Console

    from nemo_rl.data.conversation import ConversationFields
    from nemo_rl.data.inspect import InspectOptions, inspect_rows, render_row
    from nemo_rl.data.tokenizer import get_tokenizer

    options = InspectOptions(
        max_length=max_length,
        overlong=overlong.value,
        only_unmask_final=only_unmask_final,
        add_bos=add_bos,
        add_eos=add_eos,
        chat_template_kwargs=_json_object("--template-kwargs", template_kwargs),
        fields=ConversationFields(messages_field, prompt_field, completion_field, system_prompt),
    )
    tokenizer = get_tokenizer({"name": model, "chat_template": None if template is None else str(template)})
    console = Console()
    for inspected in inspect_rows(path, tokenizer, options, row=row):
        if not as_json:
            render_row(console, inspected)
            continue
        record = {
            "row": inspected.row,
            "piece": inspected.piece,
            "tokens": inspected.tokens,
            "trained": inspected.trained,
            "trained_positions": list(inspected.trained_positions),
            "ids": list(inspected.ids),
            "dropped": inspected.dropped,
            "detail": inspected.detail,
        }
        typer.echo(json.dumps(record))


def _json_object(switch: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise UserError(f"{switch}: {text} is not a JSON object such as '{{\"enable_thinking\": false}}'")
    return value

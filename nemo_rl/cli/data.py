"""`onehop data`: index a data set, and look at rows as the trainer sees them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

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


@app.command()
def inspect(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A .jsonl file of chat rows.", show_default=False)],
    model: Annotated[str, typer.Option(help="Directory or hub name with the tokenizer.", show_default=False)],
    template: Annotated[
        Path | None, typer.Option(help="Chat template to use instead of the tokenizer's own.", show_default=False)
    ] = None,
    row: Annotated[int | None, typer.Option(min=0, help="Only this row, counted from 0.", show_default=False)] = None,
    max_length: Annotated[
        int | None, typer.Option(min=2, help="Cut rows to this many tokens, as a run does.", show_default=False)
    ] = None,
    only_unmask_final: Annotated[
        bool, typer.Option("--only-unmask-final", help="Train the last assistant turn only.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per row.")] = False,
) -> None:
    """Show text, token ids and the trained tokens of chat rows in colour."""
    from rich.console import Console

    from nemo_rl.data.inspect import inspect_rows, render_row
    from nemo_rl.data.tokenizer import get_tokenizer

    tokenizer = get_tokenizer({"name": model, "chat_template": None if template is None else str(template)})
    console = Console()
    rows = inspect_rows(path, tokenizer, max_length=max_length, only_unmask_final=only_unmask_final, row=row)
    for inspected in rows:
        if not as_json:
            render_row(console, inspected)
            continue
        record = {
            "row": inspected.row,
            "tokens": inspected.tokens,
            "trained": inspected.trained,
            "trained_positions": list(inspected.trained_positions),
            "ids": list(inspected.ids),
            "dropped": inspected.dropped,
        }
        typer.echo(json.dumps(record))

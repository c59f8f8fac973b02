"""`onehop sft`: fine-tune a model as a YAML file says, with a progress line and a summary."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer


def sft(
    context: typer.Context,
    config: Annotated[Path, typer.Option("--config", "-c", help="YAML file of the run.", show_default=False)],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Settings that win over the file: sft.max_num_steps=100"),
    ] = None,
) -> None:
    """Fine-tune a model on chat rows. A run that was cut resumes from its last checkpoint."""
    from rich.console import Console

    from nemo_rl.algorithms.sft_config import read_sft_config
    from nemo_rl.cli.console import err_console, print_facts
    from nemo_rl.cli.progress import ProgressLine

    debug = bool(context.find_root().params["debug"])
    run_config = read_sft_config(config, overrides or [])
    with ProgressLine(err_console()) as progress:
        # Under the spinner, because torch and Ray take seconds to import.
        from nemo_rl.algorithms.sft_run import train_sft

        summary = train_sft(run_config, on_progress=progress, debug=debug)
    print_facts(Console(), summary_facts(summary))


def summary_facts(summary: dict[str, Any]) -> dict[str, str]:
    """The lines printed after a run: what was trained, how it went, where its results are, what to do next."""
    facts = {"steps": f"{summary['steps']:,}"}
    first, last = summary.get("first_loss"), summary.get("last_loss")
    if first is not None and last is not None:
        facts["loss"] = f"{first:.4f} -> {last:.4f}"
    if summary.get("val_loss") is not None:
        facts["val loss"] = f"{summary['val_loss']:.4f}"
    if summary.get("tokens_per_s") is not None:
        facts["tokens/s"] = f"{summary['tokens_per_s']:,.0f}"
    dropped = {reason: count for reason, count in (summary.get("dropped") or {}).items() if count}
    if dropped:
        facts["dropped rows"] = ", ".join(f"{count:,} {reason}" for reason, count in sorted(dropped.items()))
    if summary.get("checkpoint_dir"):
        facts["checkpoint"] = f"{summary['checkpoint_dir']}   (onehop export writes it for transformers)"
    if summary.get("log_dir"):
        facts["curves"] = f"onehop report {summary['log_dir']}"
    return facts

"""`onehop sft`: fine-tune a model as a YAML file says, with a progress line and a summary."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from nemo_rl.cli.training import Train, result_facts, train_with_progress


def sft(
    context: typer.Context,
    config: Annotated[Path, typer.Option("--config", "-c", help="YAML file of the run.", show_default=False)],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Settings that win over the file: sft.max_num_steps=100"),
    ] = None,
) -> None:
    """Fine-tune a model on chat rows. A run that was cut resumes from its last checkpoint."""
    from nemo_rl.algorithms.sft_config import read_sft_config

    train_with_progress(context, read_sft_config(config, overrides or []), _import_train, summary_facts)


def _import_train() -> Train:
    from nemo_rl.algorithms.sft_run import train_sft

    return train_sft


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
    return facts | result_facts(summary, "dropped rows")

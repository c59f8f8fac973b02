"""`onehop ppo`: improve a model by its own samples, as a YAML file says; PPO with a critic, or GRPO."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from nemo_rl.cli.training import Train, result_facts, train_with_progress


def ppo(
    context: typer.Context,
    config: Annotated[Path, typer.Option("--config", "-c", help="YAML file of the run.", show_default=False)],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Settings that win over the file: ppo.max_num_steps=100"),
    ] = None,
) -> None:
    """Train a model with PPO (or GRPO) on its own samples. A run that was cut resumes from its last checkpoint."""
    from nemo_rl.algorithms.single_controller_utils.config import read_single_controller_config

    train_with_progress(context, read_single_controller_config(config, overrides or []), _import_train, summary_facts)


def _import_train() -> Train:
    from nemo_rl.algorithms.single_controller_run import train_ppo

    return train_ppo


def summary_facts(summary: dict[str, Any]) -> dict[str, str]:
    """The lines printed after a run: what was trained, how it went, where its results are, what to do next."""
    facts = {"steps": f"{summary['steps']:,}, {summary['policy_updates']:,} updates of the policy"}
    first, last = summary.get("first_reward"), summary.get("last_reward")
    if first is not None and last is not None:
        facts["reward"] = f"{first:.3f} -> {last:.3f}"
    if summary.get("val_reward") is not None:
        facts["val reward"] = f"{summary['val_reward']:.3f}"
    if summary.get("samples_per_s") is not None:
        facts["samples/s"] = f"{summary['samples_per_s']:,.1f}"
    return facts | result_facts(summary, "dropped")

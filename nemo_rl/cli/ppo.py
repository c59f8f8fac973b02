"""`onehop ppo`: improve a model by its own samples, as a YAML file says; PPO with a critic, or GRPO."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer


def ppo(
    context: typer.Context,
    config: Annotated[Path, typer.Option("--config", "-c", help="YAML file of the run.", show_default=False)],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Settings that win over the file: ppo.max_num_steps=100"),
    ] = None,
) -> None:
    """Train a model with PPO (or GRPO) on its own samples. A run that was cut resumes from its last checkpoint."""
    from rich.console import Console

    from nemo_rl.algorithms.single_controller_utils.config import read_single_controller_config
    from nemo_rl.cli.console import err_console, print_facts
    from nemo_rl.cli.progress import ProgressLine

    debug = bool(context.find_root().params["debug"])
    run_config = read_single_controller_config(config, overrides or [])
    with ProgressLine(err_console()) as progress:
        # Under the spinner, because torch and Ray take seconds to import.
        from nemo_rl.algorithms.single_controller_run import train_ppo

        summary = train_ppo(run_config, on_progress=progress, debug=debug)
    print_facts(Console(), summary_facts(summary))


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
    dropped = {reason: count for reason, count in (summary.get("dropped") or {}).items() if count}
    if dropped:
        facts["dropped"] = ", ".join(f"{count:,} {reason}" for reason, count in sorted(dropped.items()))
    if summary.get("checkpoint_dir"):
        facts["checkpoint"] = f"{summary['checkpoint_dir']}   (onehop export writes it for transformers)"
    if summary.get("log_dir"):
        facts["curves"] = f"onehop report {summary['log_dir']}"
    return facts

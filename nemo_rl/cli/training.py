"""What the commands that train have in common: a progress line, then a summary."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import typer

Train = Callable[..., dict[str, Any]]


def train_with_progress(
    context: typer.Context,
    config: Any,
    import_train: Callable[[], Train],
    facts: Callable[[dict[str, Any]], dict[str, str]],
) -> None:
    """Runs what `import_train` gives with `config`, and prints the `facts` of its summary."""
    from rich.console import Console

    from nemo_rl.cli.console import err_console, print_facts
    from nemo_rl.cli.progress import ProgressLine

    debug = bool(context.find_root().params["debug"])
    with ProgressLine(err_console()) as progress:
        # Under the spinner, because torch and Ray take seconds to import.
        summary = import_train()(config, on_progress=progress, debug=debug)
    print_facts(Console(), facts(summary))


def result_facts(summary: dict[str, Any], dropped_name: str) -> dict[str, str]:
    """The last lines of a summary: what was dropped, where the results are, what to do next."""
    facts = {}
    dropped = {reason: count for reason, count in (summary.get("dropped") or {}).items() if count}
    if dropped:
        facts[dropped_name] = ", ".join(f"{count:,} {reason}" for reason, count in sorted(dropped.items()))
    if summary.get("checkpoint_dir"):
        facts["checkpoint"] = f"{summary['checkpoint_dir']}   (onehop export writes it for transformers)"
    if summary.get("log_dir"):
        facts["curves"] = f"onehop report {summary['log_dir']}"
    return facts

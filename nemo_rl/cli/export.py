"""`onehop export`: a checkpoint as a directory that `transformers` loads."""

from __future__ import annotations

import re
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from nemo_rl.utils.checkpoint_digests import find_damage
from nemo_rl.utils.errors import UserError


class Role(StrEnum):
    """A model of a PPO run; SFT and GRPO have the policy only."""

    POLICY = "policy"
    VALUE = "value"


_NAMED_FILES = 10
_STEP_DIR = re.compile(r"step_(\d+)")


def export(
    checkpoint: Annotated[
        Path,
        typer.Argument(
            metavar="CHECKPOINT",
            help="A checkpoint (.../step_20), or a folder of them: the newest.",
            show_default=False,
        ),
    ],
    out: Annotated[
        Path, typer.Argument(metavar="OUT", help="Directory to write; must be new or empty.", show_default=False)
    ],
    dtype: Annotated[str, typer.Option(help="Numbers of the weights: float32, bfloat16 or float16.")] = "bfloat16",
    role: Annotated[Role, typer.Option(help="Which model of a PPO run.")] = Role.POLICY,
) -> None:
    """Write a checkpoint's weights, config and tokenizer for transformers, vLLM and others."""
    step_dir = newest_step_dir(checkpoint)
    if damage := find_damage(step_dir):
        raise UserError(f"{step_dir} is damaged: {'; '.join(damage[:_NAMED_FILES])}. Export another step")

    from rich.console import Console
    from transformers.utils.logging import disable_progress_bar

    from nemo_rl.cli.console import print_line
    from nemo_rl.models.engine.export import export_hf

    disable_progress_bar()
    export_hf(step_dir, out, dtype, role.value)
    print_line(Console(), f"{step_dir} -> {out} ({dtype})")


def newest_step_dir(path: Path) -> Path:
    """`path` when it is a `step_N` directory, else the one inside with the highest N.

    Raises:
        UserError: there is none.
    """
    if not path.is_dir():
        raise UserError(f"no such directory: {path}")
    if _STEP_DIR.fullmatch(path.resolve().name):
        return path
    steps = {int(match[1]): entry for entry in path.iterdir() if (match := _STEP_DIR.fullmatch(entry.name))}
    if not steps:
        raise UserError(f"{path} holds no checkpoint (a directory step_N); give the run's checkpointing.checkpoint_dir")
    return steps[max(steps)]

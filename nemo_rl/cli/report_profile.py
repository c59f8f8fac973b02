"""The table of a report that says where the time of the profiled steps went."""

from __future__ import annotations

import json
from html import escape
from pathlib import Path

from nemo_rl.utils.phases import WAITING

# In the order of a step; phases that are not named here come before the last one.
_ORDER = (
    "load",
    "fetch",
    "inference",
    "write back",
    "packing",
    "forward attention",
    "forward layers",
    "head and loss",
    "backward",
    "gradient reduction",
    "clip",
    "optimizer",
    "validation",
    "save",
)


def profile_table(path: Path) -> str:
    """Seconds and share of each phase by role and rank, means over the profiled steps, as HTML; "" without any."""
    if not path.is_file():
        return ""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    steps = sorted({line["step"] for line in lines})
    columns: dict[tuple[str, int], dict[str, float]] = {}
    for line in lines:
        for rank, seconds in enumerate(line["ranks"]):
            column = columns.setdefault((line["role"], rank), {})
            for name, value in seconds.items():
                column[name] = column.get(name, 0.0) + value / len(steps)
    if not columns:
        return ""
    names = {name for column in columns.values() for name in column}
    others = sorted(names - {*_ORDER, WAITING})
    ordered = [name for name in (*_ORDER, *others, WAITING) if name in names]
    head = "".join(f"<th>{escape(role)} rank {rank}</th>" for role, rank in columns)
    body = "".join(
        f"<tr><td>{escape(name)}</td>" + "".join(_cell(column, name) for column in columns.values()) + "</tr>"
        for name in ordered
    )
    total = "".join(f"<td>{sum(column.values()):.3f} s</td>" for column in columns.values())
    which = f"step {steps[0]:,}" if len(steps) == 1 else f"{len(steps)} steps, {steps[0]:,} to {steps[-1]:,}, a step"
    return (
        f"<details open><summary>Where the time went: {which}</summary><div class='scroll'><table class='phases'>"
        f"<tr><th>phase</th>{head}</tr>{body}<tr><th>in all</th>{total}</tr></table></div></details>"
    )


def _cell(column: dict[str, float], name: str) -> str:
    seconds = column.get(name, 0.0)
    share = seconds / (sum(column.values()) or 1.0)
    kind = "part idle" if name == WAITING else "part"
    bar = f"<span class='bar'><i class='{kind}' style='width:{80 * share:.1f}px'></i></span>"
    return f"<td>{seconds:.3f} s, {share:.1%}{bar}</td>"

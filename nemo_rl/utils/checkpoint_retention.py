"""Which checkpoints stay."""

from __future__ import annotations

from collections.abc import Mapping


def steps_to_keep(
    metrics: Mapping[int, float | None],
    *,
    save_period: int,
    higher_is_better: bool,
    keep_top_k: int | None,
    keep_latest_k: int | None,
    keep_newest: bool = True,
) -> set[int]:
    """The steps whose checkpoints stay: the union of the rules below; all of them when neither limit is set.

    - the newest, when `keep_newest`;
    - of the periodic ones (`step % save_period == 0`) the best `keep_top_k`; all of them when that is None;
    - the newest `keep_latest_k` of any kind.

    Args:
        metrics: step -> ranking metric. None ranks last; equal ones rank by age, the newer first.
    """
    steps = sorted(metrics)
    if not steps or (keep_top_k is None and keep_latest_k is None):
        return set(steps)
    sign = 1.0 if higher_is_better else -1.0

    def rank(step: int) -> tuple[float, int]:
        value = metrics[step]
        return (float("-inf") if value is None else sign * value, step)

    periodic = sorted((step for step in steps if step % save_period == 0), key=rank, reverse=True)
    keep = set(periodic[:keep_top_k])
    if keep_latest_k is not None:
        keep.update(steps[-keep_latest_k:])
    if keep_newest:
        keep.add(steps[-1])
    return keep

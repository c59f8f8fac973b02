"""Groups of spans, to record some and not others."""

from __future__ import annotations

from enum import StrEnum


class RLSpanGroup(StrEnum):
    """What a span is about. `U_` marks umbrellas: spans that others lie under, also across processes."""

    U_JOB = "u_job"
    U_STEP = "u_step"
    POLICY_UPDATE = "policy_update"
    DATA_LOADING = "data_loading"
    VALIDATION = "validation"
    CHECKPOINT = "checkpoint"


_DEFAULT = frozenset({RLSpanGroup.U_JOB, RLSpanGroup.U_STEP, RLSpanGroup.POLICY_UPDATE})


def enabled_groups(text: str) -> frozenset[RLSpanGroup]:
    """The groups that `default`, `all` or a list of names with commas stands for. Raises `ValueError` otherwise."""
    if text == "default":
        return _DEFAULT
    if text == "all":
        return frozenset(RLSpanGroup)
    names = [name.strip().lower() for name in text.split(",")]
    unknown = sorted(set(names) - set(RLSpanGroup))
    if unknown:
        raise ValueError(f"expected default, all or names out of {', '.join(RLSpanGroup)}, got {', '.join(unknown)!r}")
    return frozenset(RLSpanGroup(name) for name in names)

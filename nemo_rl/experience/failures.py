"""What counts as a failure of a sample."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FailureKind = Literal["infra", "data"]


@dataclass(frozen=True)
class SampleFailure:
    """Why an attempt at a sample is worth nothing.

    Attributes:
        kind: whose limit it counts against.
        name: what is counted: `generation_error`, `generation_timeout`, `bad_logprobs`, `env_timeout`, `env_error`,
            `nonfinite_reward`, `prompt_too_long`.
        detail: one line.
    """

    kind: FailureKind
    name: str
    detail: str

    def __str__(self) -> str:
        return f"{self.name}: {self.detail}"


def environment_failure(error: BaseException) -> SampleFailure:
    """The failure that an exception of the environment means."""
    kind: FailureKind = "infra" if isinstance(error, OSError) else "data"
    lines = str(error).splitlines()
    return SampleFailure(kind, "env_error", f"{type(error).__name__}: {lines[0] if lines else ''}")

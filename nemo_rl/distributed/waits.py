"""Waiting for workers: always bounded, always for a stated reason, over at the first failure."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import ray
from ray import ObjectRef
from ray.exceptions import ActorDiedError, ActorUnavailableError, NodeDiedError, OutOfMemoryError, RayTaskError

from nemo_rl.utils.errors import ConfigError, PeerError, RunError, UserError

logger = logging.getLogger(__name__)

_REPORT_EVERY_S = 60.0

# When a worker dies, its peers fail in their collectives within milliseconds, sometimes before Ray has noticed the
# death. The wait looks on this long for the failure that explains the others.
_ROOT_CAUSE_S = 2.0

_DEATHS = (ActorDiedError, ActorUnavailableError, NodeDiedError, OutOfMemoryError)


@dataclass(frozen=True)
class _Failure:
    name: str
    error: Exception

    @property
    def cause(self) -> BaseException:
        return self.error.cause if isinstance(self.error, RayTaskError) else self.error

    @property
    def rank_of_blame(self) -> int:
        """0 for the failure that most likely caused the others."""
        if isinstance(self.error, _DEATHS):
            return 0
        if isinstance(self.cause, UserError):
            return 1
        return 3 if isinstance(self.cause, PeerError) else 2


def wait_for(refs: Sequence[ObjectRef], *, reason: str, timeout_s: float, names: Sequence[str]) -> list[Any]:
    """The results of `refs`, in their order.

    Args:
        reason: what is waited for, as it reads after "waiting for": `"training step 3"`.
        timeout_s: longest wait, in seconds.
        names: one name per ref, with rank and node, for messages: `"rank 1 (policy-1, pid 7 on 10.0.0.2)"`.

    Raises:
        UserError: a worker raised one; the text begins with the worker's name.
        RunError: a worker died or raised anything else, or the limit passed. The failure that explains the others is
            named first. Other workers may still be busy; their results are lost.
    """
    if len(names) != len(refs):
        raise ValueError(f"{len(refs)} refs and {len(names)} names")
    started = time.monotonic()
    since = datetime.now().astimezone()
    name_of = dict(zip(refs, names, strict=True))
    results: dict[ObjectRef, Any] = {}
    pending = list(name_of)
    next_report = _REPORT_EVERY_S
    while pending:
        waited = time.monotonic() - started
        if waited >= timeout_s:
            raise RunError(_timeout_message(reason, timeout_s, since, results, pending, name_of))
        if waited >= next_report:
            logger.warning("waiting for %s for %.0f s: %s", reason, waited, ", ".join(name_of[r] for r in pending))
            next_report += _REPORT_EVERY_S
        done, pending = ray.wait(pending, num_returns=1, timeout=min(timeout_s, next_report) - waited)
        if done and pending:
            # Whatever else has come by now, at once: the waits of many workers would take the square of their number.
            more, pending = ray.wait(pending, num_returns=len(pending), timeout=0)
            done += more
        failures = _collect(done, results, name_of)
        if failures:
            raise _explain(failures, pending, name_of, reason)
    return [results[ref] for ref in refs]


def _collect(done: list[ObjectRef], results: dict[ObjectRef, Any], name_of: dict[ObjectRef, str]) -> list[_Failure]:
    failures = []
    # All at once; one by one where any of them failed, since Ray then tells of the first only.
    with contextlib.suppress(Exception):
        results.update(zip(done, ray.get(done), strict=True))
        return failures
    for ref in done:
        try:
            results[ref] = ray.get(ref)
        except Exception as error:  # noqa: BLE001 - a worker may raise anything, and Ray adds its own kinds
            failures.append(_Failure(name_of[ref], error))
    return failures


def _explain(
    failures: list[_Failure], pending: list[ObjectRef], name_of: dict[ObjectRef, str], reason: str
) -> UserError | RunError:
    """The exception to raise for `failures`, after a short look at what else fails."""
    deadline = time.monotonic() + _ROOT_CAUSE_S
    while pending and min(failure.rank_of_blame for failure in failures) >= 2 and time.monotonic() < deadline:
        done, pending = ray.wait(pending, num_returns=1, timeout=max(0.0, deadline - time.monotonic()))
        failures += _collect(done, {}, name_of)
    # Stable, so that among equals the first one stays first.
    first, *others = sorted(failures, key=lambda failure: failure.rank_of_blame)
    text = f"{first.name} {_describe(first)}"
    if isinstance(first.cause, ConfigError):
        error: UserError | RunError = ConfigError([f"{first.name}: {problem}" for problem in first.cause.problems])
    elif isinstance(first.cause, UserError):
        error = UserError(f"{first.name}: {first.cause}")
    else:
        also = f"; then {', '.join(failure.name for failure in others)} failed too" if others else ""
        error = RunError(f"{text} during {reason}{also}")
    error.__cause__ = first.error
    return error


def _describe(failure: _Failure) -> str:
    """What happened, on one line."""
    if isinstance(failure.error, OutOfMemoryError):
        return "was stopped by Ray because the node ran out of memory"
    if isinstance(failure.error, NodeDiedError):
        return "was lost with its node"
    if isinstance(failure.error, ActorUnavailableError):
        return "can't be reached"
    if isinstance(failure.error, ActorDiedError):
        return f"died ({_death_cause(str(failure.error))})"
    cause = failure.cause
    lines = str(cause).strip().splitlines()
    return f"failed with {type(cause).__name__}: {lines[0] if lines else '(no message)'}"


def _death_cause(text: str) -> str:
    """The cause in Ray's many-line death notice."""
    if "ray.kill" in text:
        return "killed by this run"
    if "node" in text.lower() and "died" in text and "worker process has died" not in text:
        return "its node is gone"
    if "connection error code 2" in text:
        return "its process ended without a word: killed, out of memory, or a crash in native code"
    for line in text.splitlines():
        if "exit detail:" in line:
            return line.split("exit detail:")[1].split(". ")[0].strip()
    return text.strip().splitlines()[-1]


def _timeout_message(
    reason: str,
    timeout_s: float,
    since: datetime,
    results: dict[ObjectRef, Any],
    pending: list[ObjectRef],
    name_of: dict[ObjectRef, str],
) -> str:
    silent = ", ".join(name_of[ref] for ref in pending)
    answered = ", ".join(name_of[ref] for ref in results) or "nobody"
    return (
        f"no answer within {timeout_s:g} s during {reason}, waiting since {since:%H:%M:%S}: "
        f"still alive and silent: {silent}; answered: {answered}"
    )

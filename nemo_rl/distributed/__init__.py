"""Cluster, worker groups, bounded waits, the batch container. The package itself imports neither Ray nor torch."""

import os

# Ray reads these when it is imported, and every module that imports it comes through here first. A user who set one
# keeps it.
for _name, _value in {
    # Nothing is reported to anyone.
    "RAY_USAGE_STATS_ENABLED": "0",
    # CPU workers see the devices that their parent sees; without it Ray warns at each start that this will change.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # A call without a session is a mistake of ours; Ray would start or join something by itself.
    "RAY_ENABLE_AUTO_CONNECT": "0",
    # `waits.py` says which rank died and why, in one line; Ray's own paragraph would go to stdout.
    "RAY_DEDUP_LOGS_SKIP_REGEX": "A worker died or was killed while executing",
    "RAY_SCHEDULER_EVENTS": "0",
    # Every result is waited for by `waits.py`, which ends at the first failure; Ray would print the others' tracebacks.
    "RAY_IGNORE_UNHANDLED_ERRORS": "1",
}.items():
    os.environ.setdefault(_name, _value)

"""End what a private Ray left, once its driver is gone. Run as a script, on the standard library alone.

Most of Ray's processes die with the driver, SIGKILL included; its node agents first try for a minute to report that,
to a service that is dead too, and nobody removes the session's folder.

    python reaper.py FOLDER     the session's token on the first line of standard input, which then stays open
"""

import os
import shutil
import signal
import sys
import time
from pathlib import Path

_GRACE_S = 5.0
_POLL_S = 0.2


def main() -> None:
    """Wait for the end of standard input, give Ray's processes a few seconds, kill the rest, remove the folder."""
    token = sys.stdin.readline().strip()
    sys.stdin.read()
    deadline = time.monotonic() + _GRACE_S
    while (left := ray_processes(token)) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    for pid in left:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    shutil.rmtree(sys.argv[1], ignore_errors=True)


def ray_processes(token: str) -> list[int]:
    """Ray's processes that were started with `token` in their environment; none where there is no /proc."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"RAY_AUTH_TOKEN={token}".encode() not in (folder / "environ").read_bytes().split(b"\0"):
                continue
            command = (folder / "cmdline").read_bytes()
        except OSError:
            # It ended while we looked, or belongs to someone else.
            continue
        # Programs that the driver started have the token as well.
        if command.startswith(b"ray::") or b"/ray/" in command:
            found.append(int(folder.name))
    return found


if __name__ == "__main__":
    main()

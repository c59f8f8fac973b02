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
    while (left := ray_processes(token, sys.argv[1])) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    for pid in left:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    shutil.rmtree(sys.argv[1], ignore_errors=True)


def ray_processes(token: str, session: str) -> list[int]:
    """Ray's processes of one session; none where there is no /proc.

    Args:
        token: in the environment they were started with. Some of Ray's agents write their title over it.
        session: the session's folder, in which those agents keep their logs open.
    """
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes()
            # Programs that the driver started have the token as well, and a person may read the logs.
            if not (command.startswith(b"ray::") or b"/ray/" in command):
                continue
            by_token = f"RAY_AUTH_TOKEN={token}".encode() in (folder / "environ").read_bytes().split(b"\0")
            if by_token or any(str(file.readlink()).startswith(session) for file in (folder / "fd").iterdir()):
                found.append(int(folder.name))
        except OSError:
            # It ended while we looked, or belongs to someone else.
            continue
    return found


if __name__ == "__main__":
    main()

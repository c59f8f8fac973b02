"""Equality of mathematical answers, computed by the math-verify library in processes of its own.

Simplifying what a model wrote can take for ever inside C code, where no thread can be interrupted; a process can be
ended. It also keeps a user's `SIGALRM`, the library's own time limit, out of the rollout process.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import threading
import time
from typing import Any

from nemo_rl.environments.interfaces import EnvTurn
from nemo_rl.environments.rewards import SingleTurnReward, gold_text

_START_LIMIT_S = 120.0
_GRACE_S = 2.0  # the process ends itself at the limit; this is how much later it is killed


class MathVerify(SingleTurnReward):
    """1 where the response's answer equals the gold one, such as `\\boxed{1/2}` and `0.5`; else 0.

    Each thread that calls has a process to itself; processes start on first use and again after a time-out.

    Args:
        time_limit_s: longest time for one response, in seconds.
    """

    def __init__(self, time_limit_s: float = 5.0):
        self._time_limit_s = time_limit_s
        self._idle: list[_Verifier] = []
        self._lock = threading.Lock()

    def score(self, turn: EnvTurn) -> tuple[float, dict[str, float]]:
        """The reward, `answer_found` (0 where the response holds no mathematics), and `verify_failed`.

        The last is 1 where the comparison took too long or failed; the reward is 0 then, because an answer that can't
        be compared is no right answer.

        Raises:
            ValueError: the gold answer is no mathematics.
            OSError: the process can't be started.
        """
        with self._lock:
            verifier = self._idle.pop() if self._idle else None
        if verifier is None:
            verifier = _Verifier(self._time_limit_s)
        reply = verifier.ask(gold_text(turn.prompt), turn.response_text)
        if reply is None:
            verifier.close()
            return 0.0, {"answer_found": 0.0, "verify_failed": 1.0}
        with self._lock:
            self._idle.append(verifier)
        if not reply.get("gold_parsed", True):
            raise ValueError(f"prompt {turn.prompt.source_id}: the gold answer {turn.prompt.gold!r} can't be parsed")
        return float(reply["correct"]), {
            "answer_found": float(reply["answer_parsed"]),
            "verify_failed": float("error" in reply),
        }

    def close(self) -> None:
        """Ends the processes."""
        with self._lock:
            gone, self._idle = self._idle, []
        for verifier in gone:
            verifier.close()


class _Verifier:
    """One process: a JSON line with two answers in, a JSON line with the verdict out."""

    def __init__(self, time_limit_s: float):
        self._limit = time_limit_s
        self._process = subprocess.Popen(
            [sys.executable, "-m", "nemo_rl.environments.math_verify_process", str(time_limit_s)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
        )
        self._unread = b""
        if self._read_line(_START_LIMIT_S) is None:
            self.close()
            raise OSError("the process that verifies mathematics did not start")

    def ask(self, gold: str, response: str) -> dict[str, Any] | None:
        """The verdict; None when the process ended or stayed silent, after which it is of no more use."""
        assert self._process.stdin is not None
        request = json.dumps({"gold": gold, "response": response}).encode() + b"\n"
        try:
            self._process.stdin.write(request)
        except BrokenPipeError:
            return None
        line = self._read_line(self._limit + _GRACE_S)
        return None if line is None else json.loads(line)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()

    def _read_line(self, limit_s: float) -> bytes | None:
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        deadline = time.monotonic() + limit_s
        while b"\n" not in self._unread:
            ready, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
            chunk = os.read(descriptor, 1 << 16) if ready else b""
            if not chunk:
                return None
            self._unread += chunk
        line, self._unread = self._unread.split(b"\n", 1)
        return line

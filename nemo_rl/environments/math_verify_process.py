"""The process behind `MathVerify`: `python -m nemo_rl.environments.math_verify_process <seconds>`.

It answers each line of its input with a line, and ends with its input. An answer that takes longer than the limit
ends the process: the alarm's default action does that wherever the computation stands, also when the parent is gone.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from typing import Any

_MEMORY_LIMIT_BYTES = 4 << 30  # an answer such as 9**9**9 must not take the machine's memory before its time is up


def verdict(gold: str, response: str) -> dict[str, Any]:
    """`correct`, `gold_parsed`, `answer_parsed`, and `error` where the comparison failed."""
    from math_verify import parse, verify

    expected = parse(gold, parsing_timeout=0) or parse(f"${gold}$", parsing_timeout=0)
    answer = parse(response, parsing_timeout=0)
    reply: dict[str, Any] = {"correct": False, "gold_parsed": bool(expected), "answer_parsed": bool(answer)}
    if expected and answer:
        try:
            reply["correct"] = verify(expected, answer, timeout_seconds=0, raise_on_error=True)
        except Exception as error:  # noqa: BLE001  symbolic mathematics on anything fails in every way there is
            reply["error"] = type(error).__name__
    return reply


def main(limit_s: float) -> None:
    """Serve until the input ends."""
    import math_verify  # noqa: F401  so that the first answer's limit does not pay for the import

    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_LIMIT_BYTES, _MEMORY_LIMIT_BYTES))
    # What the libraries print must not come between the replies.
    replies, sys.stdout = sys.stdout, sys.stderr
    replies.write("ready\n")
    replies.flush()
    for line in sys.stdin:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, limit_s)
        try:
            reply = verdict(request["gold"], request["response"])
        except Exception as error:  # noqa: BLE001  so does the parser
            reply = {"correct": False, "answer_parsed": False, "error": type(error).__name__}
        signal.setitimer(signal.ITIMER_REAL, 0)
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


if __name__ == "__main__":
    main(float(sys.argv[1]))

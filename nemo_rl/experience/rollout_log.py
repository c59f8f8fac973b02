"""Sampled answers for people: the last ones in memory and, on request, all of them in `rollouts.jsonl`."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from nemo_rl.experience.episode import Group
from nemo_rl.experience.interfaces import SampledAnswer

_KEPT = 256


class RolloutLog:
    """Keeps the last 256 answers, and appends all to a file when given a path.

    Each line of the file is an object with `step` (null where any step may train it), `group`, `sample`, `source_id`,
    `prompt`, `response`, `reward`, `tokens` (drawn ones), `truncated` and `version` (of the first token's weights).

    Args:
        path: several workers may append to the same file.
    """

    def __init__(self, path: str | Path | None = None):
        self._path = None if path is None else Path(path)
        self._answers: deque[SampledAnswer] = deque(maxlen=_KEPT)
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)

    def add(self, groups: Sequence[Group]) -> None:
        """The samples of groups that are not dropped.

        Raises:
            OSError: the file can't be written.
        """
        lines = []
        for group in groups:
            if group.failure is not None:
                continue
            for episode in group.episodes:
                prompt, response = episode.prompt.text, episode.response
                self._answers.append(SampledAnswer(prompt, response, episode.reward))
                if self._path is not None:
                    line = {
                        "step": group.order.target_step,
                        "group": group.order.group_id,
                        "sample": episode.index,
                        "source_id": episode.prompt.source_id,
                        "prompt": prompt,
                        "response": response,
                        "reward": episode.reward,
                        "tokens": episode.response_tokens,
                        "truncated": episode.truncated,
                        "version": episode.start_version,
                    }
                    lines.append(json.dumps(line, ensure_ascii=True) + "\n")
        if self._path is not None and lines:
            # One write in append mode, so that the lines of several workers do not mix.
            with self._path.open("ab", buffering=0) as file:
                file.write("".join(lines).encode())

    def last(self, count: int) -> list[SampledAnswer]:
        """The last `count` answers, oldest first."""
        return list(self._answers)[-count:] if count > 0 else []

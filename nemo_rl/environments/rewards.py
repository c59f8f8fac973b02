"""Environments of one turn: they reward the response and end the episode."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from nemo_rl.data.prompts import Prompt
from nemo_rl.environments.interfaces import EnvStep, EnvTurn
from nemo_rl.utils.errors import UserError


class SingleTurnReward(ABC):
    """An environment whose first step ends the episode."""

    needs_gold: bool = True

    @abstractmethod
    def score(self, turn: EnvTurn) -> tuple[float, dict[str, float]]:
        """The reward of a response, and numbers for the log."""

    def start(self, prompt: Prompt) -> Any:
        """No state."""
        return None

    def step(self, turn: EnvTurn) -> EnvStep:
        """The reward; the episode ends."""
        reward, metrics = self.score(turn)
        return EnvStep(reward=reward, metrics=metrics)

    def close(self) -> None:  # noqa: B027  nothing to free is the common case
        """Nothing to free."""


class ExactMatch(SingleTurnReward):
    """1 where answer and gold are the same text, white space at both ends aside; else 0.

    Raises:
        UserError: a faulty regular expression.
    """

    def __init__(self, pattern: str | None = None, gold_pattern: str | None = None, ignore_case: bool = False):
        self._pattern = _compile(pattern, "env.pattern")
        self._gold_pattern = _compile(gold_pattern, "env.gold_pattern")
        self._ignore_case = ignore_case

    def score(self, turn: EnvTurn) -> tuple[float, dict[str, float]]:
        """The reward, and `answer_found`: 0 where the pattern finds nothing in the response.

        Raises:
            ValueError: the gold answer is neither text nor a number, or its pattern finds nothing in it.
        """
        gold = _extract(self._gold_pattern, gold_text(turn.prompt))
        if gold is None:
            raise ValueError(f"prompt {turn.prompt.source_id}: env.gold_pattern finds nothing in the gold answer")
        answer = _extract(self._pattern, turn.response_text)
        if answer is None:
            return 0.0, {"answer_found": 0.0}
        return float(self._normal(answer) == self._normal(gold)), {"answer_found": 1.0}

    def _normal(self, text: str) -> str:
        return text.strip().casefold() if self._ignore_case else text.strip()


class PythonReward(SingleTurnReward):
    """The reward of a user's function; what it raises passes through.

    Args:
        function: `package.module.function`, or `file.py:function`.

    Raises:
        UserError: it cannot be imported, or is no function.
    """

    needs_gold = False

    def __init__(self, function: str):
        self._function = load_function(function, "env.function")
        self._name = function

    def score(self, turn: EnvTurn) -> tuple[float, dict[str, float]]:
        """The number that the function returned, or `reward` of the mapping that it returned and its other numbers.

        Raises:
            TypeError: it returned something else.
        """
        prompt = turn.prompt
        returned = self._function(prompt.text, turn.response_text, prompt.gold, dict(prompt.extra))
        if not isinstance(returned, Mapping):
            returned = {"reward": returned}
        if "reward" not in returned:
            raise TypeError(f"{self._name} returned a mapping without `reward`: {sorted(map(str, returned))}")
        numbers = {str(name): self._number(name, value) for name, value in returned.items()}
        return numbers.pop("reward"), numbers

    def _number(self, name: Any, value: Any) -> float:
        try:
            return float(value)
        except (TypeError, ValueError):
            raise TypeError(f"{self._name} returned {type(value).__name__} as {name}, a number is needed") from None


def gold_text(prompt: Prompt) -> str:
    """The gold answer of `prompt` as text.

    Raises:
        ValueError: it is neither text nor a number.
    """
    gold = prompt.gold
    if isinstance(gold, bool) or not isinstance(gold, str | int | float):
        raise ValueError(f"prompt {prompt.source_id}: the gold answer is {type(gold).__name__}, text is needed")
    return str(gold)


def load_function(name: str, key: str) -> Callable[..., Any]:
    """The function of a dotted name, or of `file.py:function`; its file is run, as any import does.

    Raises:
        UserError: it cannot be imported or is not callable; names `key`.
    """
    where, colon, attribute = name.rpartition(":")
    try:
        if not colon:
            where, _, attribute = name.rpartition(".")
        module = _load_file(Path(where).expanduser()) if where.endswith(".py") else importlib.import_module(where)
        found = getattr(module, attribute)
    # The user's module may fail in any way while it is imported; all of them mean the same.
    except Exception as error:
        raise UserError(f"{key}: {name} can't be imported: {type(error).__name__}: {error}") from error
    if not callable(found):
        raise UserError(f"{key}: {name} is a {type(found).__name__}, not a function")
    return found


def _load_file(path: Path) -> Any:
    # Named by its path, so that two files of the same name do not meet.
    spec = importlib.util.spec_from_file_location(f"_onehop_user_{abs(hash(str(path.absolute())))}", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise FileNotFoundError(f"no file {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _compile(pattern: str | None, key: str) -> re.Pattern[str] | None:
    try:
        return None if pattern is None else re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise UserError(f"{key}: {pattern!r} is no regular expression: {error}") from None


def _extract(pattern: re.Pattern[str] | None, text: str) -> str | None:
    """The last match of `pattern`, of it the first group where there is one; the whole text without a pattern."""
    if pattern is None:
        return text
    matches = list(pattern.finditer(text))
    if not matches:
        return None
    last = matches[-1]
    return last.group(1) if pattern.groups and last.group(1) is not None else last.group(0)

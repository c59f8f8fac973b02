"""An environment of several turns: the policy may ask a calculator before it answers.

`<calc>1+2</calc>` in a response is answered by a turn that holds `3`; a response without it is the final answer, which
earns 1 when it is the gold answer.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Literal

from nemo_rl.data.prompts import Prompt
from nemo_rl.environments.interfaces import EnvStep, EnvTurn
from nemo_rl.environments.rewards import gold_text

_CALL = re.compile(r"<calc>(.*?)</calc>", re.DOTALL)
_TOKEN = re.compile(r"\s*(\d+(?:\.\d+)?|[-+*/()])")
_MAX_CHARACTERS = 200


class Calculator:
    """See the module.

    Args:
        role: of the turns that hold a result.
    """

    needs_gold = True

    def __init__(self, role: Literal["tool", "user"] = "user"):
        self._role = role

    def start(self, prompt: Prompt) -> None:
        """No state."""

    def step(self, turn: EnvTurn) -> EnvStep:
        """The result of the first call in the response; without a call, the reward of the final answer.

        The metric `calc_calls` counts calls, `calc_errors` those that are no arithmetic.
        """
        call = _CALL.search(turn.response_text)
        if call is None:
            return EnvStep(reward=float(turn.response_text.strip() == gold_text(turn.prompt).strip()))
        try:
            shown, failed = format_number(evaluate(call.group(1))), 0.0
        except ValueError as error:
            shown, failed = f"error: {error}", 1.0
        observation = ({"role": self._role, "content": shown},)
        metrics = {"calc_calls": 1.0, "calc_errors": failed}
        return EnvStep(reward=0.0, done=False, observation=observation, metrics=metrics)

    def close(self) -> None:
        """Nothing to free."""


def evaluate(expression: str) -> Fraction:
    """The exact value of an expression of decimal numbers, `+ - * /` and parentheses, at most 200 characters long.

    The text is parsed, never run.

    Raises:
        ValueError: it is too long, no such expression, or divides by zero.
    """
    if len(expression) > _MAX_CHARACTERS:
        raise ValueError(f"more than {_MAX_CHARACTERS} characters")
    tokens, position = [], 0
    text = expression.rstrip()
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise ValueError("not arithmetic")
        tokens.append(match.group(1))
        position = match.end()
    parser = _Parser(tokens)
    value = parser.sum()
    if parser.token is not None:
        raise ValueError("not arithmetic")
    return value


def format_number(value: Fraction) -> str:
    """`value` as a whole number, else with up to six decimals."""
    return str(value.numerator) if value.denominator == 1 else f"{float(value):.6f}".rstrip("0").rstrip(".")


class _Parser:
    """Recursive descent: sum -> product -> factor."""

    def __init__(self, tokens: list[str]):
        self._tokens = tokens
        self._at = 0

    @property
    def token(self) -> str | None:
        return self._tokens[self._at] if self._at < len(self._tokens) else None

    def sum(self) -> Fraction:
        value = self._product()
        while self.token in ("+", "-"):
            sign = 1 if self._next() == "+" else -1
            value += sign * self._product()
        return value

    def _product(self) -> Fraction:
        value = self._factor()
        while self.token in ("*", "/"):
            if self._next() == "*":
                value *= self._factor()
            else:
                divisor = self._factor()
                if divisor == 0:
                    raise ValueError("division by zero")
                value /= divisor
        return value

    def _factor(self) -> Fraction:
        token = self._next()
        if token == "-":
            return -self._factor()
        if token == "(":
            value = self.sum()
            if self._next() != ")":
                raise ValueError("not arithmetic")
            return value
        if token is None or not token[0].isdigit():
            raise ValueError("not arithmetic")
        return Fraction(token)

    def _next(self) -> str | None:
        token = self.token
        self._at += 1
        return token

"""The `env` section: one of a few environments, told apart by `name`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag

from nemo_rl.environments.interfaces import Environment
from nemo_rl.utils.config import ConfigModel
from nemo_rl.utils.dotted import build_object


class _EnvConfig(ConfigModel):
    max_turns: int = Field(default=1, ge=1)
    """Most turns of the policy in one episode. Environments that only reward end after the first."""
    num_workers: int = Field(default=1, ge=1, le=64)
    """Threads that call the environment; above 1 it is called from several at once."""


class ExactMatchConfig(_EnvConfig):
    """Reward 1 for the gold answer as text, else 0. White space at both ends is ignored."""

    name: Literal["exact_match"] = "exact_match"
    """This environment."""
    pattern: str | None = None
    """A regular expression that finds the answer in the response: the last match counts, of it the first group if there
    is one; no match is reward 0. null = the whole response."""
    gold_pattern: str | None = None
    """The same for the gold answer, such as `#### (.*)`; a gold answer without a match is a failure."""
    ignore_case: bool = False
    """Take upper and lower case as equal."""


class MathVerifyConfig(_EnvConfig):
    """Reward 1 for a mathematically equal answer, in LaTeX or plain, else 0."""

    name: Literal["math_verify"]
    """This environment."""
    time_limit_s: float = Field(default=5.0, gt=0)
    """Longest time for one answer, in seconds; one that takes longer gets reward 0 and is counted."""


class PythonRewardConfig(_EnvConfig):
    """The reward of a function of yours: `(prompt: str, response: str, gold, extra: dict) -> float | dict`."""

    name: Literal["python"]
    """This environment."""
    function: str = Field(min_length=1)
    """`package.module.function`, or `path/to/file.py:function`. A returned dict holds `reward` and further numbers for
    the log."""


class CalculatorConfig(_EnvConfig):
    """A tool that computes what the policy writes in `<calc>...</calc>`; then exact match of the final answer."""

    name: Literal["calculator"]
    """This environment."""
    max_turns: int = Field(default=4, ge=1)
    """Most turns of the policy in one episode."""
    role: Literal["tool", "user"] = "user"
    """The role of the turn that holds the result; not every chat template knows `tool`."""


class CustomEnvironmentConfig(_EnvConfig):
    """A class of yours with the methods of `Environment`; further keys go to its constructor."""

    model_config = ConfigDict(extra="allow")

    name: Literal["custom"]
    """This environment."""
    target: str
    """`module:Class`."""

    def options(self) -> dict[str, Any]:
        """The constructor's arguments."""
        return dict(self.model_extra or {})


def _name(value: Any) -> str:
    return str(value.get("name", "exact_match") if isinstance(value, dict | ConfigModel) else value)


# By a function, because a discriminator field may have no validator and every field of a config model has one.
EnvConfig = Annotated[
    Annotated[ExactMatchConfig, Tag("exact_match")]
    | Annotated[MathVerifyConfig, Tag("math_verify")]
    | Annotated[PythonRewardConfig, Tag("python")]
    | Annotated[CalculatorConfig, Tag("calculator")]
    | Annotated[CustomEnvironmentConfig, Tag("custom")],
    Discriminator(
        _name,
        custom_error_type="env_name",
        custom_error_message="one of exact_match, math_verify, python, calculator, custom under `name`",
    ),
]


def build_environment(config: EnvConfig) -> Environment:
    """The environment that `env` names.

    Raises:
        UserError: a function or class that cannot be imported or built, or a faulty regular expression.
    """
    # Imported here because a config can be checked without them.
    match config:
        case ExactMatchConfig():
            from nemo_rl.environments.rewards import ExactMatch

            return ExactMatch(config.pattern, config.gold_pattern, config.ignore_case)
        case MathVerifyConfig():
            from nemo_rl.environments.math_verify import MathVerify

            return MathVerify(config.time_limit_s)
        case PythonRewardConfig():
            from nemo_rl.environments.rewards import PythonReward

            return PythonReward(config.function)
        case CalculatorConfig():
            from nemo_rl.environments.calculator import Calculator

            return Calculator(config.role)
    return build_object(config.target, "env.target", **config.options())

"""Rewards of one turn: exact match, a user's function, and what each says about broken input.

Not covered: what a failure leads to; see the tests of rollouts.
"""

from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from nemo_rl.data.prompts import Prompt
from nemo_rl.environments.config import EnvConfig, build_environment
from nemo_rl.environments.interfaces import EnvTurn
from nemo_rl.utils.errors import UserError

USER = Path(__file__).with_name("user_rewards.py")


def make_turn(response: str, gold: Any = "42", *, truncated: bool = False, **extra: Any) -> EnvTurn:
    messages = ({"role": "user", "content": "q"},)
    prompt = Prompt(0, "row0", messages, "the prompt", (1, 2), gold, extra)
    answer = {"role": "assistant", "content": response}
    return EnvTurn(prompt, None, (*messages, answer), response, (3,), truncated, turn=0)


def build(**values: Any) -> Any:
    return build_environment(TypeAdapter(EnvConfig).validate_python(values))


@pytest.mark.parametrize(
    ("options", "response", "gold", "reward", "found"),
    [
        ({}, " 42\n", "42", 1.0, 1.0),
        ({}, "042", "42", 0.0, 1.0),
        ({}, "42", 42, 1.0, 1.0),
        ({}, "", "42", 0.0, 1.0),
        ({}, "Left", "left", 0.0, 1.0),
        ({"ignore_case": True}, "Left", "lefT", 1.0, 1.0),
        ({"pattern": r"#### (.*)"}, "5 + 37\n#### 42", "42", 1.0, 1.0),
        ({"pattern": r"\d+"}, "first 41, then 42.", "42", 1.0, 1.0),
        ({"pattern": r"#### (.*)"}, "42", "42", 0.0, 0.0),
        ({"pattern": r"\d+", "gold_pattern": r"#### (.*)"}, "it is 42", "5 + 37 = 42\n#### 42", 1.0, 1.0),
    ],
)
def test_exact_match(options: dict[str, Any], response: str, gold: Any, reward: float, found: float):
    step = build(name="exact_match", **options).step(make_turn(response, gold))
    assert (step.reward, step.done, step.observation, dict(step.metrics)) == (reward, True, (), {"answer_found": found})


def test_exact_match_refuses_a_gold_answer_that_is_no_text():
    for gold in (None, ["42"], True):
        with pytest.raises(ValueError, match=r"row0: the gold answer is .*, text is needed"):
            build(name="exact_match").step(make_turn("42", gold))
    with pytest.raises(ValueError, match=r"row0: env.gold_pattern finds nothing"):
        build(name="exact_match", gold_pattern="####").step(make_turn("42", "42"))


@pytest.mark.parametrize("name", [f"{USER}:length_reward", "unit.environments.user_rewards.length_reward"])
def test_a_users_function_by_file_and_by_dotted_name(name: str):
    environment = build(name="python", function=name)
    assert not environment.needs_gold
    step = environment.step(make_turn("abc", "abc", wanted=6))
    assert step.done
    assert step.reward == 0.5
    assert dict(step.metrics) == {"prompt_length": 10.0, "right": 1.0}


@pytest.mark.parametrize(
    ("function", "error"), [("broken", KeyError), ("no_number", TypeError), ("no_reward", TypeError)]
)
def test_what_a_users_function_does_wrong_passes_through(function: str, error: type[Exception]):
    with pytest.raises(error):
        build(name="python", function=f"{USER}:{function}").step(make_turn("x"))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"name": "python", "function": f"{USER}:missing"}, "env.function: .*:missing can't be imported"),
        ({"name": "python", "function": f"{USER}:not_a_function"}, "is a int, not a function"),
        ({"name": "python", "function": "/nowhere/rewards.py:f"}, "no file /nowhere/rewards.py"),
        ({"name": "python", "function": "nomodule.f"}, "env.function: nomodule.f can't be imported"),
        ({"name": "exact_match", "pattern": "("}, "env.pattern: .* is no regular expression"),
        ({"name": "custom", "target": "nomodule:Class"}, "env.target: nomodule:Class can't be built"),
    ],
)
def test_what_cannot_be_built_is_said_at_once(values: dict[str, Any], message: str):
    with pytest.raises(UserError, match=message):
        build(**values)


def test_options_belong_to_their_environment():
    with pytest.raises(ValidationError, match="time_limit_s"):
        build(name="exact_match", time_limit_s=1)


def test_a_class_of_the_user():
    environment = build(name="custom", target="nemo_rl.environments.calculator:Calculator", role="tool", max_turns=3)
    assert environment.step(make_turn("<calc>1+1</calc>")).observation == ({"role": "tool", "content": "2"},)

"""The calculator: its arithmetic against Python's, what it refuses, and how an episode goes."""

import random
from fractions import Fraction

import pytest
from unit.environments.test_rewards import make_turn

from nemo_rl.environments.calculator import Calculator, evaluate, format_number


def test_arithmetic_against_python():
    rng = random.Random(0)
    for _ in range(300):
        numbers = [rng.randint(1, 99) for _ in range(5)]
        signs = [rng.choice("+-*/") for _ in range(4)]
        text = (
            f"{numbers[0]}{signs[0]}({numbers[1]}{signs[1]}-{numbers[2]}){signs[2]}{numbers[3]} {signs[3]} {numbers[4]}"
        )
        try:
            expected = eval(  # the test's own text
                "".join(f"F({token})" if token.isdigit() else token for token in _tokens(text)), {"F": Fraction}
            )
        except ZeroDivisionError:
            with pytest.raises(ValueError, match="division by zero"):
                evaluate(text)
        else:
            assert evaluate(text) == expected, text


def _tokens(text: str) -> list[str]:
    spaced = "".join(f" {sign} " if sign in "+-*/()" else sign for sign in text)
    return spaced.split()


@pytest.mark.parametrize(
    "text", ["", "1+", "(1", "1)", "1 2", "2**3", "__import__('os')", "1e9", "9" * 201, "1//2", ".5", "a"]
)
def test_anything_else_is_refused(text: str):
    with pytest.raises(ValueError, match=r"arithmetic|characters"):
        evaluate(text)


@pytest.mark.parametrize(
    ("value", "text"), [(Fraction(7), "7"), (Fraction(1, 4), "0.25"), (Fraction(-1, 3), "-0.333333")]
)
def test_numbers_as_text(value: Fraction, text: str):
    assert format_number(value) == text
    assert format_number(Fraction(1, 10**9)) == "0"


def test_an_episode():
    environment = Calculator()
    asked = environment.step(make_turn("first <calc>6*7</calc> then <calc>1</calc>"))
    assert (asked.reward, asked.done) == (0.0, False)
    assert asked.observation == ({"role": "user", "content": "42"},)
    assert dict(asked.metrics) == {"calc_calls": 1.0, "calc_errors": 0.0}
    wrong = environment.step(make_turn("<calc>6/0</calc>"))
    assert wrong.observation[0]["content"] == "error: division by zero"
    assert wrong.metrics["calc_errors"] == 1.0
    assert environment.step(make_turn(" 42 ")).reward == 1.0
    assert environment.step(make_turn("41")).reward == 0.0

"""Functions as a user would write them."""

from typing import Any


def length_reward(prompt: str, response: str, gold: Any, extra: dict[str, Any]) -> dict[str, float]:
    return {"reward": len(response) / extra["wanted"], "prompt_length": len(prompt), "right": response == gold}


def broken(prompt: str, response: str, gold: Any, extra: dict[str, Any]) -> float:
    raise KeyError(response)


def no_number(prompt: str, response: str, gold: Any, extra: dict[str, Any]) -> Any:
    return "good"


def no_reward(prompt: str, response: str, gold: Any, extra: dict[str, Any]) -> Any:
    return {"score": 1.0}


not_a_function = 3

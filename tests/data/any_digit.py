"""A reward function as a user writes one."""


def any_digit(prompt: str, response: str, gold: str, extra: dict) -> float:
    """Which part of a response of four characters is digits: a random model gets some of it."""
    return sum(character.isdigit() for character in response) / 4

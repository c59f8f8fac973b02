"""The reward of the RL yardsticks: the last word of the gold answer occurs in the response."""


def gold_occurs(prompt: str, response: str, gold: str, extra: dict) -> float:
    """1 or 0."""
    return float(gold.split()[-1] in response)

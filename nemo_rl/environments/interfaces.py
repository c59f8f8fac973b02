"""What an environment is: it is shown each response of the policy, rewards it and may answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from nemo_rl.data.conversation import Message
from nemo_rl.data.prompts import Prompt


@dataclass(frozen=True)
class EnvTurn:
    """One response of the policy.

    Attributes:
        prompt: what the episode began with.
        state: what `Environment.start` returned for this episode.
        messages: the whole conversation, this response last.
        response_text: the response without its stop token and without special tokens.
        response_ids: the drawn tokens, the stop token included.
        truncated: the response was cut at its limit.
        turn: 0 for the first response.
    """

    prompt: Prompt
    state: Any
    messages: tuple[Message, ...]
    response_text: str
    response_ids: tuple[int, ...]
    truncated: bool
    turn: int


@dataclass(frozen=True)
class EnvStep:
    """The answer to one response.

    Attributes:
        reward: of this turn; the rewards of an episode are added.
        done: the episode ends here.
        observation: turns that follow the response as context; they are never trained. Ignored when `done`.
        metrics: numbers for the log; those of an episode are added by name.
    """

    reward: float
    done: bool = True
    observation: tuple[Message, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)


class Environment(Protocol):
    """Rewards responses, and answers them where an episode has several turns.

    A raised exception and a reward that is not finite are failures of the sample: it is drawn again or its prompt is
    dropped, by rule, and never trained as reward 0. `OSError`, which connection errors and time-outs are, counts
    against the limit for infrastructure, anything else against the limit for data.

    With `num_workers` above 1 in the config, episodes step in several threads at once.
    """

    needs_gold: bool
    """Prompts without a gold answer cannot be rewarded."""

    def start(self, prompt: Prompt) -> Any:
        """The state of a new episode; called before its first `step`, once per attempt."""
        ...

    def step(self, turn: EnvTurn) -> EnvStep:
        """The reward of a response, and what follows it."""
        ...

    def close(self) -> None:
        """Frees everything; may be called twice."""
        ...

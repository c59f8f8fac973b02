"""One sample in work: its context, which tokens were drawn, its rewards; and the group it belongs to."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from nemo_rl.data.conversation import Message
from nemo_rl.data.prompts import Prompt
from nemo_rl.experience.failures import FailureKind, SampleFailure
from nemo_rl.experience.interfaces import GroupOrder, SampleStats
from nemo_rl.models.generation.interfaces import GenerationOutput, SamplingParams


@dataclass
class Episode:
    """The current attempt at one sample, and how earlier ones failed.

    Attributes:
        index: which sample of its group.
        context: prompt, responses and observations, as tokens.
        drawn: one entry per token of `context`: it was drawn, so it is trained.
        logprobs: log-probability of each drawn token, 0 elsewhere; nats.
        messages: the conversation as text.
        transcript: the turns after the prompt, for people.
        env_state: what the environment keeps for this attempt; None before its first turn.
        request_id: the response that is awaited; empty when none is.
        deadline: when the sampler or the environment must have answered, by `time.monotonic`; None = never.
        start_version: weights of the first token; `end_version` of the last.
    """

    index: int
    prompt: Prompt
    failures: Counter[FailureKind] = field(default_factory=Counter)
    context: list[int] = field(default_factory=list)
    drawn: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    transcript: list[Message] = field(default_factory=list)
    env_state: Any = None
    reward: float = 0.0
    env_metrics: Counter[str] = field(default_factory=Counter)
    turns: int = 0
    request_id: str = ""
    deadline: float | None = None
    truncated: bool = False
    finish_reason: str = ""
    start_version: int = -1
    end_version: int = -1
    finished: bool = False

    @property
    def attempt(self) -> int:
        """0 for the first attempt."""
        return self.failures.total()

    def begin(self) -> None:
        """Starts a new attempt."""
        fresh = Episode(self.index, self.prompt, self.failures)
        fresh.context = list(self.prompt.prompt_ids)
        fresh.drawn = [False] * len(fresh.context)
        fresh.logprobs = [0.0] * len(fresh.context)
        fresh.messages = list(self.prompt.messages)
        vars(self).update(vars(fresh))

    def add_response(self, output: GenerationOutput, text: str) -> None:
        """The drawn tokens and their text."""
        self.context += output.token_ids
        self.drawn += [True] * len(output.token_ids)
        self.logprobs += output.logprobs
        self._add_message({"role": "assistant", "content": text})
        self.truncated = output.finish_reason == "length"
        self.finish_reason = output.finish_reason
        if self.turns == 0:
            self.start_version = output.start_version
        self.end_version = output.end_version
        self.turns += 1

    def add_observation(self, token_ids: list[int], messages: tuple[Message, ...]) -> None:
        """Context that the policy did not write."""
        self.context += token_ids
        self.drawn += [False] * len(token_ids)
        self.logprobs += [0.0] * len(token_ids)
        for message in messages:
            self._add_message(message)

    @property
    def response_tokens(self) -> int:
        """Drawn tokens."""
        return sum(self.drawn)

    @property
    def response(self) -> str:
        """What followed the prompt, for people: the response, or all turns with their roles."""
        if len(self.transcript) == 1:
            return self.transcript[0]["content"]
        return "\n".join(f"[{turn['role']}] {turn['content']}" for turn in self.transcript)

    def stats(self) -> SampleStats:
        """What the log needs."""
        return SampleStats(
            reward=self.reward,
            response_tokens=self.response_tokens,
            total_tokens=len(self.context),
            turns=self.turns,
            truncated=self.truncated,
            finish_reason=self.finish_reason,
            env=dict(self.env_metrics),
        )

    def _add_message(self, message: Message) -> None:
        self.messages.append(message)
        self.transcript.append(message)


@dataclass
class Group:
    """The samples of one order.

    Attributes:
        sampling: how they are drawn.
        evaluation: they are looked at only, never written.
        sequence: 0 for the first order of a worker, and so on.
        failure: what dropped the group.
    """

    order: GroupOrder
    episodes: list[Episode]
    sampling: SamplingParams
    evaluation: bool = False
    sequence: int = 0
    failure: SampleFailure | None = None

    @property
    def finished(self) -> bool:
        """Dropped, or all samples are finished."""
        return self.failure is not None or all(episode.finished for episode in self.episodes)

    @property
    def attempts(self) -> int:
        """Most attempts that one sample took."""
        # The failure that drops a group is not followed by another attempt.
        return max(episode.attempt for episode in self.episodes) + (self.failure is None)


def output_failure(output: GenerationOutput) -> SampleFailure | None:
    """What is wrong with a response: the sampler gave it up, or a log-probability is missing or not finite."""
    if output.finish_reason == "error":
        return SampleFailure("infra", "generation_error", output.error or "the sampler gave the sample up")
    if len(output.logprobs) != len(output.token_ids):
        detail = f"{len(output.logprobs)} log-probabilities for {len(output.token_ids)} tokens"
        return SampleFailure("infra", "bad_logprobs", detail)
    for position, logprob in enumerate(output.logprobs):
        if not math.isfinite(logprob):
            return SampleFailure("infra", "bad_logprobs", f"{logprob} at response token {position}")
    return None


def draw_seed(order: GroupOrder, sample: int, attempt: int, turn: int) -> int:
    """The seed of one response, below 2**63: different for every sample, attempt and turn of a group's seed."""
    text = f"{order.seed}/{sample}/{attempt}/{turn}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1

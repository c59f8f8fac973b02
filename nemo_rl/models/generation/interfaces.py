"""What a sampler does: requests go in, finished samples come out, weights are exchanged in between."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

FinishReason = Literal["stop", "length", "error"]


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of a sample are drawn.

    Attributes:
        max_new_tokens: most tokens of the sample, the stop token included.
        temperature: logits are divided by this first; 0 takes the likeliest token.
        top_p: the smallest set of tokens with at least this probability is kept.
        top_k: this many tokens are kept; None keeps all.
        stop_token_ids: a token of these ends the sample and is part of it.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class GenerationRequest:
    """One sample to draw.

    Attributes:
        request_id: names it in the output; unique among those in work.
        prompt_ids: tokens to continue, at least one.
        seed: of this sample's draws: the same seed, prompt and weights give the same tokens in any company.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    seed: int


@dataclass(frozen=True)
class GenerationOutput:
    """One finished sample.

    Attributes:
        token_ids: the drawn tokens.
        logprobs: log-probability of each drawn token at the sampling temperature, before `top_p` and `top_k` cut; nats.
        finish_reason: `stop` at a stop token, `length` at the limit, `error` when the engine gave it up.
        start_version: version of the weights that drew the first token; `end_version` of the last.
        error: what went wrong, one line.
    """

    request_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    start_version: int
    end_version: int
    error: str | None = None


class GenerationEngine(ABC):
    """Holds weights and a set of samples in work. All calls come from one thread.

    A slot that a finished sample leaves is refilled at once, so a long sample never holds up others.
    """

    @abstractmethod
    def add(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue samples.

        Raises:
            ValueError: an id is in work already, or a prompt is empty or leaves no room for a token.
        """

    @abstractmethod
    def step(self) -> list[GenerationOutput]:
        """Advance the samples in work by at least a token; those that finished, in no particular order."""

    @property
    @abstractmethod
    def num_unfinished(self) -> int:
        """Samples queued or in work."""

    @abstractmethod
    def abort(self, request_ids: Iterable[str]) -> None:
        """Forget samples; ids that are not in work are no error. They never come out."""

    @abstractmethod
    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Take new weights by their names in the model's checkpoint, and forget everything computed with the old ones.

        Samples in work go on with the new weights.
        """

    @property
    @abstractmethod
    def version(self) -> int:
        """Version of the weights; -1 before the first `load_weights`."""

    def close(self) -> None:  # noqa: B027  nothing to free is the common case
        """Free everything; may be called twice."""

"""The samples in work, one per slot, as arrays over slots, so that a step costs the same for one and for hundreds."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from nemo_rl.models.generation.interfaces import FinishReason, GenerationOutput, GenerationRequest
from nemo_rl.models.generation.sampling import SamplingRows

_ALL_TOKENS = np.iinfo(np.int64).max
_SEED_MASK = 2**64 - 1


class SlotTable:
    """What is known of each slot. The token to be decoded next is the last one of its context.

    Attributes:
        requests: the request of each slot, None where it is free.
        tokens: context of each slot, prompt first, int64 `[slots, room]`.
        lengths: tokens of the context, `[slots]`.
        cached: whether keys and values of all but the context's last token are in the cache: the slot decodes.
    """

    def __init__(self, num_slots: int, room: int):
        self.num_slots = num_slots
        self.room = room
        self.requests: list[GenerationRequest | None] = [None] * num_slots
        self.tokens = np.zeros((num_slots, room), np.int64)
        self.lengths = np.ones(num_slots, np.int64)
        self.cached = np.zeros(num_slots, bool)
        self._logprobs = np.zeros((num_slots, room), np.float32)
        self._prompt_lengths = np.zeros(num_slots, np.int64)
        self._limits = np.zeros(num_slots, np.int64)
        self._temperature = np.ones(num_slots, np.float32)
        self._top_p = np.ones(num_slots, np.float32)
        self._top_k = np.full(num_slots, _ALL_TOKENS)
        self._seeds = np.zeros(num_slots, np.uint64)
        self._stops = np.full((num_slots, 1), -1, np.int64)
        self._start_versions = np.zeros(num_slots, np.int64)

    def grow(self, room: int) -> None:
        """Makes place for samples of `room` tokens."""
        added = ((0, 0), (0, room - self.room))
        self.tokens = np.pad(self.tokens, added)
        self._logprobs = np.pad(self._logprobs, added)
        self.room = room

    def free_slots(self) -> list[int]:
        """Slots without a sample, lowest first."""
        return [slot for slot, request in enumerate(self.requests) if request is None]

    def used_slots(self) -> list[int]:
        """Slots with a sample, lowest first."""
        return [slot for slot, request in enumerate(self.requests) if request is not None]

    def put(self, slot: int, request: GenerationRequest, limit: int) -> None:
        """Gives a free slot to a request whose context may grow to `limit` tokens."""
        sampling = request.sampling
        length = len(request.prompt_ids)
        self.requests[slot] = request
        self.tokens[slot, :length] = request.prompt_ids
        self.lengths[slot] = self._prompt_lengths[slot] = length
        self.cached[slot] = False
        self._limits[slot] = limit
        self._temperature[slot] = sampling.temperature
        self._top_p[slot] = sampling.top_p
        self._top_k[slot] = _ALL_TOKENS if sampling.top_k is None else sampling.top_k
        self._seeds[slot] = request.seed & _SEED_MASK
        num_stops = len(sampling.stop_token_ids)
        if num_stops > self._stops.shape[1]:
            added = num_stops - self._stops.shape[1]
            self._stops = np.pad(self._stops, ((0, 0), (0, added)), constant_values=-1)
        self._stops[slot] = -1
        self._stops[slot, :num_stops] = sampling.stop_token_ids

    def context(self, slot: int) -> bytes:
        """The tokens of a slot's context, as a key."""
        return self.tokens[slot, : self.lengths[slot]].tobytes()

    def free(self, slot: int) -> None:
        """Ends the sample of a slot."""
        self.requests[slot] = None
        self.cached[slot] = False
        self.lengths[slot] = 1

    def move(self, source: int, target: int) -> None:
        """Moves a sample to a free slot."""
        for rows in (
            self.tokens, self.lengths, self.cached, self._logprobs, self._prompt_lengths, self._limits,
            self._temperature, self._top_p, self._top_k, self._seeds, self._stops, self._start_versions,
        ):  # fmt: skip
            rows[target] = rows[source]
        self.requests[target] = self.requests[source]
        self.free(source)

    def sampling_rows(self, count: int) -> SamplingRows:
        """How the next token of the first `count` slots is drawn.

        The position is that in the whole context, so that a sample goes on alike whether a token was drawn here or
        came with the prompt.
        """
        return SamplingRows(
            temperature=self._temperature[:count],
            top_p=self._top_p[:count],
            top_k=self._top_k[:count],
            seeds=self._seeds[:count],
            positions=self.lengths[:count],
        )

    def extend(
        self, slots: NDArray[np.int64], tokens: NDArray[np.int64], logprobs: NDArray[np.float32], version: int
    ) -> list[tuple[int, FinishReason]]:
        """Adds a drawn token to each of some slots; those that are finished by it.

        A log-probability that is not finite ends a sample with `error`.
        """
        at = self.lengths[slots]
        first = slots[at == self._prompt_lengths[slots]]
        self._start_versions[first] = version
        self.tokens[slots, at] = tokens
        self._logprobs[slots, at] = logprobs
        self.lengths[slots] = at + 1
        broken = ~np.isfinite(logprobs)
        stopped = (tokens[:, None] == self._stops[slots]).any(1)
        full = at + 1 >= self._limits[slots]
        finished: list[tuple[int, FinishReason]] = []
        for i in np.flatnonzero(broken | stopped | full):
            finished.append((int(slots[i]), "error" if broken[i] else "stop" if stopped[i] else "length"))
        return finished

    def output(self, slot: int, reason: FinishReason, version: int) -> GenerationOutput:
        """The sample of a slot as it stands; of a broken one without its last token."""
        request = self.requests[slot]
        assert request is not None
        start, end = int(self._prompt_lengths[slot]), int(self.lengths[slot])
        error = None
        if reason == "error":
            end -= 1
            error = f"the model gave no finite log-probability for token {end - start} of the answer"
        return GenerationOutput(
            request_id=request.request_id,
            token_ids=tuple(self.tokens[slot, start:end].tolist()),
            logprobs=tuple(self._logprobs[slot, start:end].tolist()),
            finish_reason=reason,
            start_version=int(self._start_versions[slot]),
            end_version=version,
            error=error,
        )

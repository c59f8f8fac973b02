"""A sampler that answers from a script, an environment that does what a test says, and small pieces around them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tiny import make_tokenizer
from torch import Tensor

from nemo_rl.data.prompts import Prompt
from nemo_rl.data_plane.adapters.noop import NoOpDataPlaneClient
from nemo_rl.data_plane.schema import SC_ROLLOUT_SCHEMA_FIELDS
from nemo_rl.environments.interfaces import EnvStep, EnvTurn
from nemo_rl.experience.config import RolloutFailureConfig
from nemo_rl.experience.episode import Group
from nemo_rl.experience.interfaces import GroupOrder
from nemo_rl.experience.rollouts import RolloutLimits, RolloutManager
from nemo_rl.experience.turns import TurnTokens
from nemo_rl.models.generation.interfaces import (
    FinishReason,
    GenerationEngine,
    GenerationOutput,
    GenerationRequest,
    SamplingParams,
)

CLOSE = 260
"""The id of `<|e|>`, which closes a turn in the test template and stops a response."""
PARTITION = "rollout_data"
SAMPLING = SamplingParams(max_new_tokens=32, stop_token_ids=(CLOSE, 258))


@dataclass(frozen=True)
class Reply:
    """What the sampler draws: bytes of `text`, then the closing tag unless `finish` is `length`."""

    text: str = "ok"
    finish: FinishReason = "stop"
    steps: int = 1
    logprobs: tuple[float, ...] | None = None
    ids: tuple[int, ...] | None = None


def reply_ids(reply: Reply) -> tuple[int, ...]:
    if reply.ids is not None:
        return reply.ids
    return (*reply.text.encode(), *((CLOSE,) if reply.finish == "stop" else ()))


def logprob_of(position: int, token: int) -> float:
    """What the scripted sampler claims, told apart by position and token."""
    return -(position + 1) / 8 - token / 1024


class ScriptedEngine(GenerationEngine):
    """Answers each request with what `script` says, so many steps later."""

    def __init__(self, script: Callable[[GenerationRequest], Reply]):
        self.script = script
        self.requests: list[GenerationRequest] = []
        self.aborted: set[str] = set()
        self.loaded: list[tuple[int, list[str]]] = []
        self.closed = False
        self._version = -1
        self._work: dict[str, tuple[GenerationRequest, Reply, int, int]] = {}

    def add(self, requests: Sequence[GenerationRequest]) -> None:
        for request in requests:
            assert request.request_id not in self._work
            assert request.sampling.max_new_tokens >= 1
            self.requests.append(request)
            reply = self.script(request)
            self._work[request.request_id] = (request, reply, reply.steps, self._version)

    def step(self) -> list[GenerationOutput]:
        outputs = []
        for name, (request, reply, left, version) in list(self._work.items()):
            if left > 1:
                self._work[name] = (request, reply, left - 1, version)
                continue
            del self._work[name]
            outputs.append(self._output(request, reply, version))
        return outputs

    def _output(self, request: GenerationRequest, reply: Reply, version: int) -> GenerationOutput:
        ids, finish = reply_ids(reply), reply.finish
        if len(ids) > request.sampling.max_new_tokens:
            ids, finish = ids[: request.sampling.max_new_tokens], "length"
        logprobs = tuple(logprob_of(i, token) for i, token in enumerate(ids))
        logprobs = logprobs if reply.logprobs is None else reply.logprobs
        error = "the engine gave up" if finish == "error" else None
        return GenerationOutput(request.request_id, ids, logprobs, finish, version, self._version, error)

    @property
    def num_unfinished(self) -> int:
        return len(self._work)

    def abort(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self.aborted.add(request_id)
            self._work.pop(request_id, None)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        self.loaded.append((version, [name for name, _ in weights]))
        self._version = version

    @property
    def version(self) -> int:
        return self._version

    def close(self) -> None:
        self.closed = True


@dataclass
class ScriptedEnvironment:
    """Answers each turn with what `script` returns; an exception that it returns is raised."""

    script: Callable[[EnvTurn], EnvStep | Exception]
    turns: list[EnvTurn] = field(default_factory=list)
    started: int = 0
    needs_gold: bool = False
    closed: bool = False

    def start(self, prompt: Prompt) -> int:
        self.started += 1
        return self.started

    def step(self, turn: EnvTurn) -> EnvStep:
        self.turns.append(turn)
        answer = self.script(turn)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None:
        self.closed = True


class CountingClient(NoOpDataPlaneClient):
    """Counts puts, and fails the next one on request."""

    def __init__(self) -> None:
        super().__init__()
        self.puts = 0
        self.fail_after_writing = False
        self.register_partition(PARTITION, SC_ROLLOUT_SCHEMA_FIELDS, 64, ["train"])

    def put_samples(self, *args: Any, **kwargs: Any) -> Any:
        self.puts += 1
        meta = super().put_samples(*args, **kwargs)
        if self.fail_after_writing:
            self.fail_after_writing = False
            raise TimeoutError("the plane is slow")
        return meta


def make_prompt(index: int = 0, text: str = "q") -> Prompt:
    """A chat prompt of the test template."""
    rendered = f"<|s|>user\n{text}<|e|>\n<|s|>assistant\n"
    ids = make_tokenizer()(rendered, add_special_tokens=False)["input_ids"]
    return Prompt(index, f"row{index}", ({"role": "user", "content": text},), rendered, tuple(ids), gold="ok")


def make_order(group_id: str = "g0", *, prompt: int = 0, generations: int = 2, seed: int = 1) -> GroupOrder:
    return GroupOrder(group_id, prompt, generations, weight_version=0, target_step=3, seed=seed)


def reward_one(turn: EnvTurn) -> EnvStep:
    return EnvStep(reward=1.0)


def make_manager(
    script: Callable[[GenerationRequest], Reply],
    answers: Callable[[EnvTurn], EnvStep | Exception] = reward_one,
    *,
    max_length: int = 256,
    max_turns: int = 1,
    **failure: Any,
) -> tuple[RolloutManager, ScriptedEngine, ScriptedEnvironment]:
    engine, environment = ScriptedEngine(script), ScriptedEnvironment(answers)
    turn_tokens = TurnTokens(make_tokenizer(), "chat", SAMPLING.stop_token_ids)
    limits = RolloutLimits(max_length, max_turns)
    manager = RolloutManager(engine, environment, turn_tokens, limits, RolloutFailureConfig(**failure))
    return manager, engine, environment


def drive(manager: RolloutManager, limit_s: float = 10.0) -> list[Group]:
    """All groups, in the order in which they came out."""
    groups: list[Group] = []
    deadline = time.monotonic() + limit_s
    while manager.num_groups:
        assert time.monotonic() < deadline, "groups do not finish"
        if not manager.step():
            time.sleep(0.002)
        groups += manager.take_finished()
    return groups


def attempt_of(request: GenerationRequest) -> tuple[int, int, int]:
    """Sample, attempt and turn that a request is for."""
    sample, attempt, turn = request.request_id.rsplit("_", 3)[-3:]
    return int(sample[1:]), int(attempt[1:]), int(turn[1:])


NAN = math.nan

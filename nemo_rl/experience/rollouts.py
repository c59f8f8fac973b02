"""Drives the groups in work: sampler and environment in turn, until each episode ends or its prompt is dropped.

    start -> request to the sampler -> response -> environment -> done, or an observation -> request ...
                  ^                                   |
                  +---- a failed attempt begins again with another seed, up to the limits ----

Nothing here writes rows: finished groups are handed over, see `group_writer`.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace

from nemo_rl.data.prompts import Prompt
from nemo_rl.environments.interfaces import Environment, EnvStep, EnvTurn
from nemo_rl.experience.config import RolloutFailureConfig
from nemo_rl.experience.environment_pool import EnvironmentPool, JobResult
from nemo_rl.experience.episode import Episode, Group, draw_seed, output_failure
from nemo_rl.experience.failures import SampleFailure, environment_failure
from nemo_rl.experience.interfaces import GroupOrder
from nemo_rl.experience.turns import TurnTokens
from nemo_rl.models.generation.interfaces import GenerationEngine, GenerationOutput, GenerationRequest, SamplingParams

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RolloutLimits:
    """What ends an episode.

    Attributes:
        max_total_sequence_length: tokens of a row: prompt, responses and observations.
        max_turns: responses.
    """

    max_total_sequence_length: int
    max_turns: int = 1


class RolloutManager:
    """Owns all groups in work. Called from one thread, which is also the only one that calls the sampler.

    Rules
    - A response gets `max_new_tokens`, or what `max_total_sequence_length` leaves where that is less. An episode ends
      when the environment says so, after a cut response, when the turns are used up, or when an observation leaves no
      room for another token; the first cut and the last are `truncated`.
    - A sample fails as `SampleFailure` says, is drawn again from the prompt with another seed, and drops its whole
      prompt at the limits of the config. Tokens of a failed attempt are never seen again.
    - A first response without tokens is no failure: the row is kept for its group, without a trained token and with
      `mask_sample`, and counted as `empty_response`.

    Args:
        on_result: called, in another thread, when the environment has answered.
        env_workers: calls of the environment at the same time.
    """

    def __init__(
        self,
        engine: GenerationEngine,
        environment: Environment,
        turn_tokens: TurnTokens,
        limits: RolloutLimits,
        failure: RolloutFailureConfig,
        *,
        env_workers: int = 1,
        on_result: Callable[[], None] = lambda: None,
    ):
        self.counts: Counter[str] = Counter()
        """Failures by name, `retried_samples`, `dropped_groups`, `empty_response`; since the start."""
        self._engine = engine
        self._environment = environment
        self._turn_tokens = turn_tokens
        self._limits = limits
        self._failure = failure
        self._pool = EnvironmentPool(env_workers, failure.native.env_timeout_s, on_result)
        self._groups: dict[str, Group] = {}  # in order of their orders
        self._at_sampler: dict[str, tuple[Group, Episode]] = {}  # by request id
        self._at_environment: dict[int, tuple[Group, Episode]] = {}  # by ticket
        self._requests: list[GenerationRequest] = []
        self._next_sequence = 0

    @property
    def num_groups(self) -> int:
        """Groups in work."""
        return len(self._groups)

    def start(self, order: GroupOrder, prompt: Prompt, sampling: SamplingParams, *, evaluation: bool = False) -> None:
        """Takes an order.

        Raises:
            ValueError: a group of that name is in work, or no sample is wanted.
        """
        if order.group_id in self._groups:
            raise ValueError(f"group {order.group_id} is in work already")
        if order.num_generations < 1:
            raise ValueError(f"group {order.group_id} wants {order.num_generations} samples")
        episodes = [Episode(index, prompt) for index in range(order.num_generations)]
        group = self._groups[order.group_id] = Group(
            order, episodes, sampling, evaluation, sequence=self._next_sequence
        )
        self._next_sequence += 1
        limit = self._limits.max_total_sequence_length
        if len(prompt.prompt_ids) >= limit:
            detail = f"{len(prompt.prompt_ids)} tokens leave no room in max_total_sequence_length ({limit})"
            self._drop(group, SampleFailure("data", "prompt_too_long", f"{prompt.source_id}: {detail}"))
            return
        for episode in episodes:
            episode.begin()
            self._request(group, episode)

    def step(self) -> bool:
        """Advances every sample that can be; whether anything happened."""
        if self._requests:
            requests, self._requests = self._requests, []
            self._engine.add(requests)
        outputs = self._engine.step() if self._engine.num_unfinished else []
        advanced = bool(outputs) or self._engine.num_unfinished > 0
        for output in outputs:
            self._on_output(output)
        for result in self._pool.poll():
            self._on_environment(result)
            advanced = True
        self._expire()
        return advanced or bool(self._requests)

    def take_finished(self) -> list[Group]:
        """Groups that are finished or dropped, in the order of their orders; they are no longer in work here."""
        finished = [group for group in self._groups.values() if group.finished]
        for group in finished:
            del self._groups[group.order.group_id]
        return finished

    def abort(self, group_ids: Collection[str]) -> None:
        """Forgets groups; those that are not in work are no error. They never come out."""
        for group_id in group_ids:
            group = self._groups.pop(group_id, None)
            if group is not None:
                self._forget(group)

    def close(self) -> None:
        """Forgets everything and ends the threads. The sampler and the environment are the caller's."""
        self.abort(list(self._groups))
        self._pool.close()

    def _request(self, group: Group, episode: Episode) -> None:
        sampling = group.sampling
        room = self._limits.max_total_sequence_length - len(episode.context)
        order, attempt, turn = group.order, episode.attempt, episode.turns
        episode.request_id = f"{order.group_id}_g{episode.index}_a{attempt}_t{turn}"
        limit = self._failure.native.generation_timeout_s
        episode.deadline = None if limit is None else time.monotonic() + limit
        self._at_sampler[episode.request_id] = (group, episode)
        self._requests.append(
            GenerationRequest(
                request_id=episode.request_id,
                prompt_ids=tuple(episode.context),
                sampling=replace(sampling, max_new_tokens=min(sampling.max_new_tokens, room)),
                seed=draw_seed(order, episode.index, attempt, turn),
            )
        )

    def _on_output(self, output: GenerationOutput) -> None:
        # A response of this very step has no owner any more when one before it dropped their group.
        owner = self._at_sampler.pop(output.request_id, None)
        if owner is None:
            return
        group, episode = owner
        failure = output_failure(output)
        if failure is not None:
            self._fail(group, episode, failure)
            return
        text = self._turn_tokens.response_text(output.token_ids)
        if not output.token_ids and episode.turns == 0:
            self.counts["empty_response"] += 1
        episode.add_response(output, text)
        turn = EnvTurn(
            prompt=episode.prompt,
            state=episode.env_state,
            messages=tuple(episode.messages),
            response_text=text,
            response_ids=output.token_ids,
            truncated=episode.truncated,
            turn=episode.turns - 1,
        )
        self._at_environment[self._pool.submit(lambda: self._ask(turn))] = (group, episode)

    def _ask(self, turn: EnvTurn) -> tuple[EnvTurn, EnvStep]:
        """The environment's answer; runs in one of its threads."""
        if turn.turn == 0:
            turn = replace(turn, state=self._environment.start(turn.prompt))
        return turn, self._environment.step(turn)

    def _on_environment(self, result: JobResult) -> None:
        # A ticket without an owner belongs to a group that was dropped or aborted meanwhile.
        owner = self._at_environment.pop(result.ticket, None)
        if owner is None:
            return
        group, episode = owner
        failure = self._environment_failure(result)
        if failure is not None:
            self._fail(group, episode, failure)
            return
        turn, answer = result.value
        episode.env_state = turn.state
        episode.reward += answer.reward
        for name, value in answer.metrics.items():
            episode.env_metrics[name] += value
        if answer.done or episode.truncated or not turn.response_ids or episode.turns >= self._limits.max_turns:
            episode.finished = True
            return
        messages = tuple(answer.observation)
        token_ids = self._turn_tokens.observation_ids(episode.prompt, episode.messages, messages, turn.response_ids)
        if len(episode.context) + len(token_ids) >= self._limits.max_total_sequence_length:
            episode.truncated = episode.finished = True
            return
        episode.add_observation(token_ids, messages)
        self._request(group, episode)

    def _environment_failure(self, result: JobResult) -> SampleFailure | None:
        if result.timed_out:
            limit = self._failure.native.env_timeout_s
            return SampleFailure("infra", "env_timeout", f"no reward within env_timeout_s ({limit} s)")
        if result.error is not None:
            return environment_failure(result.error)
        reward = result.value[1].reward
        if not math.isfinite(reward):
            return SampleFailure("data", "nonfinite_reward", f"the reward is {reward}")
        return None

    def _expire(self) -> None:
        """Fails the samples whose response did not come in time."""
        if self._failure.native.generation_timeout_s is None:
            return
        now = time.monotonic()
        late = [request_id for request_id, (_, ep) in self._at_sampler.items() if ep.deadline and ep.deadline < now]
        for request_id in late:
            owner = self._at_sampler.pop(request_id, None)
            if owner is None:
                continue
            self._abort_requests([request_id])
            limit = self._failure.native.generation_timeout_s
            self._fail(*owner, SampleFailure("infra", "generation_timeout", f"no response within {limit} s"))

    def _fail(self, group: Group, episode: Episode, failure: SampleFailure) -> None:
        self.counts[failure.name] += 1
        episode.failures[failure.kind] += 1
        config = self._failure
        limits = {"infra": config.max_infra_attempts_per_prompt, "data": config.max_data_attempts_per_prompt}
        if episode.failures[failure.kind] >= limits[failure.kind]:
            self._drop(group, failure)
            return
        self.counts["retried_samples"] += 1
        episode.begin()
        self._request(group, episode)

    def _drop(self, group: Group, failure: SampleFailure) -> None:
        self.counts["dropped_groups"] += 1
        group.failure = failure
        log.warning("group %s is dropped: %s", group.order.group_id, failure)
        self._forget(group)

    def _forget(self, group: Group) -> None:
        """Takes the group's samples back from the sampler and the environment."""
        gone = [request_id for request_id, (owner, _) in self._at_sampler.items() if owner is group]
        for request_id in gone:
            del self._at_sampler[request_id]
        self._abort_requests(gone)
        for ticket in [ticket for ticket, (owner, _) in self._at_environment.items() if owner is group]:
            del self._at_environment[ticket]

    def _abort_requests(self, request_ids: Iterable[str]) -> None:
        gone = set(request_ids)
        self._requests = [request for request in self._requests if request.request_id not in gone]
        self._engine.abort(gone)

"""Groups in work, with a scripted sampler and environment: which tokens are trained, what is retried and dropped.

Not covered: a real sampler (see the functional test) and what the controller does about a dropped prompt.
"""

import math
import threading
import time
from dataclasses import replace
from typing import Any

import pytest
from tiny import make_tokenizer
from unit.experience.fakes import (
    CLOSE,
    NAN,
    SAMPLING,
    Reply,
    attempt_of,
    drive,
    logprob_of,
    make_manager,
    make_order,
    make_prompt,
)

from nemo_rl.environments.calculator import Calculator
from nemo_rl.environments.interfaces import EnvStep
from nemo_rl.experience.episode import draw_seed


def test_one_turn_to_the_token():
    manager, engine, environment = make_manager(lambda request: Reply("ok"))
    prompt = make_prompt()
    manager.start(make_order(generations=2), prompt, SAMPLING)
    (group,) = drive(manager)
    for episode in group.episodes:
        assert episode.context == [*prompt.prompt_ids, *b"ok", CLOSE]
        assert episode.drawn == [False] * len(prompt.prompt_ids) + [True] * 3
        drawn = [logprob_of(0, ord("o")), logprob_of(1, ord("k")), logprob_of(2, CLOSE)]
        assert episode.logprobs == [0.0] * len(prompt.prompt_ids) + drawn
    assert [turn.response_text for turn in environment.turns] == ["ok", "ok"]
    assert environment.turns[0].messages == ({"role": "user", "content": "q"}, {"role": "assistant", "content": "ok"})
    assert environment.turns[0].response_ids == (*b"ok", CLOSE)
    stats = group.episodes[0].stats()
    assert (stats.reward, stats.response_tokens, stats.total_tokens) == (1.0, 3, len(prompt.prompt_ids) + 3)
    assert (stats.turns, stats.truncated, stats.finish_reason) == (1, False, "stop")
    assert (group.attempts, engine.num_unfinished, manager.counts.total()) == (1, 0, 0)


def test_observations_are_context_and_never_trained():
    replies = ["<calc>6*7</calc>", "so <calc>1/0</calc>", "42"]
    manager, _, environment = make_manager(lambda request: Reply(replies[attempt_of(request)[2]]), max_turns=4)
    calculator = Calculator()
    environment.script = lambda turn: calculator.step(replace(turn, prompt=replace(turn.prompt, gold="42")))
    manager.start(make_order(generations=1), make_prompt(text="6*7?"), SAMPLING)
    episode = drive(manager)[0].episodes[0]
    text = (
        "<|s|>user\n6*7?<|e|>\n<|s|>assistant\n<calc>6*7</calc><|e|>\n<|s|>user\n42<|e|>\n<|s|>assistant\n"
        "so <calc>1/0</calc><|e|>\n<|s|>user\nerror: division by zero<|e|>\n<|s|>assistant\n42<|e|>"
    )
    tokenizer = make_tokenizer()
    assert episode.context == tokenizer(text, add_special_tokens=False)["input_ids"]
    drawn = [token for token, is_drawn in zip(episode.context, episode.drawn, strict=True) if is_drawn]
    assert drawn == [*b"<calc>6*7</calc>", CLOSE, *b"so <calc>1/0</calc>", CLOSE, *b"42", CLOSE]
    # The slow reference: the log-probs of each response, in order, on the columns of its own tokens.
    expected = [logprob_of(i, token) for reply in replies for i, token in enumerate((*reply.encode(), CLOSE))]
    assert [p for p, is_drawn in zip(episode.logprobs, episode.drawn, strict=True) if is_drawn] == expected
    assert all(p == 0.0 for p, is_drawn in zip(episode.logprobs, episode.drawn, strict=True) if not is_drawn)
    assert episode.stats().env == {"calc_calls": 2.0, "calc_errors": 1.0}
    assert (episode.reward, episode.turns, episode.truncated) == (1.0, 3, False)
    assert episode.response.splitlines()[:2] == ["[assistant] <calc>6*7</calc>", "[user] 42"]
    assert [turn.turn for turn in environment.turns] == [0, 1, 2]
    assert {turn.state for turn in environment.turns} == {1}


def test_a_response_without_its_closing_tag_gets_it_as_context():
    """Stopped by EOS, which is not the template's tag."""
    ids = (*b"a", 258)
    manager, _, _ = make_manager(
        lambda request: Reply(ids=ids),
        lambda turn: EnvStep(0.0, done=turn.turn == 1, observation=({"role": "user", "content": "b"},)),
        max_turns=2,
    )
    prompt = make_prompt()
    manager.start(make_order(generations=1), prompt, SAMPLING)
    episode = drive(manager)[0].episodes[0]
    between = make_tokenizer()("<|e|>\n<|s|>user\nb<|e|>\n<|s|>assistant\n", add_special_tokens=False)["input_ids"]
    assert episode.context == [*prompt.prompt_ids, *ids, *between, *ids]
    length = len(prompt.prompt_ids)
    assert episode.drawn == [False] * length + [True] * 2 + [False] * len(between) + [True] * 2


def again(turn: Any) -> EnvStep:
    return EnvStep(0.5, done=False, observation=({"role": "user", "content": "more"},), metrics={"asked": 1.0})


def test_turns_are_used_up():
    manager, engine, _ = make_manager(lambda request: Reply("x"), again, max_turns=3)
    manager.start(make_order(generations=1), make_prompt(), SAMPLING)
    stats = drive(manager)[0].episodes[0].stats()
    assert (stats.turns, stats.reward, stats.truncated, stats.env) == (3, 1.5, False, {"asked": 3.0})
    assert len(engine.requests) == 3


def test_a_cut_response_ends_the_episode_and_is_truncated():
    manager, _, environment = make_manager(lambda request: Reply("abcdefgh"), again, max_turns=3)
    manager.start(make_order(generations=1), make_prompt(), replace(SAMPLING, max_new_tokens=4))
    episode = drive(manager)[0].episodes[0]
    assert environment.turns[0].truncated
    assert environment.turns[0].response_text == "abcd"
    assert (episode.truncated, episode.turns, episode.response_tokens) == (True, 1, 4)
    assert episode.stats().finish_reason == "length"


def test_the_row_never_outgrows_its_limit():
    prompt = make_prompt()
    room = 6
    manager, engine, _ = make_manager(lambda request: Reply("abcdefghijkl"), max_length=len(prompt.prompt_ids) + room)
    manager.start(make_order(generations=1), prompt, SAMPLING)
    episode = drive(manager)[0].episodes[0]
    assert engine.requests[0].sampling.max_new_tokens == room
    assert len(episode.context) == len(prompt.prompt_ids) + room
    assert episode.truncated


def test_an_observation_without_room_after_it_ends_the_episode():
    prompt = make_prompt()
    observation = make_tokenizer()("\n<|s|>user\nmore<|e|>\n<|s|>assistant\n", add_special_tokens=False)["input_ids"]
    for spare, turns in ((0, 1), (1, 2)):
        limit = len(prompt.prompt_ids) + 2 + len(observation) + spare
        manager, _, _ = make_manager(lambda request: Reply("x"), again, max_length=limit, max_turns=2)
        manager.start(make_order(generations=1), prompt, SAMPLING)
        episode = drive(manager)[0].episodes[0]
        assert (episode.turns, episode.truncated) == (turns, True)
        assert len(episode.context) == (len(prompt.prompt_ids) + 2 if turns == 1 else limit)


def test_a_prompt_that_fills_the_row_is_dropped_by_name():
    prompt = make_prompt()
    manager, engine, _ = make_manager(lambda request: Reply(), max_length=len(prompt.prompt_ids))
    manager.start(make_order(), prompt, SAMPLING)
    (group,) = drive(manager)
    assert group.failure is not None
    assert group.failure.name == "prompt_too_long"
    assert group.attempts == 0
    assert not engine.requests


def test_an_empty_response_is_kept_without_a_trained_token():
    manager, _, environment = make_manager(lambda request: Reply(ids=()), again, max_turns=3)
    manager.start(make_order(generations=1), make_prompt(), SAMPLING)
    episode = drive(manager)[0].episodes[0]
    assert episode.response_tokens == 0
    assert not any(episode.drawn)
    assert (episode.turns, episode.start_version) == (1, -1)
    assert environment.turns[0].response_text == ""
    assert manager.counts == {"empty_response": 1}


@pytest.mark.parametrize(
    ("bad", "name"),
    [
        (Reply("ok", logprobs=(-1.0, NAN, -1.0)), "bad_logprobs"),
        (Reply("ok", logprobs=(-1.0, -math.inf, -1.0)), "bad_logprobs"),
        (Reply("ok", logprobs=(-1.0,)), "bad_logprobs"),
        (Reply("ok", finish="error"), "generation_error"),
    ],
)
def test_a_bad_sample_is_drawn_again_with_another_seed(bad: Reply, name: str):
    def script(request: Any) -> Reply:
        sample, attempt, _ = attempt_of(request)
        return bad if sample == 1 and attempt < 2 else Reply("fine")

    manager, engine, environment = make_manager(script)
    manager.start(make_order(generations=3), make_prompt(), SAMPLING)
    (group,) = drive(manager)
    assert group.failure is None
    assert manager.counts == {name: 2, "retried_samples": 2}
    assert [episode.attempt for episode in group.episodes] == [0, 2, 0]
    assert group.attempts == 3
    assert len({request.seed for request in engine.requests}) == 5
    assert all(bytes(episode.context).endswith(b"fine") for episode in map(without_close, group.episodes))
    assert len(environment.turns) == 3


def without_close(episode: Any) -> Any:
    kept = [token for token in episode.context if token < 256]
    return type("Bytes", (), {"context": kept})


def test_infrastructure_failures_drop_the_prompt_at_their_limit():
    manager, engine, _ = make_manager(
        lambda request: Reply(finish="error") if attempt_of(request)[0] == 0 else Reply("slow", steps=99),
        max_infra_attempts_per_prompt=3,
    )
    manager.start(make_order(generations=2), make_prompt(), SAMPLING)
    (group,) = drive(manager)
    assert group.failure is not None
    assert str(group.failure) == "generation_error: the engine gave up"
    assert group.attempts == 3
    assert manager.counts == {"generation_error": 3, "retried_samples": 2, "dropped_groups": 1}
    # What the prompt's other sample had in work is taken back.
    assert "g0_g1_a0_t0" in engine.aborted
    assert engine.num_unfinished == 0


@pytest.mark.parametrize(
    ("answer", "name", "attempts"),
    [
        (KeyError("answer"), "env_error", 2),
        (ConnectionError("the judge is away"), "env_error", 5),
        (EnvStep(NAN), "nonfinite_reward", 2),
        (EnvStep(math.inf), "nonfinite_reward", 2),
    ],
)
def test_an_environment_that_always_fails_drops_the_prompt(answer: Any, name: str, attempts: int):
    manager, _, environment = make_manager(lambda request: Reply(), lambda turn: answer)
    manager.start(make_order(generations=1), make_prompt(), SAMPLING)
    (group,) = drive(manager)
    assert group.failure is not None
    assert group.failure.name == name
    assert group.attempts == attempts == len(environment.turns)
    assert manager.counts == {name: attempts, "retried_samples": attempts - 1, "dropped_groups": 1}


def test_a_failed_attempt_leaves_nothing_behind():
    """The second turn fails once; the whole episode starts again from the prompt."""

    def answers(turn: Any) -> Any:
        if turn.turn == 1 and turn.state == 1:
            return RuntimeError("once")
        return again(turn)

    manager, _, environment = make_manager(lambda request: Reply("x"), answers, max_turns=2)
    manager.start(make_order(generations=1), make_prompt(), SAMPLING)
    episode = drive(manager)[0].episodes[0]
    assert [(turn.turn, turn.state) for turn in environment.turns] == [(0, 1), (1, 1), (0, 2), (1, 2)]
    assert (episode.reward, episode.turns, episode.response_tokens) == (1.0, 2, 4)
    assert episode.env_metrics == {"asked": 2.0}
    assert sum(turn["role"] == "assistant" for turn in episode.messages) == 2


def test_an_environment_that_hangs_is_given_up():
    release = threading.Event()

    def answers(turn: Any) -> EnvStep:
        if turn.state == 1:
            release.wait(20)
        return EnvStep(1.0)

    manager, _, _ = make_manager(lambda request: Reply(), answers, native={"env_timeout_s": 0.2})
    manager.start(make_order(generations=1), make_prompt(), SAMPLING)
    started = time.monotonic()
    (group,) = drive(manager)
    release.set()
    assert time.monotonic() - started < 5
    assert group.failure is None
    assert manager.counts == {"env_timeout": 1, "retried_samples": 1}
    assert group.episodes[0].failures == {"infra": 1}


def test_a_sampler_that_never_answers_drops_the_prompt():
    manager, engine, _ = make_manager(
        lambda request: Reply(steps=10**9), max_infra_attempts_per_prompt=2, native={"generation_timeout_s": 0.1}
    )
    manager.start(make_order(generations=1), make_prompt(), SAMPLING)
    (group,) = drive(manager)
    assert group.failure is not None
    assert group.failure.name == "generation_timeout"
    assert engine.aborted >= {"g0_g0_a0_t0", "g0_g0_a1_t0"}
    assert engine.num_unfinished == 0


def test_finished_groups_come_in_the_order_of_their_orders():
    """Those that finish together; one that is ready earlier does not wait."""
    first_is_out = threading.Event()

    def answers(turn: Any) -> EnvStep:
        assert turn.prompt.index == 1 or first_is_out.wait(10)
        return EnvStep(1.0)

    manager, _, _ = make_manager(lambda request: Reply(steps=1 if request.request_id[:2] == "g1" else 9), answers)
    for index in range(3):
        manager.start(make_order(f"g{index}"), make_prompt(index), SAMPLING)
    deadline = time.monotonic() + 10
    while not (ready := manager.take_finished()) and time.monotonic() < deadline:
        manager.step()
    first_is_out.set()
    assert [group.order.group_id for group in ready] == ["g1"]
    assert [group.order.group_id for group in drive(manager)] == ["g0", "g2"]


def test_an_aborted_group_never_comes_out():
    manager, engine, environment = make_manager(lambda request: Reply(steps=3))
    for name in ("g0", "g1"):
        manager.start(make_order(name), make_prompt(), SAMPLING)
    manager.abort(["g0", "unknown"])
    assert [group.order.group_id for group in drive(manager)] == ["g1"]
    assert {request.request_id[:2] for request in engine.requests} == {"g1"}
    manager.start(make_order("g0"), make_prompt(), SAMPLING)
    manager.step()
    manager.abort(["g0"])
    assert engine.num_unfinished == 0
    assert len(environment.turns) == 2
    # Its name is free again.
    manager.start(make_order("g0"), make_prompt(), SAMPLING)
    assert len(drive(manager)) == 1


def test_orders_that_make_no_sense():
    manager, _, _ = make_manager(lambda request: Reply())
    manager.start(make_order(), make_prompt(), SAMPLING)
    with pytest.raises(ValueError, match="g0 is in work already"):
        manager.start(make_order(), make_prompt(), SAMPLING)
    with pytest.raises(ValueError, match="g1 wants 0 samples"):
        manager.start(make_order("g1", generations=0), make_prompt(), SAMPLING)


def test_seeds_depend_on_the_group_its_sample_attempt_and_turn_only():
    order = make_order(seed=5)
    seeds = {draw_seed(order, sample, attempt, turn) for sample in range(4) for attempt in range(3) for turn in (0, 1)}
    assert len(seeds) == 24
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert draw_seed(make_order("other", seed=5), 1, 1, 1) == draw_seed(order, 1, 1, 1)
    assert draw_seed(make_order(seed=6), 1, 1, 1) != draw_seed(order, 1, 1, 1)

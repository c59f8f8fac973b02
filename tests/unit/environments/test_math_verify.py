"""Mathematical answers in several spellings, and answers that take for ever, in a thread that is not the main one.

Not covered: what the library itself can and can't parse beyond these.
"""

import threading
import time
from collections.abc import Iterator

import pytest
from unit.environments.test_rewards import make_turn

from nemo_rl.environments.interfaces import EnvStep
from nemo_rl.environments.math_verify import MathVerify


@pytest.fixture(scope="module")
def environment() -> Iterator[MathVerify]:
    made = MathVerify(time_limit_s=2.0)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("gold", "response", "reward", "found"),
    [
        ("1/2", r"so it is \boxed{0.5}", 1.0, 1.0),
        (r"\frac{1}{2}", r"\boxed{1/2}", 1.0, 1.0),
        (r"\frac{1}{2}", "The answer is 0.5", 1.0, 1.0),
        ("0.5", r"$\frac{2}{4}$", 1.0, 1.0),
        ("x+1", "$1+x$", 1.0, 1.0),
        (1000, "1,000", 1.0, 1.0),
        ("42", "#### 42", 1.0, 1.0),
        ("42", "#### 43", 0.0, 1.0),
        ("42", "I do not know", 0.0, 0.0),
        ("42", "", 0.0, 0.0),
        ("42", "\\boxed{\u2028\\frac{}", 0.0, 0.0),
    ],
)
def test_spellings(environment: MathVerify, gold: object, response: str, reward: float, found: float):
    step = environment.step(make_turn(response, gold))
    assert step.reward == reward
    assert step.done
    if response != "\\boxed{\u2028\\frac{}":
        assert dict(step.metrics) == {"answer_found": found, "verify_failed": 0.0}


def test_a_gold_answer_that_is_no_mathematics_is_a_failure(environment: MathVerify):
    with pytest.raises(ValueError, match=r"row0: the gold answer '' can't be parsed"):
        environment.step(make_turn("42", ""))


def test_what_takes_for_ever_is_cut_off_in_any_thread(environment: MathVerify):
    steps: list[EnvStep] = []
    seconds: list[float] = []

    def work() -> None:
        start = time.monotonic()
        steps.append(environment.step(make_turn(r"\boxed{9^{9^{9^{9}}}}", "42")))
        seconds.append(time.monotonic() - start)
        steps.append(environment.step(make_turn(r"\boxed{42}", "42")))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    assert [step.reward for step in steps] == [0.0, 1.0]
    assert steps[0].metrics["verify_failed"] == 1.0
    assert seconds[0] < 6.0


def test_two_threads_have_a_process_each(environment: MathVerify):
    rewards: list[float] = []

    def work(gold: int) -> None:
        for answer in (gold, gold + 1):
            rewards.append(environment.step(make_turn(f"\\boxed{{{answer}}}", str(gold))).reward)

    threads = [threading.Thread(target=work, args=(gold,)) for gold in (5, 50)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(rewards) == [0.0, 0.0, 1.0, 1.0]

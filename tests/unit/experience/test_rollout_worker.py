"""The rollout process's calls with a scripted sampler and an in-memory plane: orders in, rows and results out.

Not covered: a real sampler, a plane shared by processes, the process itself (see the functional test).
"""

import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter, ValidationError
from tiny import DATA, make_tokenizer
from unit.experience.fakes import (
    PARTITION,
    CountingClient,
    Reply,
    ScriptedEngine,
    attempt_of,
    make_order,
)

from nemo_rl.data.prompts import PromptDataConfig, RLDataConfig
from nemo_rl.data_plane.interfaces import LocalDataPlaneConfig
from nemo_rl.environments.config import EnvConfig
from nemo_rl.experience.config import RolloutFailureConfig, RolloutWorkerConfig
from nemo_rl.experience.rollout_worker import RolloutWorker
from nemo_rl.models.generation.config import GenerationConfig
from nemo_rl.utils.errors import RunError, UserError

ANSWERS = ["up", "down", "left", "right"]


def read_weights(refs: Any) -> Iterator[tuple[str, torch.Tensor]]:
    for name in refs:
        yield name, torch.zeros(1)


class Started:
    """A worker, the sampler in it, and its plane."""

    def __init__(self, folder: Path, script: Callable[[Any], Reply], **changes: Any):
        source = folder / "b21_prompts.jsonl"
        source.write_bytes((DATA / "cases" / "b21_prompts.jsonl").read_bytes())
        prompts = PromptDataConfig(path=str(source))
        values: dict[str, Any] = {
            "model_name": "none",
            "data": RLDataConfig(train=prompts),
            "env": TypeAdapter(EnvConfig).validate_python({"name": "exact_match"}),
            "generation": GenerationConfig(max_new_tokens=16),
            "failure": RolloutFailureConfig(),
            "partition_id": PARTITION,
            "max_total_sequence_length": 128,
        }
        self.engine = ScriptedEngine(script)
        self.worker = RolloutWorker(
            RolloutWorkerConfig(**{**values, **changes}),
            make_tokenizer(),
            read_weights=f"{__file__}:read_weights",
            build_engine=lambda: self.engine,
        )
        self.info = self.worker.initialize()
        self.client = CountingClient()
        self.worker._client = self.client


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Started]]:
    made: list[Started] = []

    def build(script: Callable[[Any], Reply], **changes: Any) -> Started:
        made.append(Started(tmp_path, script, **changes))
        return made[-1]

    yield build
    for started in made:
        started.worker.shutdown()
        started.worker.shutdown()


def say_the_prompt(request: Any) -> Reply:
    """The right answer for even samples; the test prompts are `Say up` and so on."""
    text = bytes(token for token in request.prompt_ids if token < 256).decode()
    word = text.split("Say ")[1].split("\n")[0].removesuffix("assistant")
    return Reply(word if attempt_of(request)[0] % 2 == 0 else "nothing")


def collect_all(worker: RolloutWorker, count: int) -> list[Any]:
    results: list[Any] = []
    deadline = time.monotonic() + 20
    while len(results) < count:
        assert time.monotonic() < deadline
        results += worker.collect(max_groups=count - len(results), timeout_s=0.5)
    return results


def test_orders_become_rows(start: Callable[..., Started], tmp_path: Path):
    started = start(say_the_prompt, rollouts_path=str(tmp_path / "runs" / "rollouts.jsonl"))
    worker, client = started.worker, started.client
    assert (started.info.train_prompts, started.info.validation_prompts, started.info.left_out) == (4, 0, {})
    assert worker.collect(max_groups=8, timeout_s=5) == []
    orders = [make_order(f"g{i}", prompt=index, generations=2) for i, index in enumerate((2, 0, 3))]
    worker.submit(orders)
    results = worker.collect(max_groups=8, timeout_s=20, min_groups=3)
    assert client.puts == 1
    assert [result.group_id for result in results] == ["g0", "g1", "g2"]
    assert [result.meta.tags[0]["source_id"] for result in results] == ["p2", "p0", "p3"]
    assert [[sample.reward for sample in result.samples] for result in results] == [[1.0, 0.0]] * 3
    assert client.list_sample_ids(PARTITION) == ["g0_g0", "g0_g1", "g1_g0", "g1_g1", "g2_g0", "g2_g1"]
    table = worker.sample_table(2)
    assert [(answer.response, answer.reward) for answer in table] == [("right", 1.0), ("nothing", 0.0)]
    assert table[0].prompt == "<|s|>user\nSay right<|e|>\n<|s|>assistant\n"
    lines = [json.loads(line) for line in (tmp_path / "runs" / "rollouts.jsonl").read_text().splitlines()]
    assert [(line["group"], line["sample"], line["reward"]) for line in lines[:2]] == [("g0", 0, 1.0), ("g0", 1, 0.0)]
    assert len(lines) == 6
    assert lines[0] | {"prompt": ""} == {
        "step": 3,
        "group": "g0",
        "sample": 0,
        "source_id": "p2",
        "prompt": "",
        "response": "left",
        "reward": 1.0,
        "tokens": 5,
        "truncated": False,
        "version": -1,
    }


def test_collect_waits_for_what_it_is_asked_for(start: Callable[..., Started]):
    gate = threading.Event()

    def script(request: Any) -> Reply:
        if request.request_id.startswith("g1"):
            gate.wait(20)
        return Reply("up")

    worker = start(script).worker
    worker.submit([make_order("g0")])
    assert [result.group_id for result in worker.collect(8, timeout_s=20)] == ["g0"]
    worker.submit([make_order("g1")])
    began = time.monotonic()
    assert worker.collect(8, timeout_s=0.3) == []
    assert 0.25 < time.monotonic() - began < 5
    assert worker.status().in_flight == 1
    gate.set()
    assert [result.group_id for result in worker.collect(8, timeout_s=20)] == ["g1"]
    assert worker.status().idle_s == 0.0


def test_at_most_max_groups_and_in_the_order_of_the_orders(start: Callable[..., Started]):
    worker = start(lambda request: Reply(steps=5 if request.request_id.startswith("g0") else 1)).worker
    worker.submit([make_order(f"g{i}") for i in range(4)])
    first = worker.collect(max_groups=3, timeout_s=20, min_groups=4)
    assert [result.group_id for result in first] == ["g0", "g1", "g2"]
    assert [result.group_id for result in worker.collect(8, timeout_s=20)] == ["g3"]


def test_a_failed_put_can_be_collected_again(start: Callable[..., Started]):
    started = start(say_the_prompt)
    started.worker.submit([make_order("g0"), make_order("g1")])
    started.client.fail_after_writing = True
    with pytest.raises(TimeoutError):
        started.worker.collect(8, timeout_s=20, min_groups=2)
    assert started.client.list_sample_ids(PARTITION) == []
    results = started.worker.collect(8, timeout_s=20)
    assert [result.group_id for result in results] == ["g0", "g1"]
    assert len(started.worker.sample_table(99)) == 4


def test_abort_leaves_no_row(start: Callable[..., Started]):
    started = start(lambda request: Reply(steps=10**9 if request.request_id.startswith("g2") else 1))
    worker = started.worker
    worker.submit([make_order("g0"), make_order("g1"), make_order("g2"), make_order("g3")])
    assert len(worker.collect(2, timeout_s=20, min_groups=3)) == 2  # g0 and g1 are written, g3 is finished
    assert started.client.list_sample_ids(PARTITION) == ["g0_g0", "g0_g1", "g1_g0", "g1_g1"]
    worker.abort(["g0", "g2", "g3", "unknown"])
    assert started.client.list_sample_ids(PARTITION) == ["g1_g0", "g1_g1"]
    assert (worker.status().in_flight, worker.status().finished) == (0, 0)
    assert worker.collect(8, timeout_s=5) == []
    assert started.engine.num_unfinished == 0


def test_a_dropped_group_is_a_result_without_rows(start: Callable[..., Started]):
    def script(request: Any) -> Reply:
        return Reply(finish="error") if request.request_id.startswith("g0") else Reply("up")

    started = start(script, failure=RolloutFailureConfig(max_infra_attempts_per_prompt=2))
    started.worker.submit([make_order("g0"), make_order("g1")])
    dropped, ready = collect_all(started.worker, 2)
    assert (dropped.status, dropped.reason, dropped.meta, dropped.attempts) == ("dropped", "generation_error", None, 2)
    assert ready.status == "ready"
    assert started.client.list_sample_ids(PARTITION) == ["g1_g0", "g1_g1"]
    counts = started.worker.status().counts
    assert counts["dropped_groups"] == 1
    assert counts["generation_error"] >= 2


def test_weights_come_between_steps_and_rows_carry_their_versions(start: Callable[..., Started]):
    started = start(lambda request: Reply(steps=10**9 if request.prompt_ids and not gate.is_set() else 1))
    gate = threading.Event()
    worker, engine = started.worker, started.engine
    assert worker.load_weights(["w0", "w1"], 4) == 4
    assert engine.loaded == [(4, ["w0", "w1"])]
    assert worker.status().version == 4
    worker.submit([make_order("g0", generations=1)])
    while not engine.requests:
        time.sleep(0.01)
    assert worker.load_weights([], 5) == 5
    request, _, _, version = engine._work.pop("g0_g0_a0_t0")
    engine._work["g0_g0_a0_t0"] = (request, Reply("up"), 1, version)
    (result,) = worker.collect(1, timeout_s=20)
    assert (result.start_version, result.end_version) == (4, 5)
    assert result.meta.tags[0]["weight_version"] == 4


def test_evaluation_writes_nothing_and_leaves_out_what_failed(start: Callable[..., Started]):
    def script(request: Any) -> Reply:
        if not request.request_id.startswith("evaluation"):
            return Reply(steps=10**9)
        return Reply(finish="error") if b"left" in bytes(t for t in request.prompt_ids if t < 256) else Reply("up")

    started = start(script)
    worker, engine = started.worker, started.engine
    worker.submit([make_order("g0")])
    stats = worker.evaluate([1, 0, 2, 3], sampling={"temperature": 0.0, "max_new_tokens": 7})
    assert [sample.reward for sample in stats] == [0.0, 1.0, 0.0]
    drawn = [request for request in engine.requests if request.request_id.startswith("evaluation")]
    assert {(request.sampling.temperature, request.sampling.max_new_tokens) for request in drawn} == {(0.0, 7)}
    assert started.client.puts == 0
    assert worker.sample_table(5) == []
    assert worker.status().in_flight == 1
    before = {request.prompt_ids: request.seed for request in drawn if request.request_id.endswith("_a0_t0")}
    worker.evaluate([1, 0, 2, 3])
    again = [request for request in engine.requests if request.request_id.startswith("evaluation2")]
    assert all(before[request.prompt_ids] == request.seed for request in again if request.request_id.endswith("a0_t0"))
    assert {request.sampling.temperature for request in again} == {1.0}
    with pytest.raises(RunError, match=r"validation: 0 of 1 samples are drawn after 0.2 s"):
        engine.script = lambda request: Reply(steps=10**9)
        worker.evaluate([0], timeout_s=0.2)


def test_validation_prompts_of_their_own(start: Callable[..., Started], tmp_path: Path):
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text('{"question": "Say yes", "answer": "yes"}\n{"question": "no gold"}\n')
    train = PromptDataConfig(path=str(tmp_path / "b21_prompts.jsonl"))
    data = RLDataConfig(train=train, validation=PromptDataConfig(path=str(held_out)), max_prompt_length=100)
    started = start(lambda request: Reply("yes"), data=data)
    assert (started.info.validation_prompts, dict(started.info.left_out)) == (1, {"no_gold": 1})
    assert [sample.reward for sample in started.worker.evaluate([0])] == [1.0]


def test_what_goes_wrong_in_the_thread_is_raised_by_the_next_call(start: Callable[..., Started]):
    def script(request: Any) -> Reply:
        raise ArithmeticError("the engine fell over")

    worker = start(script).worker
    with pytest.raises(IndexError, match="prompt 9 of 4"):
        worker.submit([make_order("g0", prompt=9)])
    worker.submit([make_order("g0")])
    with pytest.raises(RunError, match="rollouts have ended: ArithmeticError: the engine fell over"):
        worker.collect(1, timeout_s=20)
    for call in (worker.status, lambda: worker.submit([]), lambda: worker.load_weights([], 1)):
        with pytest.raises(RunError, match="the engine fell over"):
            call()


def test_what_is_wrong_before_the_start(tmp_path: Path, start: Callable[..., Started]):
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    with pytest.raises(UserError, match="has no usable prompt"):
        start(say_the_prompt, data=RLDataConfig(train=PromptDataConfig(path=str(empty))))
    with pytest.raises(UserError, match=r"read_weights: nomodule.f can't be imported"):
        RolloutWorker(start(say_the_prompt).worker.config, make_tokenizer(), read_weights="nomodule.f")
    with pytest.raises(ValidationError, match="replace needs max_replacement_attempts"):
        RolloutFailureConfig(on_dropped_prompt="replace", max_replacement_attempts=0)


def test_it_attaches_to_a_plane_and_frees_everything(start: Callable[..., Started]):
    started = start(say_the_prompt)
    started.worker._client = None
    started.worker.setup_data_plane(LocalDataPlaneConfig(impl="local"))
    first = started.worker._client
    started.worker.setup_data_plane(LocalDataPlaneConfig(impl="local"))
    assert started.worker._client is first
    started.worker.shutdown()
    assert started.engine.closed
    assert not any(thread.name == "rollouts" for thread in threading.enumerate())

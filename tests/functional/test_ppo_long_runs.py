"""What only shows over many steps, or beside another run. All of it is slow.

Not covered here: memory of the workers, which keep what they once used for passes; days instead of minutes.
"""

import itertools
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from rl_runs import Inputs, assert_same_metrics, assert_same_weights, make_inputs, run_rl, write_config
from sft_runs import CliRun, read_lines

STEPS, SETTLED = 200, 50
ACTORS = ("ray::DataPlaneController", "ray::DataPlaneStorage", "ray::SingleControllerActor")
GROWTH_MB = 16


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    return make_inputs(tmp_path_factory.mktemp("inputs"))


def resident_mb(pid: int) -> float:
    """Memory of a process that lies in RAM."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * 4096 / 1e6


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_memory_of_plane_and_controller_is_flat_and_no_row_stays(inputs: Inputs, tmp_path: Path) -> None:
    config = write_config(tmp_path, inputs, ppo__max_num_steps=STEPS, ppo__ppo_epochs=1, checkpointing__enabled=False)
    metrics = tmp_path / "logs" / "metrics.jsonl"
    memory: dict[int, dict[str, float]] = {}

    def measured_at(step: int) -> bool:
        if not metrics.is_file() or len(read_lines(metrics)) < step:
            return False
        found = {}
        for pid, command in run.family().items():
            name = next((actor for actor in ACTORS if command.startswith(actor)), None)
            if name is not None:
                found[name] = found.get(name, 0.0) + resident_mb(pid)
        memory.setdefault(step, found)
        return True

    with CliRun("ppo", "--config", config) as run:
        for step in (SETTLED, STEPS - 5):
            run.wait_until(lambda step=step: measured_at(step), f"step {step}")
        assert run.finish() == 0, run.output
    before, after = memory.values()
    assert before.keys() == after.keys() == set(ACTORS)
    for name in ACTORS:
        assert after[name] - before[name] < GROWTH_MB, (name, before[name], after[name])
    lines = [line for line in read_lines(metrics) if "rows_in_plane" in line]
    assert [line["rows_in_plane"] for line in lines] == [0] * STEPS


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_runs_at_the_same_time_do_not_meet(inputs: Inputs, tmp_path: Path) -> None:
    configs = [write_config(tmp_path / name, inputs, ppo__seed=seed) for name, seed in (("a", 1), ("b", 2))]
    with ThreadPoolExecutor(2) as pool:
        together = list(pool.map(run_rl, configs))
    alone = run_rl(write_config(tmp_path / "alone", inputs, ppo__seed=2))
    assert_same_metrics(together[1].metrics, alone.metrics, rel=1e-5)
    assert_same_weights(together[1].weights(4), alone.weights(4), atol=1e-5)
    one, other = ([line["response"] for line in run.rollouts] for run in together)
    assert any(a != b for a, b in itertools.zip_longest(one, other)), "the two runs draw with seeds of their own"

"""The size of a pass is found by trying. Not covered: which size that is on a real machine, and real memory."""

import pytest
import torch
from torch import Tensor

from nemo_rl.models.engine import pass_size
from nemo_rl.models.engine.microbatch import Pack
from nemo_rl.models.engine.pass_size import measured_pass_tokens


class Machine:
    """A pass costs `overhead_s` and, per token, `token_s`, on a clock of its own; beyond `memory` tokens it fails."""

    now = 0.0

    def __init__(self, overhead_s: float, token_s: float, memory: int = 1 << 30):
        self.overhead_s, self.token_s, self.memory = overhead_s, token_s, memory
        self.tried: list[int] = []

    def __call__(self, pack: Pack) -> Tensor:
        tokens = pack.input_ids.numel()
        if tokens > self.memory:
            raise torch.OutOfMemoryError("too much")
        self.tried.append(tokens)
        Machine.now += self.overhead_s + self.token_s * tokens
        return torch.ones(len(pack.targets), requires_grad=True)


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pass_size.time, "perf_counter", lambda: Machine.now)


def measure(machine: Machine, longest_row: int = 128) -> int:
    return measured_pass_tokens(machine, longest_row=longest_row, data_group=None)


def test_the_least_that_is_nearly_as_fast_as_the_fastest() -> None:
    # 1 ms and 10 us a token: per token 8,192 cost 0.9 % more than 32,768, the largest tried, and 4,096 cost 2.1 % more.
    assert measure(Machine(1e-3, 1e-5)) == 8192


def test_a_slow_moment_hits_all_sizes() -> None:
    class Noisy(Machine):
        def __call__(self, pack: Pack) -> Tensor:
            # The first tries of all but the least come in a slow moment.
            size = pack.input_ids.numel()
            slow = size > 512 and self.tried.count(size) < 2
            Machine.now += 0.05 if slow else 0.0
            return super().__call__(pack)

    assert measure(Noisy(1e-3, 1e-5)) == 8192


def test_long_passes_are_not_tried() -> None:
    machine = Machine(0.1, 1e-3)
    assert measure(machine) == 2048
    assert max(machine.tried) == 2048, "the first of more than two seconds is the last"


def test_where_nothing_is_gained_the_least_is_taken() -> None:
    assert measure(Machine(0, 2e-5)) == 512


def test_a_row_must_fit() -> None:
    machine = Machine(0, 5e-6)
    assert measure(machine, longest_row=3000) == 3000
    assert min(machine.tried) >= 2900


def test_memory_ends_the_trying() -> None:
    assert measure(Machine(20e-3, 1e-7, memory=2048)) == 2048
    assert measure(Machine(20e-3, 1e-7, memory=100)) == 512, "larger passes are not tried where the least fails"


def test_what_was_tried_leaves_nothing_in_the_next_step(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    import torch.distributed as dist
    from tiny import make_model_dir, make_rows

    from nemo_rl.algorithms.loss.loss_functions import NLLLossFn
    from nemo_rl.models.engine.config import EngineConfig, OptimizerSpec, ParallelSizes
    from nemo_rl.models.engine.engine import Engine
    from nemo_rl.models.engine.mesh import build_mesh

    model = make_model_dir(tmp_path / "model")
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        mesh = build_mesh(ParallelSizes(), torch.device("cpu"))
        results = []
        for measured in (False, True):
            optimizer = OptimizerSpec(name="AdamW", kwargs={"lr": 1e-2})
            config = EngineConfig(
                model_name=str(model),
                optimizer=optimizer,
                precision="float32",
                microbatch_tokens=64,
                measure_microbatch_tokens=measured,
            )
            engine = Engine(config, mesh)
            assert (engine.microbatch_tokens >= 512) == measured
            for seed in range(2):
                engine.begin_step(NLLLossFn())
                engine.microbatch(make_rows(4, seed=seed))
                result = engine.finish_step()
            results.append((result.loss, result.grad_norm))
        assert results[1] == pytest.approx(results[0], rel=1e-5)
    finally:
        dist.destroy_process_group()

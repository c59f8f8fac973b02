"""Two hundred steps of the engine, packed and with its own attention, against a plain loop over one row at a time.

Float32 on one rank; two ranks and other layouts over a few steps are in test_engine.py. bf16 and GPUs are not covered.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from tiny import make_model_dir, make_rows
from transformers import AutoModelForCausalLM

from nemo_rl.algorithms.loss.loss_functions import NLLLossFn
from nemo_rl.models.engine.config import EngineConfig, OptimizerSpec, ParallelSizes
from nemo_rl.models.engine.engine import Engine
from nemo_rl.models.engine.mesh import build_mesh

STEPS, ROWS, SETS, LR = 200, 6, 4, 2e-3


def rows_of(step: int) -> dict[str, torch.Tensor]:
    """A few sets of rows in turn, so that the loss has something to fall on."""
    return make_rows(ROWS, seed=step % SETS)


def engine_curve(model: Path) -> list[float]:
    optimizer = OptimizerSpec(name="torch.optim.AdamW", kwargs={"lr": LR, "weight_decay": 0.01})
    config = EngineConfig(model_name=str(model), optimizer=optimizer, precision="float32", microbatch_tokens=60)
    engine = Engine(config, build_mesh(ParallelSizes(), torch.device("cpu")))
    losses = []
    for step in range(STEPS):
        engine.begin_step(NLLLossFn())
        engine.microbatch(rows_of(step))
        losses.append(engine.finish_step().loss)
    return losses


def plain_curve(model_dir: Path) -> list[float]:
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.01)
    losses = []
    for step in range(STEPS):
        rows = rows_of(step)
        mask = rows["token_mask"] * rows["sample_mask"][:, None]
        optimizer.zero_grad()
        total = torch.zeros(())
        for ids, length, row_mask in zip(rows["input_ids"], rows["input_lengths"], mask, strict=True):
            logits = model(input_ids=ids[None, :length]).logits[0, :-1]
            targets = torch.where(row_mask[1:length] > 0, ids[1:length], -100)
            if (targets >= 0).any():
                total = total + F.cross_entropy(logits, targets, reduction="sum")
        loss = total / float(mask[:, 1:].sum())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def run(rank: int, model: Path, work: Path, out: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(str(work / "store"), 1), rank=rank, world_size=1)
    out.put((engine_curve(model), plain_curve(model)))
    dist.destroy_process_group()


def test_the_loss_curves_are_one(tmp_path: Path) -> None:
    model = make_model_dir(tmp_path / "model")
    out = mp.get_context("spawn").SimpleQueue()
    mp.spawn(run, args=(model, tmp_path, out), nprocs=1)
    ours, plain = out.get()
    assert len(ours) == STEPS
    assert plain[-1] < 0.5 * plain[0], "a curve that falls"
    assert ours[:20] == pytest.approx(plain[:20], rel=1e-5)
    # Rounding grows from step to step; a thousandth of the way that the loss falls is not seen in a curve.
    assert ours == pytest.approx(plain, abs=1e-3 * (plain[0] - plain[-1]))

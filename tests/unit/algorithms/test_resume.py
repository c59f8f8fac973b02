"""Which checkpoints a run resumes from and which it refuses, decided before anything starts.

The checkpoint is made of the real parts: an engine after a step, two loaders after two batches, the record of the run.
Not covered here: the steps after a resume, see tests/functional/test_sft_resume.py.
"""

import json
import logging
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sft_runs import write_config
from tiny import DATA, make_model_dir, make_rows, make_tokenizer

from nemo_rl.algorithms.loss.loss_functions import NLLLossFn
from nemo_rl.algorithms.sft_checks import SFTInputs, inspect_inputs
from nemo_rl.algorithms.sft_config import MasterConfig, read_sft_config
from nemo_rl.algorithms.sft_resume import ResumePoint
from nemo_rl.algorithms.sft_state import IDENTITY, SFTV2SaveState
from nemo_rl.algorithms.sft_v2 import _VAL_METRICS
from nemo_rl.cli.export import export
from nemo_rl.data.energon.sft_dataloader import build_energon_sft_loader
from nemo_rl.models.engine.checkpoint import EngineCheckpointer
from nemo_rl.models.engine.config import ParallelSizes
from nemo_rl.models.engine.engine import Engine
from nemo_rl.models.engine.mesh import build_mesh
from nemo_rl.utils.checkpoint import CheckpointManager
from nemo_rl.utils.checkpoint_digests import DIGESTS, write_digests
from nemo_rl.utils.errors import UserError

B14_ROWS, B12_ROWS = (DATA / "cases" / name for name in ("b14_twentyfour_rows.jsonl", "b12_three_rows.jsonl"))
STEPS = 2


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with `model`, `rows.jsonl`, `run.yaml` and the checkpoint of step 2 in `checkpoints`."""
    work = tmp_path_factory.mktemp("saved")
    shutil.copy(B14_ROWS, work / "rows.jsonl")
    config = read_sft_config(
        write_config(
            work,
            model=make_model_dir(work / "model"),
            train=work / "rows.jsonl",
            policy__scheduler={"name": "torch.optim.lr_scheduler.ExponentialLR", "kwargs": {"gamma": 0.9}},
        )
    )
    inputs = inspect_inputs(config)
    assert inputs.problems == [] and inputs.resume is not None and inputs.resume.checkpoint is None
    store = dist.FileStore(str(work / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    save(config, inputs)
    yield work
    dist.destroy_process_group()


def save(config: MasterConfig, inputs: SFTInputs) -> None:
    """Writes the checkpoint of step 2 as the controller does."""
    assert inputs.plan is not None and inputs.train is not None and inputs.resume is not None
    engine = Engine(config.policy.engine_config(seed=1), build_mesh(ParallelSizes(), torch.device("cpu")))
    engine.begin_step(NLLLossFn())
    engine.microbatch(make_rows(4))
    engine.finish_step()
    state = SFTV2SaveState(STEPS, STEPS * 4, 40, inputs.plan.placement_hash)
    manager = CheckpointManager(config.checkpointing)
    path = manager.init_tmp_checkpoint(STEPS, asdict(state) | {IDENTITY: inputs.resume.identity}, config)
    (path / "loaders").mkdir()
    for shard in range(2):
        loader = build_energon_sft_loader(
            data_config=config.data,
            prepared=inputs.train,
            tokenizer=make_tokenizer(),
            batch_size=2,
            max_sequence_length=config.policy.max_total_sequence_length,
            split_role="train",
            shard=shard,
            num_logical_shards=2,
            only_unmask_final=False,
            seed=config.sft.seed,
        )
        for _ in range(STEPS):
            next(loader)
        (path / "loaders" / f"shard_{shard}.json").write_text(json.dumps(loader.state_dict()))
        loader.close()
    checkpointer = EngineCheckpointer(engine)
    checkpointer.save(path / "policy" / "weights", path / "policy" / "optimizer")
    checkpointer.wait()
    make_tokenizer().save_pretrained(path / "policy" / "tokenizer")
    manager.finalize_checkpoint(path)


@pytest.fixture
def checkpoints(saved: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoints to do harm to."""
    return Path(shutil.copytree(saved / "checkpoints", tmp_path / "checkpoints"))


def inspect(saved: Path, checkpoints: Path, *overrides: str) -> SFTInputs:
    return inspect_inputs(
        read_sft_config(saved / "run.yaml", [f"checkpointing.checkpoint_dir={checkpoints}", *overrides])
    )


def resumed(saved: Path, checkpoints: Path, *overrides: str) -> ResumePoint:
    inputs = inspect(saved, checkpoints, *overrides)
    assert inputs.problems == [] and inputs.resume is not None
    return inputs.resume


def refused(saved: Path, checkpoints: Path, *overrides: str) -> str:
    """The one problem; nothing below the checkpoints changes."""
    before = contents(checkpoints)
    inputs = inspect(saved, checkpoints, *overrides)
    assert inputs.resume is None
    assert contents(checkpoints) == before
    (problem,) = inputs.problems
    return problem


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_checkpoint_of_this_run_is_resumed(saved: Path, checkpoints: Path) -> None:
    point = resumed(saved, checkpoints)
    step = checkpoints / f"step_{STEPS}"
    assert point.checkpoint == step and point.save_state.total_steps == STEPS
    assert (point.weights_path, point.optimizer_path) == (step / "policy" / "weights", step / "policy" / "optimizer")
    assert point.loader_states is not None
    assert [state["shard"] for state in point.loader_states] == [0, 1]
    assert all(state["batches"] == STEPS for state in point.loader_states)


def test_b17_a_flipped_byte_in_any_file_is_found_and_the_checkpoint_before_is_offered(
    saved: Path, checkpoints: Path
) -> None:
    step = checkpoints / f"step_{STEPS}"
    shutil.copytree(step, checkpoints / "step_1")
    files = sorted(path for path in step.rglob("*") if path.is_file())
    folders = {path.parent.relative_to(step).as_posix() for path in files}
    assert folders == {".", "loaders", "policy/weights", "policy/optimizer", "policy/tokenizer"}
    for path in files:
        content = path.read_bytes()
        for place in {0, len(content) // 2, len(content) - 1}:
            path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
            problem = refused(saved, checkpoints)
            assert problem.startswith(f"{step} is damaged: {path.relative_to(step)} "), (path, place, problem)
            assert f"resumes from {checkpoints / 'step_1'}" in problem and "; " not in problem
        path.write_bytes(content)
    assert resumed(saved, checkpoints).checkpoint == step


def test_b17_a_damaged_checkpoint_is_not_exported(checkpoints: Path, tmp_path: Path) -> None:
    weights = next((checkpoints / f"step_{STEPS}" / "policy" / "weights").glob("*.safetensors"))
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(UserError, match=rf"step_{STEPS} is damaged: policy/weights/{weights.name} differs"):
        export(checkpoints, tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_b17_an_unfinished_folder_is_passed_over_and_the_step_is_said(
    saved: Path, checkpoints: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (checkpoints / "tmp_step_9" / "policy").mkdir(parents=True)
    with caplog.at_level(logging.WARNING):
        assert resumed(saved, checkpoints).checkpoint == checkpoints / f"step_{STEPS}"
    assert "tmp_step_9 is an unfinished save" in caplog.text and f"step_{STEPS}" in caplog.text


def test_b14_a_missing_loader_state_is_an_error(saved: Path, checkpoints: Path) -> None:
    """With digests and, as older versions left it, without."""
    step = checkpoints / f"step_{STEPS}"
    (step / "loaders" / "shard_1.json").unlink()
    assert f"{step} is damaged: loaders/shard_1.json is missing" in refused(saved, checkpoints)
    (step / DIGESTS).unlink()
    assert "loaders/shard_1.json: the state of data shard 1 can't be read" in refused(saved, checkpoints)


def test_b14_a_checkpoint_from_before_loader_states_is_a_warned_fresh_start(
    saved: Path, checkpoints: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Such a one knows neither digests nor the record of the run nor a placement. Its weights and counters count."""
    step = checkpoints / f"step_{STEPS}"
    shutil.rmtree(step / "loaders")
    (step / DIGESTS).unlink()
    info = json.loads((step / "training_info.json").read_text())
    del info[IDENTITY], info["placement_hash"]
    (step / "training_info.json").write_text(json.dumps(info))
    with caplog.at_level(logging.WARNING):
        point = resumed(saved, checkpoints)
    assert point.loader_states is None and point.save_state.total_steps == STEPS
    assert point.checkpoint == step
    for text in ("no digests.json", "no record of its run", "no loader states"):
        assert f"{step} has {text}" in caplog.text


def test_b14_another_number_of_workers_is_refused_with_both_sizes(saved: Path, checkpoints: Path) -> None:
    problem = refused(saved, checkpoints, "cluster.gpus_per_node=1")
    assert "data_shards 2 -> 1" in problem and "topology_mapper: elastic" in problem


def test_b14_with_elastic_shards_the_number_of_workers_is_no_part_of_the_run(saved: Path, tmp_path: Path) -> None:
    elastic = {"topology_mapper": "elastic", "logical_shards": 4}
    config = write_config(tmp_path, model=saved / "model", train=saved / "rows.jsonl", data__energon=elastic)
    points = [inspect_inputs(read_sft_config(config, [f"cluster.gpus_per_node={n}"])).resume for n in (1, 2, 4)]
    identities = [point.identity for point in points if point is not None]
    assert len(identities) == 3 and identities[0] == identities[1] == identities[2]


B16_CHANGES = {
    "data": (["data.train.path={rows}"], ["data.digest '", "data.name 'rows.jsonl' -> ", "data.rows 24 -> 3"]),
    "batch": (["policy.train_global_batch_size=8"], ["train_global_batch_size 4 -> 8"]),
    "model": (
        ["policy.model_name={wide}"],
        ["model.name 'model' -> 'wide'", "hidden_size 32 -> 64", "intermediate_size 64 -> 128", "head_dim 8 -> 16"],
    ),
    "tokenizer": (["policy.tokenizer.chat_template={template}"], ["chat_template '", "tokenizer '"]),
    "shuffle": (["data.shuffle=false"], ["shuffle True -> False"]),
    "window": (["policy.max_total_sequence_length=128"], ["max_sequence_length 256 -> 128"]),
    "seed": (["sft.seed=7"], ["seed 42 -> 7"]),
    "mask": (["sft.only_unmask_final=true"], ["only_unmask_final False -> True"]),
    "optimizer": (["policy.optimizer.kwargs.lr=1e-5"], ["optimizer.lr 0.005 -> 1e-05"]),
    "schedule": (["policy.scheduler.kwargs.gamma=0.8"], ["scheduler.phase_0.gamma 0.9 -> 0.8"]),
    "config of the model": (
        ["policy.hf_config_overrides.attention_dropout=0.1"],
        ["model.hf_config_overrides.attention_dropout (absent) -> 0.1"],
    ),
    "several": (
        ["sft.seed=7", "policy.train_global_batch_size=8", "policy.optimizer.kwargs.weight_decay=0"],
        ["optimizer.weight_decay 0.05 -> 0", "; seed 42 -> 7", "; train_global_batch_size 4 -> 8"],
    ),
}


@pytest.mark.parametrize("change", B16_CHANGES)
def test_b16_a_checkpoint_of_another_run_is_refused_with_all_differences(
    saved: Path, checkpoints: Path, tmp_path: Path, change: str
) -> None:
    overrides, expected = B16_CHANGES[change]
    places = {
        "rows": Path(shutil.copy(B12_ROWS, tmp_path)),
        "wide": make_model_dir(tmp_path / "wide", hidden=64) if change == "model" else None,
        "template": DATA / "templates" / "c0_plain.jinja",
    }
    problem = refused(saved, checkpoints, *(override.format(**places) for override in overrides))
    assert problem.startswith(f"the checkpoint {checkpoints / f'step_{STEPS}'} is of another run: ")
    for text in (*expected, "checkpointing.checkpoint_dir", "checkpointing.start_fresh=true"):
        assert text in problem
    assert problem.count(" -> ") == len(expected)


HARMLESS = [
    "logger.log_dir=elsewhere",
    "sft.max_num_steps=7",
    "sft.val_period=3",
    "data.energon.num_workers=1",
    "data.energon.prefetch_factor=5",
    "policy.train_mb_tokens=512",
    "policy.activation_checkpointing=true",
    "policy.data_parallel=shard",
    "policy.max_grad_norm=0.5",
    "cluster.step_timeout_s=60",
    "checkpointing.save_period=1",
]


def test_what_changes_no_row_size_or_update_may_change(saved: Path, checkpoints: Path, tmp_path: Path) -> None:
    moved = Path(shutil.copy(saved / "rows.jsonl", tmp_path))
    point = resumed(saved, checkpoints, *HARMLESS, f"data.train.path={moved}")
    assert point.save_state.total_steps == STEPS


def test_b16_without_a_record_the_model_is_compared(saved: Path, checkpoints: Path, tmp_path: Path) -> None:
    step = checkpoints / f"step_{STEPS}"
    info = json.loads((step / "training_info.json").read_text())
    del info[IDENTITY]
    (step / "training_info.json").write_text(json.dumps(info))
    write_digests(step)
    assert resumed(saved, checkpoints).checkpoint == step
    wide = make_model_dir(tmp_path / "wide", hidden=64)
    assert "is of another model than policy.model_name" in refused(saved, checkpoints, f"policy.model_name={wide}")


MEGATRON = {
    "enabled": True,
    "train_iters": 10,
    "optimizer": {"lr": 1e-3},
    "scheduler": {"lr_decay_style": "linear"},
}


def test_b19_another_number_of_steps_is_refused_only_where_a_decay_ends_with_the_run(
    saved: Path, tmp_path: Path
) -> None:
    """The schedule's state comes from the checkpoint, so that a longer run would keep the old end without a word."""

    def schedule(*overrides: str, **scheduler: Any) -> dict[str, Any]:
        block = MEGATRON | {"scheduler": MEGATRON["scheduler"] | scheduler}
        path = write_config(tmp_path, model=saved / "model", train=saved / "rows.jsonl", policy__megatron_cfg=block)
        inputs = inspect_inputs(read_sft_config(path, overrides))
        assert inputs.problems == [] and inputs.resume is not None
        return dict(inputs.resume.identity["scheduler"])

    assert schedule("sft.max_num_steps=20")["phase_0"]["total_iters"] == 20
    assert schedule("sft.max_num_steps=50", "sft.max_num_epochs=2")["phase_0"]["total_iters"] == 12
    fixed = [schedule(f"sft.max_num_steps={steps}", lr_decay_iters=30) for steps in (20, 50)]
    assert fixed[0] == fixed[1]


def test_start_fresh_starts_at_step_0_and_a_check_moves_nothing(saved: Path, checkpoints: Path) -> None:
    """Also where the newest checkpoint is damaged. The run moves them: see tests/functional."""
    (checkpoints / f"step_{STEPS}" / "training_info.json").write_text("{")
    before = contents(checkpoints)
    point = resumed(saved, checkpoints, "checkpointing.start_fresh=true", "sft.seed=7")
    assert point.checkpoint is None and point.loader_states is None and point.save_state.total_steps == 0
    assert contents(checkpoints) == before


def test_b18_a_metric_that_no_step_produces_is_refused_at_the_first_step(saved: Path) -> None:
    def of_step(name: str, metrics: dict[str, Any]) -> Any:
        overrides = [f"checkpointing.metric_name={name}", "checkpointing.higher_is_better=false"]
        config = read_sft_config(saved / "run.yaml", overrides)
        return CheckpointManager(config.checkpointing).metric_of(metrics, _VAL_METRICS)

    step = {"loss": 1.5, "grad_norm": 0.1, "dropped": {}}
    assert of_step("train:loss", step) == {"train:loss": 1.5}
    assert of_step("val:val_loss", step) == {}, "a step that does not validate"
    assert of_step("val:val_loss", step | {"val_loss": 2.0}) == {"val:val_loss": 2.0}
    with pytest.raises(UserError, match="no step has a metric 'accuracy'"):
        of_step("val:accuracy", step | {"val_loss": 2.0})
    with pytest.raises(UserError, match=r"no step has a metric 'los'; there are grad_norm, loss$"):
        of_step("train:los", step)

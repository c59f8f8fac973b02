"""Cases B-32, B-33 and B-34 as far as the command line answers them in this process, without starting anything.

Not covered here: a run that finds ports taken or nodes missing (tests/unit/distributed), and metrics files
(tests/unit/utils/test_logger.py).
"""

import copy
from pathlib import Path
from typing import Any

import pytest
from tiny import make_chat_rows, make_model_dir
from unit.algorithms.good_config import complaints, good_config, write

from nemo_rl.algorithms.sft_checks import inspect_inputs
from nemo_rl.algorithms.sft_config import read_sft_config
from nemo_rl.cli.main import main

pytestmark = pytest.mark.usefixtures("nothing_starts")


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    work = tmp_path_factory.mktemp("inputs")
    return good_config(make_model_dir(work / "model"), make_chat_rows(work / "rows.jsonl", 24), work / "out")


@pytest.fixture
def file(good: dict[str, Any], tmp_path: Path) -> Path:
    """The good config with one shard per replica."""
    config = copy.deepcopy(good)
    config["data"]["energon"] |= {"topology_mapper": "default", "logical_shards": None}
    return write(tmp_path / "run.yaml", config)


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("sft.max_num_step=20", "sft.max_num_step: unknown key, did you mean sft.max_num_steps?"),
        (
            "policy.sequence_pack.enabled=true",
            "policy.sequence_pack.enabled: unknown key, did you mean policy.sequence_packing.enabled?",
        ),
        ("checkpointing.keep_topk=3", "checkpointing.keep_topk: unknown key, did you mean checkpointing.keep_top_k?"),
        (
            "ppo.adv_estimator.gae_lamda=0.9",
            "ppo.adv_estimator.gae_lamda: unknown key, did you mean ppo.adv_estimator.gae_lambda?",
        ),
        (
            "policy.optimizer.kwargs.learning_rate=0.001",
            "policy.optimizer.kwargs.learning_rate is not an argument of AdamW; it takes lr, ",
        ),
        ("data.train.splt=train", "data.train.splt: unknown key, did you mean data.train.split?"),
        (
            'policy.train_micro_batch_size="four"',
            "policy.train_micro_batch_size: expected a whole number, got 'four'",
        ),
        (
            'logger.tensorboard_enabled="yes please"',
            "logger.tensorboard_enabled: expected true or false, got 'yes please'",
        ),
    ],
)
def test_b34_each_line_is_refused_by_name(
    file: Path, capfd: pytest.CaptureFixture[str], override: str, line: str
) -> None:
    [said] = complaints(file, capfd, override)
    assert said.startswith(line)


def test_b34_all_lines_at_once(file: Path, capfd: pytest.CaptureFixture[str]) -> None:
    overrides = ["sft.max_num_step=20", "data.train.splt=train", "policy.train_micro_batch_size=four"]
    said = complaints(file, capfd, *overrides)
    assert sorted(line.partition(":")[0] for line in said) == sorted(word.partition("=")[0] for word in overrides)


@pytest.mark.parametrize(
    ("word", "named"),
    [
        ("sft", "'sft'"),
        ("=3", "'=3'"),
        ("sft.max_num_steps", "'sft.max_num_steps'"),
        ("~sft.nothing", "~sft.nothing"),
        ("policy.model_name.x=3", "policy.model_name: expected text"),
        ("a..b=1", "a..b"),
        ("sft.seed=[1", "sft.seed=[1"),
    ],
)
def test_b34_words_that_override_nothing(file: Path, capfd: pytest.CaptureFixture[str], word: str, named: str) -> None:
    [said] = complaints(file, capfd, word)
    assert said.startswith(named)


def test_b32_a_batch_that_does_not_divide_names_both_keys(file: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Global batch 10 at dp 4; with four shards to deal out, dp 4 and dp 1 refuse it alike."""
    [said] = complaints(file, capfd, "policy.train_global_batch_size=10", "cluster.gpus_per_node=4")
    assert said.startswith("policy.train_global_batch_size: 10 does not divide by 4")
    assert "cluster.gpus_per_node" in said and "use a multiple of 4" in said
    elastic = ["data.energon.topology_mapper=elastic", "data.energon.logical_shards=4"]
    for workers in (1, 4):
        size = f"cluster.gpus_per_node={workers}"
        [said] = complaints(file, capfd, "policy.train_global_batch_size=10", size, *elastic)
        assert "data.energon.logical_shards" in said


def test_b33_more_workers_than_there_is_room_for(
    file: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nemo_rl.distributed.config.available_cores", lambda: 4)
    wanted = ["cluster.gpus_per_node=8", "cluster.oversubscribe=false", "policy.train_global_batch_size=8"]
    for gpus, have in ((0, "4 CPU cores and no GPU available"), (2, "2 available")):
        monkeypatch.setattr("nemo_rl.distributed.config.local_gpus", lambda gpus=gpus: gpus)
        [said] = complaints(file, capfd, *wanted)
        assert said.startswith("cluster.gpus_per_node: 8 ") and "on one node" in said and have in said
        assert "lower cluster.gpus_per_node" in said


def test_b33_more_nodes_than_this_machine(file: Path, capfd: pytest.CaptureFixture[str]) -> None:
    [said] = complaints(file, capfd, "cluster.num_nodes=2")
    assert said.startswith("cluster.num_nodes: 2 nodes wanted") and "cluster.address" in said


def test_a_decay_without_an_end_takes_the_length_of_the_run(file: Path) -> None:
    """24 rows, batches of 4, 2 passes: 10 steps, since `limit` leaves 20 rows. A warm-up as long is refused."""
    megatron = ["policy.megatron_cfg.enabled=true", "sft.max_num_epochs=2"]
    for warmup, faults in ((9, 0), (10, 1)):
        config = read_sft_config(file, [*megatron, f"policy.megatron_cfg.scheduler.lr_warmup_iters={warmup}"])
        problems = inspect_inputs(config).problems
        assert len(problems) == faults, problems
        assert all("policy.megatron_cfg.scheduler.lr_decay_iters is 10" in problem for problem in problems)


@pytest.mark.parametrize(
    ("override", "line"),
    [
        (
            "policy.scheduler=[{name: LinearLR}, {name: LinearLR}, {milestones: [5], name: StepLR}]",
            "policy.scheduler.2: milestones is the only key of its entry",
        ),
        (
            "policy.scheduler=[{name: LinearLR}, {name: LinearLR}, {name: LinearLR}, {milestones: [9, 5]}]",
            "policy.scheduler: the milestones [9, 5] do not increase",
        ),
        (
            "policy.scheduler={name: OneCycleLR, kwargs: {max_lr: 0.1, total_steps: 10}}",
            "policy.scheduler: it can't be used for 20 steps: ",
        ),
        (
            "policy.hf_config_overrides={hidden_sise: 64}",
            "policy.hf_config_overrides.hidden_sise: the config of a qwen3",
        ),
        ("sft.seed=-1", "sft.seed: expected 0 or more, got -1"),
        (
            "policy.megatron_cfg.optimizer.adam_beta1=1",
            "policy.megatron_cfg.optimizer.adam_beta1: expected less than 1",
        ),
    ],
)
def test_what_only_a_worker_would_have_found(
    file: Path, capfd: pytest.CaptureFixture[str], override: str, line: str
) -> None:
    [said] = complaints(file, capfd, override)
    assert said.startswith(line)


def test_a_clip_of_0_never_clips_in_a_megatron_block(file: Path) -> None:
    megatron = ["policy.megatron_cfg.enabled=true", "policy.megatron_cfg.train_iters=10"]
    for clip, norm in (("0", None), ("0.5", 0.5), ("null", 1.0)):
        config = read_sft_config(file, [*megatron, f"policy.megatron_cfg.optimizer.clip_grad={clip}"])
        assert config.policy.engine_config(seed=1).max_grad_norm == norm


@pytest.mark.parametrize(
    "text",
    [
        "a: &x [*x]",
        "? [1, 2]\n: 3",
        "1: 2",
        "~: 2",
        "policy: !!python/object:os.system {}",
        "policy: !!set {a}",
        "policy: ${",
        "policy: ${div:1,0}",
        "policy: ${oc.env:NOT_THERE}",
        "policy: 2020-01-01",
        "\tpolicy: 1",
        "policy: {" * 400,
        "policy: " + "[" * 5000,
        "a: \x00",
    ],
)
def test_files_that_are_no_config(tmp_path: Path, capfd: pytest.CaptureFixture[str], text: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    for words in (["check", str(path)], ["sft", "--config", str(path)]):
        assert main(words) == 2
        err = capfd.readouterr().err
        assert "Traceback" not in err
        assert all(line.startswith("error: ") for line in err.splitlines())

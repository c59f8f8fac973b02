"""Cases B-10 and B-11, and the stated rule of each metric from the loss to the logged number.

Not covered: more than one process; tests/parity/test_engine_cases.py has the same numbers on two ranks.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tiny import DATA, make_model_dir, make_tokenizer, select_rows
from unit.models.engine.cost_loss import CostLoss, rows_with_costs

from nemo_rl.algorithms.loss.interfaces import LossType, MetricNormalizer, metric_rule, reduce_metric
from nemo_rl.algorithms.sft_v2 import SFTSingleControllerActor
from nemo_rl.data.config import DataConfig
from nemo_rl.data.energon.replica import build_replica_loaders
from nemo_rl.data.energon.sources import prepare_source
from nemo_rl.data.sft_batch import batch_rows
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.models.driver import aggregate_train_results
from nemo_rl.models.engine.config import EngineConfig, OptimizerSpec
from nemo_rl.models.worker import ModelWorker

ROW = 2
"""Tokens of a row of the B-10 tests."""


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_dir(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def worker(model_dir: Path, group: None, monkeypatch: pytest.MonkeyPatch) -> ModelWorker:
    """A worker in this process, at learning rate 1e-4."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "NODE_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    optimizer = OptimizerSpec(name="torch.optim.SGD", kwargs={"lr": 1e-4})
    config = EngineConfig(model_name=str(model_dir), optimizer=optimizer, precision="float32", max_grad_norm=None)
    worker = ModelWorker(config, row_tokens=ROW, tokenizer=make_tokenizer())
    worker.initialize()
    return worker


def logged(results: list[dict[str, Any]], rules: Any) -> dict[str, Any]:
    """What the controller logs of the workers' results."""
    controller = SFTSingleControllerActor.__ray_metadata__.modified_class
    return controller._policy_metrics(aggregate_train_results(results), rules)


def train(worker: ModelWorker, rows: dict[str, torch.Tensor], *, pieces: int, mbs: int) -> dict[str, Any]:
    """One step over `rows`, given in `pieces` calls, in passes of `mbs` rows."""
    loss_fn = CostLoss(worker.engine.model.module)
    worker.begin_train_step(loss_fn, mbs=mbs)
    count = len(rows["cost"])
    for piece in range(pieces):
        worker.train_microbatch(BatchedDataDict(select_rows(rows, list(range(piece, count, pieces)))))
    return logged([worker.finish_train_step()], loss_fn.metric_normalizations)


@pytest.mark.parametrize("mbs", [1, 2, 4])
@pytest.mark.parametrize("pieces", [1, 2, 4])
def test_b10_what_is_logged_does_not_depend_on_the_number_of_microbatches(
    worker: ModelWorker, pieces: int, mbs: int
) -> None:
    """3.0 and 1e-4, not 12.0, 0.75 or 4e-4."""
    rows = rows_with_costs([1, 1, 1, 1], [1.0, 2.0, 3.0, 6.0])
    metrics = train(worker, rows, pieces=pieces, mbs=mbs)
    assert metrics["loss"] == pytest.approx(3.0, abs=1e-6)
    assert metrics["grad_norm"] == pytest.approx(3.0, abs=1e-6)
    assert metrics["lr"] == 1e-4
    assert (metrics["global_valid_toks"], metrics["global_valid_seqs"]) == (4, 4)


@pytest.mark.parametrize(("pieces", "mbs"), [(1, 1), (1, 10), (2, 2), (4, 1)])
def test_each_metric_follows_the_rule_its_loss_states(worker: ModelWorker, pieces: int, mbs: int) -> None:
    rows = rows_with_costs([2, 1, 1, 2], [3.0, 1.0, 6.0, 2.0])
    metrics = train(worker, rows, pieces=pieces, mbs=mbs)
    wanted = {"loss": 17 / 6, "cost_per_row": 17 / 4, "rows": 4, "cheapest": 1, "dearest": 6, "temperature": 0.7}
    assert {name: metrics[name] for name in wanted} == {name: pytest.approx(wanted[name]) for name in wanted}


def test_replicas_are_reduced_like_passes() -> None:
    """Sums are divided on each worker already; a replica without rows reports what the step is, and nothing else."""
    shared = {"lr": 1e-4, "wd": 0.1, "global_valid_seqs": 3.0, "global_valid_toks": 8.0}
    metrics = [
        {"loss": [0.5, 0.25], "cheapest": [3.0, 2.0], "dearest": [3.0, 4.0], "temperature": [0.7, 0.7]},
        {"loss": [1.0], "cheapest": [5.0], "dearest": [9.0], "temperature": [0.9]},
        {},
    ]
    results = [
        {
            "global_loss": [1.75],
            "grad_norm": 1.0,
            "skipped": None,
            "all_mb_metrics": ours
            | {name: [value] * max(1, len(ours.get("loss", []))) for name, value in shared.items()},
        }
        for ours in metrics
    ]
    assert logged(results, CostLoss.metric_normalizations) == {
        "loss": 1.75,
        "grad_norm": 1.0,
        "cheapest": 2.0,
        "dearest": 9.0,
        "temperature": 0.9,
        "num_ranks": 3,
        **shared,
    }


@pytest.mark.parametrize(
    ("rule", "values", "number"),
    [
        (MetricNormalizer.TOKENS, [1.0, 2.0, 4.0], 7.0),
        (MetricNormalizer.SEQUENCES, [1.0, 2.0, 4.0], 7.0),
        (MetricNormalizer.NONE, [1.0, 2.0, 4.0], 7.0),
        (MetricNormalizer.MIN, [2.0, 1.0, math.inf], 1.0),
        (MetricNormalizer.MAX, [2.0, 4.0, -math.inf], 4.0),
        (MetricNormalizer.LAST, [math.nan, 4.0], 4.0),
    ],
)
def test_one_number_for_a_step(rule: MetricNormalizer, values: list[float], number: float) -> None:
    assert reduce_metric(rule, values) == number
    if rule is not MetricNormalizer.LAST:
        for place in range(len(values) + 1):
            assert math.isnan(reduce_metric(rule, [*values[:place], math.nan, *values[place:]]))


def test_a_metric_without_a_rule() -> None:
    """Its name's ending decides, else the kind of the loss; a stated rule wins over both."""
    assert metric_rule("ratio_min", {}) is MetricNormalizer.MIN
    assert metric_rule("ratio_max", {}) is MetricNormalizer.MAX
    assert metric_rule("kl", {}) is MetricNormalizer.TOKENS
    assert metric_rule("kl", {}, LossType.SEQUENCE_LEVEL) is MetricNormalizer.SEQUENCES
    assert metric_rule("ratio_max", {"ratio_max": MetricNormalizer.LAST}) is MetricNormalizer.LAST


@pytest.mark.parametrize("replicas", [1, 4])
def test_b11_every_validation_row_counts_once(worker: ModelWorker, tmp_path: Path, replicas: int) -> None:
    """375/65; the mean of row means is 4.5, and without the last two rows it is 4.454545. Fillers would cost 1000."""
    path = tmp_path / "rows.jsonl"
    path.write_bytes((DATA / "cases" / "b11_val_ten_rows.jsonl").read_bytes())
    config = DataConfig.model_validate({"train": {"path": str(path)}})
    prepared = prepare_source(config.train)
    loss_fn = CostLoss(worker.engine.model.module)
    sums = {"loss_sum": 0.0, "valid_tokens": 0.0, "valid_rows": 0.0}
    for replica in range(replicas):
        loaders = build_replica_loaders(
            data_config=config,
            tokenizer=make_tokenizer((DATA / "templates" / "c0_plain.jinja").read_text()),
            prepared_train=prepared,
            prepared_validation=prepared,
            shards=(replica,),
            num_logical_shards=replicas,
            rows_per_shard=1,
            val_rows_per_shard=256 // replicas,
            max_sequence_length=256,
            only_unmask_final=False,
            seed=0,
        )
        loaded = loaders.next_validation()
        assert loaded is not None
        batch = batch_rows(loaded.rows, pad_id=256)
        batch["cost"] = torch.tensor([float(row.source_id) if row.source_id else 1000.0 for row in loaded.rows])
        for name, value in worker.eval_microbatch(batch, loss_fn).items():
            sums[name] += value
        assert loaders.next_validation() is None
        loaders.close()
    assert sums == {"loss_sum": pytest.approx(375.0), "valid_tokens": 65.0, "valid_rows": 10.0}
    assert sums["loss_sum"] / sums["valid_tokens"] == pytest.approx(5.769231, abs=1e-6)

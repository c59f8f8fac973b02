"""Rollouts with the real sampler: log-probs against a plain forward pass, and the process over the real TransferQueue.

Not covered: vLLM, several rollout processes, the controller.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter
from tiny import DATA, make_model_dir, make_tokenizer
from transformers import AutoModelForCausalLM
from unit.experience.fakes import CountingClient

from nemo_rl.data.prompts import PromptDataConfig, RLDataConfig
from nemo_rl.data_plane.column_io import read_columns
from nemo_rl.data_plane.factory import build_data_plane_client, maybe_configure_data_plane_env
from nemo_rl.data_plane.interfaces import DataPlaneConfig, KVBatchMeta
from nemo_rl.data_plane.schema import ROLLOUT_FIELDS, SC_ROLLOUT_SCHEMA_FIELDS
from nemo_rl.distributed.virtual_cluster import ClusterConfig, RayVirtualCluster, init_ray
from nemo_rl.distributed.worker_groups import RayWorkerBuilder, RayWorkerGroup
from nemo_rl.environments.config import EnvConfig
from nemo_rl.environments.interfaces import EnvStep
from nemo_rl.experience.config import RolloutFailureConfig, RolloutWorkerConfig
from nemo_rl.experience.interfaces import GroupOrder, GroupResult
from nemo_rl.experience.rollout_worker import RolloutWorker
from nemo_rl.models.generation.config import GenerationConfig

PARTITION = "rollout_data"
TEMPERATURE = 0.7
READER = """
import ray

def read(refs):
    for ref in refs:
        yield from ray.get(ref).items()
"""


class AsksOnce:
    """Answers the first response, rewards the second by its length."""

    needs_gold = True

    def start(self, prompt: Any) -> None:
        return None

    def step(self, turn: Any) -> EnvStep:
        more = ({"role": "user", "content": f"more than {len(turn.response_ids)}?"},)
        return EnvStep(float(len(turn.response_ids)), done=turn.turn == 1, observation=more)

    def close(self) -> None:
        return None


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("models")
    return [make_model_dir(folder / f"m{seed}", seed=seed) for seed in (0, 1)]


def worker_config(folder: Path, model: Path, **env: Any) -> RolloutWorkerConfig:
    source = folder / "b21_prompts.jsonl"
    source.write_bytes((DATA / "cases" / source.name).read_bytes())
    return RolloutWorkerConfig(
        model_name=str(model),
        data=RLDataConfig(train=PromptDataConfig(path=str(source))),
        env=TypeAdapter(EnvConfig).validate_python(env or {"name": "exact_match"}),
        generation=GenerationConfig(max_new_tokens=24, temperature=TEMPERATURE, max_slots=4),
        failure=RolloutFailureConfig(),
        partition_id=PARTITION,
        max_total_sequence_length=160,
        precision="float32",
    )


def orders(version: int, seed: int = 0) -> list[GroupOrder]:
    return [GroupOrder(f"v{version}s{seed}g{i}", i, 3, version, 0, seed=seed * 10 + i) for i in range(4)]


def collect(worker: RolloutWorker) -> list[GroupResult]:
    return worker.collect(max_groups=4, timeout_s=60, min_groups=4)


def join(results: list[GroupResult]) -> KVBatchMeta:
    metas = [result.meta for result in results if result.meta is not None]
    assert len(metas) == 4
    return metas[0].concat(*metas[1:])


def reference_logprobs(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """[T]: of each token given those before it, at the sampling temperature; 0 for the first. One row at a time."""
    with torch.no_grad():
        logits = model(input_ids=ids[None]).logits[0] / TEMPERATURE
    logprobs = torch.log_softmax(logits[:-1].float(), -1).gather(1, ids[1:, None])[:, 0]
    return torch.cat([torch.zeros(1), logprobs])


def check_logprobs(model_path: Path, rows: Any) -> int:
    """Compares every row; the number of drawn tokens."""
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    drawn = 0
    for i, length in enumerate(rows["input_lengths"].tolist()):
        mask = rows["token_mask"][i, :length].bool()
        expected = reference_logprobs(model, rows["input_ids"][i, :length])
        found = rows["generation_logprobs"][i, :length]
        torch.testing.assert_close(found[mask], expected[mask], atol=2e-4, rtol=0)
        assert not found[~mask].any()
        drawn += int(mask.sum())
    return drawn


@pytest.fixture
def worker(tmp_path: Path, models: list[Path]) -> Iterator[RolloutWorker]:
    def read_weights(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
        yield from AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).named_parameters()

    config = worker_config(tmp_path, models[0], name="custom", target=f"{__name__}:AsksOnce", max_turns=2)
    made = RolloutWorker(config, make_tokenizer(), read_weights=read_weights)
    made.initialize()
    made._client = CountingClient()
    yield made
    made.shutdown()


def test_logprobs_of_two_turns_equal_a_forward_pass_before_and_after_new_weights(
    worker: RolloutWorker, models: list[Path]
):
    first_ids = []
    for version, model in enumerate(models):
        worker.load_weights(model, version)
        worker.submit(orders(version))
        results = collect(worker)
        rows = read_columns(worker._plane, join(results), select_fields=ROLLOUT_FIELDS)
        drawn = check_logprobs(model, rows)
        assert drawn == rows["token_mask"].sum() == sum(s.response_tokens for r in results for s in r.samples)
        assert {tag["weight_version"] for result in results for tag in result.meta.tags} == {version}
        for result in results:
            for sample in result.samples:
                assert sample.turns == 2 or sample.truncated
        first_ids.append(rows["input_ids"])
    assert not torch.equal(first_ids[0][:, :60], first_ids[1][:, :60])
    assert worker._plane.puts == 2


def test_the_same_orders_give_the_same_samples_in_any_company(worker: RolloutWorker, models: list[Path]):
    worker.load_weights(models[0], 0)
    texts = []
    for wanted in (orders(0), orders(0)[2:3]):
        worker.submit(wanted)
        worker.collect(max_groups=4, timeout_s=60, min_groups=len(wanted))
        texts.append([answer.response for answer in worker.sample_table(3 * len(wanted))])
    assert texts[0][6:9] == texts[1]
    assert len(set(texts[0])) == 12


def test_evaluation_is_greedy_on_request(worker: RolloutWorker, models: list[Path]):
    worker.load_weights(models[1], 3)
    twice = [worker.evaluate([0, 1, 2, 3], sampling={"temperature": 0.0, "max_new_tokens": 5}) for _ in range(2)]
    assert twice[0] == twice[1]
    assert all(sample.response_tokens <= 10 for sample in twice[0])


@pytest.mark.slow
def test_the_process_over_transfer_queue(tmp_path: Path, models: list[Path]):
    """Orders go in and metas come out of the process; the rows are read by another client."""
    import ray

    plane_config = DataPlaneConfig()
    maybe_configure_data_plane_env(plane_config)
    (tmp_path / "reader.py").write_text(READER)
    config = worker_config(tmp_path, models[0])
    with init_ray(ClusterConfig(gpus_per_node=1, oversubscribe=True)):
        client = build_data_plane_client(plane_config, bootstrap=True)
        client.register_partition(PARTITION, SC_ROLLOUT_SCHEMA_FIELDS, 12, ["train"])
        cluster = RayVirtualCluster([1], use_gpus=False, start_timeout_s=120, step_timeout_s=120)
        builder = RayWorkerBuilder(
            "nemo_rl.experience.rollout_worker.RolloutWorker",
            config,
            make_tokenizer(),
            read_weights=f"{tmp_path / 'reader.py'}:read",
        )
        group = RayWorkerGroup(cluster, builder, name_prefix="rollouts")

        def call(method: str, **kwargs: Any) -> Any:
            return group.get_all_worker_results([group.run_single_worker_single_data(method, 0, **kwargs)])[0]

        try:
            call("setup_data_plane", cfg=plane_config)
            assert call("initialize").train_prompts == 4
            model = AutoModelForCausalLM.from_pretrained(models[1], dtype=torch.float32)
            weights = dict(model.named_parameters())
            refs = [ray.put({name: weight.detach()}) for name, weight in weights.items()]
            assert call("load_weights", refs=refs, version=5) == 5
            call("submit", orders=orders(5))
            results = call("collect", max_groups=4, timeout_s=60, min_groups=4)
            meta = join(results)
            assert meta.size == 12
            rows = read_columns(client, meta, select_fields=ROLLOUT_FIELDS)
            assert check_logprobs(models[1], rows) > 12
            assert rows["mask_sample"].dtype == rows["truncated"].dtype == torch.bool
            assert call("status").version == 5
            call("abort", group_ids=[results[0].group_id, results[2].group_id])
            left = [row for result in (results[1], results[3]) for row in result.meta.sample_ids]
            assert client.list_sample_ids(PARTITION) == sorted(left)
            client.clear_samples(left, PARTITION)
        finally:
            assert group.shutdown("shutdown")
            cluster.shutdown()
            client.close()

"""After a hand-over the samplers draw with the trainer's weights: real workers, one and two trainer ranks (B-31).

Not covered here: several nodes, GPUs, weights of more than a few buckets.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from sampler_host import SamplerHost
from tiny import make_model_dir, make_rows, make_tokenizer

from nemo_rl.algorithms.loss.loss_functions import NLLLossFn
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.virtual_cluster import ClusterConfig, RayVirtualCluster, init_ray
from nemo_rl.distributed.worker_groups import RayWorkerBuilder, RayWorkerGroup
from nemo_rl.models.config import PolicyConfig
from nemo_rl.models.generation.config import GenerationConfig
from nemo_rl.models.generation.interfaces import GenerationOutput, GenerationRequest, SamplingParams
from nemo_rl.models.policy.lm_policy import Policy
from nemo_rl.utils.errors import RunError, UserError
from nemo_rl.weight_sync.synchronizer import WeightSynchronizer

CLUSTER = ClusterConfig(gpus_per_node=2, oversubscribe=True, start_timeout_s=120, step_timeout_s=120)
SAMPLING = SamplingParams(max_new_tokens=12)
PROMPTS = [tuple(range(1, 40)), (7, 7, 7), tuple(range(200, 216))]
# The step must move the log-probabilities by far more than the tolerance.
LR = 1e-2


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayVirtualCluster]:
    # Workers import the host by name.
    path = os.pathsep.join(filter(None, [str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH")]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", path)
        with init_ray(CLUSTER):
            made = RayVirtualCluster.from_config(CLUSTER, name="sync", max_colocated_worker_groups=2)
            yield made
            made.shutdown()


def make_policy(cluster: RayVirtualCluster, model: Path, ranks: int, data_parallel: str) -> Policy:
    config = {
        "model_name": str(model),
        "train_global_batch_size": 8,
        "max_total_sequence_length": 64,
        "precision": "float32",
        "data_parallel": data_parallel,
        "optimizer": {"name": "torch.optim.AdamW", "kwargs": {"lr": LR}},
    }
    return Policy(cluster, PolicyConfig.model_validate(config), make_tokenizer(), workers_per_node=ranks)


def make_samplers(cluster: RayVirtualCluster, model: Path, count: int) -> RayWorkerGroup:
    fqn = f"{SamplerHost.__module__}.{SamplerHost.__name__}"
    builder = RayWorkerBuilder(fqn, str(model), GenerationConfig(max_slots=2))
    return RayWorkerGroup(cluster, builder, workers_per_node=count, name_prefix="sampler")


def call(group: RayWorkerGroup, method: str, **arguments: Any) -> list[Any]:
    refs = group.run_all_workers_single_data(method, **arguments)
    return group.get_all_worker_results(refs, reason=method, timeout_s=60)


def requests(name: str) -> list[GenerationRequest]:
    return [GenerationRequest(f"{name}{i}", prompt, SAMPLING, i) for i, prompt in enumerate(PROMPTS)]


def mismatch(policy: Policy, outputs: list[GenerationOutput], skip: int = 0) -> float:
    """Largest difference between the samplers' log-probabilities and the trainer's, from drawn token `skip` on."""
    prompt_of = {output.request_id: PROMPTS[int(output.request_id[-1])] for output in outputs}
    # Twice the rows: they divide by any number of ranks here.
    rows = [prompt_of[output.request_id] + output.token_ids for output in outputs] * 2
    width = max(map(len, rows))
    data = BatchedDataDict(
        {
            "input_ids": torch.tensor([[*row, *[0] * (width - len(row))] for row in rows]),
            "input_lengths": torch.tensor([len(row) for row in rows]),
        }
    )
    logprobs = policy.get_logprobs(data)["logprobs"]
    return max(
        abs(float(logprobs[i, len(prompt_of[output.request_id]) + t]) - value)
        for i, output in enumerate(outputs)
        for t, value in enumerate(output.logprobs)
        if t >= skip
    )


@pytest.mark.slow
@pytest.mark.parametrize("data_parallel", ["shard", "replicate"])
def test_two_ranks(cluster: RayVirtualCluster, tmp_path: Path, data_parallel: str):
    model = make_model_dir(tmp_path / "model")
    policy = make_policy(cluster, model, 2, data_parallel)
    samplers = make_samplers(cluster, model, count=2)
    try:
        follow(policy, samplers, steps=3)
    finally:
        samplers.shutdown(force=True)
        policy.shutdown()


def follow(policy: Policy, samplers: RayWorkerGroup, steps: int) -> None:
    """Trains, hands over, and compares twice after each; what was drawn before the hand-over is no longer alike."""
    sync = WeightSynchronizer(policy, samplers)
    for version in range(steps):
        if version:
            call(samplers, "start", requests=requests(f"old{version}-"), steps=0)
            policy.train(BatchedDataDict(make_rows(8, seed=version)), NLLLossFn())
            for old in call(samplers, "finish"):
                assert {output.end_version for output in old} == {version - 1}
                assert mismatch(policy, old) > 1e-2
        report = sync.sync_weights(version)
        assert report.version == version and report.seconds > 0
        assert report.num_bytes >= 4 * policy.model_info["num_parameters"]
        for turn in range(2):
            call(samplers, "start", requests=requests(f"v{version}t{turn}-"), steps=0)
            all_outputs = [sorted(outputs, key=lambda o: o.request_id) for outputs in call(samplers, "finish")]
            assert all(outputs == all_outputs[0] for outputs in all_outputs)
            assert {(o.start_version, o.end_version) for o in all_outputs[0]} == {(version, version)}
            assert mismatch(policy, all_outputs[0]) < 1e-4


def test_one_rank(cluster: RayVirtualCluster, tmp_path: Path):
    """The same at one rank; then samples in work, a sampler at another version, small buckets, wrong arguments."""
    model = make_model_dir(tmp_path / "model")
    policy = make_policy(cluster, model, 1, "auto")
    samplers = make_samplers(cluster, model, count=1)
    sync = WeightSynchronizer(policy, samplers)
    try:
        follow(policy, samplers, steps=2)
        assert call(samplers, "start", requests=requests("r"), steps=4) == [3]
        policy.train(BatchedDataDict(make_rows(8, seed=9)), NLLLossFn())
        sync.sync_weights(6)
        [outputs] = call(samplers, "finish")
        versions = {output.request_id: (output.start_version, output.end_version) for output in outputs}
        assert versions == {"r0": (1, 6), "r1": (1, 6), "r2": (6, 6)}  # two slots: the third had not begun
        assert mismatch(policy, outputs) > 1e-2  # the first four tokens of two samples are the old policy's
        for output in outputs:
            assert mismatch(policy, [output], skip=4 if output.start_version == 1 else 0) < 1e-4

        export = policy.worker_group.run_all_workers_single_data("export_weights", dtype="bfloat16", bucket_bytes=4096)
        [buckets] = policy.worker_group.get_all_worker_results(export, reason="export")
        assert len(buckets) > 4
        assert {entry.dtype for bucket in buckets for entry in bucket.entries} == {"bfloat16"}
        names = [entry.name for bucket in buckets for entry in bucket.entries]
        assert len(names) == len(set(names)) and "lm_head.weight" not in names  # tied, so sent once
        assert call(samplers, "load_weights", refs=buckets, version=7) == [7]
        call(samplers, "start", requests=requests("b"), steps=0)
        assert 1e-6 < mismatch(policy, call(samplers, "finish")[0]) < 0.1

        with pytest.raises((RunError, UserError), match="no floating type"):
            WeightSynchronizer(policy, samplers, dtype="int8").sync_weights(8)
        call(samplers, "set_forget", forget=True)
        with pytest.raises(RunError, match=r"rank 0 \(sampler-0.*\) is at 8"):
            sync.sync_weights(9)
    finally:
        samplers.shutdown(force=True)
        policy.shutdown()

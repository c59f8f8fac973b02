"""How the policy prepares metas for its workers, without workers: the call to them is replaced by a record of it.

Not covered here: the calls themselves, see tests/functional.
"""

from typing import Any

import pytest

from nemo_rl.data_plane.adapters.local import LocalDataPlaneClient
from nemo_rl.data_plane.adapters.noop import NoOpDataPlaneClient
from nemo_rl.data_plane.interfaces import KVBatchMeta, LocalDataPlaneConfig
from nemo_rl.data_plane.leveling import RowMove
from nemo_rl.models.driver import aggregate_train_results, check_parallel_sizes, sharding_of
from nemo_rl.models.engine.config import ParallelSizes
from nemo_rl.models.policy.tq_policy import TQPolicy


class Recorder(TQPolicy):
    """A policy of two replicas that writes down what it would send."""

    def __init__(self, client: Any):
        self.sharding_annotations = sharding_of(ParallelSizes(), 2)
        self.dp_client = client
        self.sent: list[KVBatchMeta] = []

    def _call_sharded(self, method: str, *, reason: str, common: Any = None, **per_replica: Any) -> list[Any]:
        self.sent = per_replica["meta"]
        return []

    def _send_sharded(self, method: str, *, reason: str, **per_replica: Any) -> None:
        self._call_sharded(method, reason=reason, **per_replica)


def meta(ids: list[str], lengths: list[int]) -> KVBatchMeta:
    tags = [{"source_id": i} for i in ids]
    return KVBatchMeta("p", None, ids, fields=["input_ids"], sequence_lengths=lengths, tags=tags)


def test_placed_rows_get_one_width_and_moves_that_level_them() -> None:
    policy = Recorder(LocalDataPlaneClient(LocalDataPlaneConfig()))
    given = [meta(["a", "b"], [3, 9]), meta(["c"], [5])]
    policy.train_placed_microbatches(given)
    assert [m.sample_ids for m in policy.sent] == [["a", "b"], ["c"]]
    assert {m.extra_info["global_forward_pad_seqlen"] for m in policy.sent} == {9}
    assert {m.task_name for m in policy.sent} == {"train"}
    # The one exchange that helps: 3 tokens to the emptier replica.
    assert {tuple(m.extra_info["row_moves"]) for m in policy.sent} == {(RowMove(0, 0, 1),)}
    assert given == [meta(["a", "b"], [3, 9]), meta(["c"], [5])]  # the caller's are not changed
    with pytest.raises(ValueError, match="1 metas for 2 replicas"):
        policy.train_placed_microbatches(given[:1])


def test_rows_of_a_shared_plane_are_dealt_and_keep_their_tags() -> None:
    policy = Recorder(NoOpDataPlaneClient())
    given = meta(["a", "b", "c", "d"], [1, 2, 3, 4])
    policy.train_microbatches_from_meta(given, train_fields=["input_ids", "token_mask"])
    assert sorted(i for m in policy.sent for i in m.sample_ids) == ["a", "b", "c", "d"]
    for sent in policy.sent:
        assert sent.fields == ["input_ids", "token_mask"]
        assert sent.tags is not None
        assert [tag["source_id"] for tag in sent.tags] == sent.sample_ids
    assert given == meta(["a", "b", "c", "d"], [1, 2, 3, 4])


def test_every_call_from_a_meta_sends_its_task_and_columns() -> None:
    policy, given = Recorder(NoOpDataPlaneClient()), meta(["a", "b", "c"], [5, 2, 2])
    seed = ["input_ids", "input_lengths", "token_mask", "sample_mask"]
    for call, task in (
        (policy.get_logprobs_from_meta, "prev_lp"),
        (policy.get_reference_policy_logprobs_from_meta, "ref_lp"),
    ):
        call(given)
        assert [(m.sample_ids, m.task_name, m.fields) for m in policy.sent] == [
            (["a"], task, seed),
            (["b", "c"], task, seed),
        ]
    assert given == meta(["a", "b", "c"], [5, 2, 2])


def test_the_rows_of_a_step_are_registered_and_removed() -> None:
    client = NoOpDataPlaneClient()
    policy = Recorder(client)
    policy.tq_partition_id = "step"
    policy.prepare_step(2, group_size=2)
    policy.prepare_val_partition(1)
    for partition, ids in (("step", ["a", "b"]), ("val", ["c"])):
        client.put_samples(ids, partition, tags=[{}] * len(ids))
    assert client.claim_meta("step", "ref_lp", [], 2).sample_ids == ["a", "b"]
    assert client.claim_meta("val", "val", [], 1).sample_ids == ["c"]
    policy.discard_samples(["a", "gone"], "step")
    policy.finish_step(KVBatchMeta("val", None, ["c"]))
    assert (client.list_sample_ids("step"), client.list_sample_ids("val")) == (["b"], [])


def test_rows_of_a_process_local_plane_are_not_dealt() -> None:
    with pytest.raises(ValueError, match="train_placed_microbatches"):
        Recorder(LocalDataPlaneClient(LocalDataPlaneConfig())).train_microbatches_from_meta(meta(["a"], [1]))


def test_only_replica_leaders_count() -> None:
    def result(leader: bool, tokens: float) -> dict[str, Any]:
        metrics = {"num_unmasked_tokens": [tokens]}
        return {
            "global_loss": [2.0, 4.0],
            "grad_norm": 1.0,
            "skipped": None,
            "all_mb_metrics": metrics,
            "is_replica_leader": leader,
        }

    joined = aggregate_train_results([result(True, 5.0), result(False, 5.0), result(True, 7.0)])
    assert joined["all_mb_metrics"]["num_unmasked_tokens"] == [5.0, 7.0]
    assert joined["loss"] == 3.0
    with pytest.raises(ValueError, match="no worker"):
        aggregate_train_results([])


def test_parallel_sizes_are_refused_by_name() -> None:
    assert check_parallel_sizes(ParallelSizes(), 3, "policy") == []
    problems = check_parallel_sizes(ParallelSizes(tensor=2), 3, "policy")
    assert "tensor parallel size 2" in problems[0]
    assert "3 workers" in problems[1]

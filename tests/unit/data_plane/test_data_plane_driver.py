"""The controller's side over the reference store: stages do not see each other's stamps."""

import copy

import torch

from nemo_rl.data_plane.adapters.noop import NoOpDataPlaneClient
from nemo_rl.data_plane.driver_mixin import TQDriverMixin
from nemo_rl.data_plane.interfaces import KVBatchMeta


class Driver(TQDriverMixin):
    def __init__(self) -> None:
        self.cfg = {
            "dynamic_batching": {"train_mb_tokens": 64, "logprob_mb_tokens": 128},
            "sequence_packing": {"train_mb_tokens": 32, "logprob_mb_tokens": 16},
        }
        self.dp_client = NoOpDataPlaneClient()
        self.dynamic_batching_args = {"sequence_length_round": 8, "max_tokens_per_microbatch": 0}
        self.sequence_packing_args = {"algorithm": "concatenative", "max_tokens_per_microbatch": 0}


def make_meta(**extra: int) -> KVBatchMeta:
    return KVBatchMeta("p", "train", ["a", "b"], ["x"], [5, 3], extra_info=dict(extra), tags=[{"v": 1}, {"v": 2}])


def test_packing_args_carry_the_budget_of_the_stage() -> None:
    driver = Driver()
    assert driver._packing_args("train_mb_tokens") == (None, None)
    driver.use_sequence_packing = True
    assert driver._packing_args("logprob_mb_tokens") == (
        {"algorithm": "concatenative", "max_tokens_per_microbatch": 16},
        None,
    )
    driver.use_dynamic_batches = True
    assert driver._packing_args("train_mb_tokens") == (
        None,
        {"sequence_length_round": 8, "max_tokens_per_microbatch": 64},
    )
    assert driver.dynamic_batching_args["max_tokens_per_microbatch"] == 0


def test_width_is_stamped_once_and_rounded_to_the_largest_multiple() -> None:
    driver = Driver()
    assert driver._stamp_pad_seqlen(make_meta()).extra_info["global_forward_pad_seqlen"] == 5
    assert driver._stamp_pad_seqlen(make_meta(pad_to_multiple=4)).extra_info["global_forward_pad_seqlen"] == 8
    assert driver._stamp_pad_seqlen(make_meta(global_forward_pad_seqlen=99)).extra_info == {
        "global_forward_pad_seqlen": 99
    }
    assert driver._stamp_pad_seqlen(KVBatchMeta("p", None, ["a"])).extra_info == {}
    driver.use_dynamic_batches = True
    assert driver._stamp_pad_seqlen(make_meta()).extra_info["global_forward_pad_seqlen"] == 8


def test_isolated_meta_computes_its_own_width_and_leaves_the_callers_alone() -> None:
    meta = make_meta(global_forward_pad_seqlen=99, pad_to_multiple=3)
    before = copy.deepcopy(meta)
    isolated = Driver()._isolated_meta(meta, fields=("input_ids", "values"), task_name="value_train")
    assert meta == before
    assert isolated.fields == ["input_ids", "values"]
    assert isolated.task_name == "value_train"
    assert isolated.extra_info == {"global_forward_pad_seqlen": 6, "pad_to_multiple": 3}
    assert (isolated.sample_ids, isolated.sequence_lengths, isolated.tags) == (["a", "b"], [5, 3], meta.tags)


def test_driver_side_columns_round_trip_at_the_workers_width() -> None:
    driver, meta = Driver(), make_meta(pad_to_multiple=4)
    before = copy.deepcopy(meta)
    driver.dp_client.register_partition("p", ["advantages"], 2, ["train"])
    advantages = torch.randn(2, 5, generator=torch.Generator().manual_seed(1))
    driver.write_to_dataplane(meta, {"advantages": advantages})
    back = driver.read_from_dataplane(meta, select_fields=["advantages"])["advantages"]
    expected = torch.zeros(2, 8)
    expected[0, :5], expected[1, :3] = advantages[0], advantages[1, :3]
    assert torch.equal(back, expected)
    assert meta == before

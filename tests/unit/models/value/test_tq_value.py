"""How the critic prepares metas for its workers, without workers; its config; what its import loads.

Not covered here: the calls themselves, see tests/functional/test_tq_models.py.
"""

import copy
import subprocess
import sys
from typing import Any

import pytest

from nemo_rl.data_plane.adapters.local import LocalDataPlaneClient
from nemo_rl.data_plane.adapters.noop import NoOpDataPlaneClient
from nemo_rl.data_plane.driver_mixin import TQDriverMixin
from nemo_rl.data_plane.interfaces import KVBatchMeta, LocalDataPlaneConfig
from nemo_rl.models.driver import sharding_of
from nemo_rl.models.engine.config import ParallelSizes
from nemo_rl.models.value.config import ValueConfig
from nemo_rl.models.value.interfaces import ValueInterface
from nemo_rl.models.value.lm_value import Value
from nemo_rl.models.value.tq_value import _REPLICATED_AXES, TQValue, _aggregate_train_results

CONFIG = {
    "model_name": "m",
    "train_global_batch_size": 4,
    "max_total_sequence_length": 100,
    "optimizer": {"name": "AdamW", "kwargs": {"lr": 1e-3}},
}
RESULT = {"global_loss": [2.0, 4.0], "grad_norm": 1.5, "skipped": None, "all_mb_metrics": {"loss": [0.5]}, "rank": 0}


class Recorder(TQValue):
    """A critic of two replicas that writes down what it would send."""

    def __init__(self, client: Any):
        self.cfg = ValueConfig.model_validate(CONFIG)
        self.sharding_annotations = sharding_of(ParallelSizes(), 2)
        self.dp_client = client
        self.sent: list[tuple[str, list[KVBatchMeta], Any]] = []

    def _call_sharded(self, method: str, *, reason: str, common: Any = None, **per_replica: Any) -> list[Any]:
        self.sent.append((method, per_replica["meta"], common))
        return [RESULT, RESULT]


def meta() -> KVBatchMeta:
    return KVBatchMeta(
        "p", "prev_lp", list("abcdefgh"), ["x"], [9, 1, 1, 1, 2, 2, 2, 7], extra_info={"global_forward_pad_seqlen": 99}
    )


def test_what_the_seed_says_of_the_class() -> None:
    assert issubclass(TQValue, TQDriverMixin)
    assert issubclass(TQValue, Value)
    assert issubclass(Value, ValueInterface)
    assert TQValue.__mro__.index(TQDriverMixin) < TQValue.__mro__.index(Value)
    assert _REPLICATED_AXES == ["context_parallel", "tensor_parallel", "pipeline_parallel"]


def test_each_call_sends_its_columns_and_leaves_the_meta_alone() -> None:
    critic, given = Recorder(NoOpDataPlaneClient()), meta()
    before = copy.deepcopy(given)
    assert critic.get_values_from_meta(given, micro_batch_size=3) is None
    result = critic.train_from_meta(given, "loss", mbs=2)
    critic.train_microbatches_from_meta(given)
    assert given == before
    assert result == {"loss": 3.0, "grad_norm": 1.5, "all_mb_metrics": {"loss": [0.5, 0.5]}}
    seen = {method: (metas, common) for method, metas, common in critic.sent}
    assert seen["get_values_presharded"][1] == {"micro_batch_size": 3}
    assert seen["train_presharded"][1] == {"loss_fn": "loss", "eval_mode": False, "gbs": 4, "mbs": 2}
    forward = ["input_ids", "input_lengths", "token_mask", "sample_mask"]
    for method, task, fields in (
        ("get_values_presharded", "value_fwd", forward),
        ("train_presharded", "value_train", [*forward, "values", "returns"]),
        ("train_microbatch_presharded", "value_train", [*forward, "values", "returns"]),
    ):
        metas = seen[method][0]
        assert {(m.task_name, tuple(m.fields or ())) for m in metas} == {(task, tuple(fields))}
        assert {m.extra_info["global_forward_pad_seqlen"] for m in metas} == {9}
        assert sorted(name for m in metas for name in m.sample_ids) == list("abcdefgh")
    # Steps of four rows: 9, 1, 1, 1 tokens, then 2, 2, 2, 7.
    assert [m.extra_info["elem_counts_per_gb"] for m in seen["train_presharded"][0]] == [[1, 1], [3, 3]]


def test_refusals() -> None:
    with pytest.raises(ValueError, match="no worker reported"):
        _aggregate_train_results([])
    with pytest.raises(ValueError, match="steps of 0 rows"):
        Recorder(NoOpDataPlaneClient()).train_from_meta(meta(), "loss", gbs=0)
    with pytest.raises(ValueError, match="process-local"):
        Recorder(LocalDataPlaneClient(LocalDataPlaneConfig())).get_values_from_meta(meta())


def test_the_config_becomes_an_engine_with_a_value_head() -> None:
    recipe = {"reward_model_cfg": {"enabled": True, "reward_model_type": "regression"}, "logprob_batch_size": 8}
    config = ValueConfig.model_validate(CONFIG | recipe | {"value_head_init": "normal"})
    engine = config.engine_config(seed=5, temperature=0.5)
    assert (engine.head, engine.value_head_init, engine.section, engine.seed) == ("value", "normal", "value", 5)
    assert (engine.microbatch_tokens, engine.inference_microbatch_tokens) == (100, 800)
    with pytest.raises(ValueError, match="bradley_terry"):
        ValueConfig.model_validate(CONFIG | {"reward_model_cfg": {"reward_model_type": "bradley_terry"}})


def test_importing_it_loads_no_tensor_library() -> None:
    code = "import sys; from nemo_rl.models.value.tq_value import TQValue; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "False"

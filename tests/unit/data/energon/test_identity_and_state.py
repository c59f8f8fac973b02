"""The JSON form of Energon's state and the comparison of identities. Resume itself: `test_sft_dataloader.py`."""

import json
from pathlib import Path

import pytest
from megatron.energon.flavors.webdataset.sample_loader import SliceState
from megatron.energon.savable_loader import SavableDataLoaderState, SavableDatasetCheckpoint
from megatron.energon.state import FlexState
from transformers import PreTrainedTokenizerBase

from nemo_rl.data.energon.identity import differences, tokenizer_digest
from nemo_rl.data.energon.state import inner_from_json, inner_to_json

from .conftest import loaders, write_rows

DATASET = FlexState(
    __class__="X",
    rng=bytes(range(256)),
    slices=[None, SliceState(index=3, current=7)],
    pending=[5, 1],
    flag=True,
    at=None,
)


def in_process() -> SavableDataLoaderState:
    worker = FlexState(__class__="SimpleSavableDatasetWrapper", _sample_index=9, datasets=[DATASET])
    return SavableDataLoaderState(worker_states=[worker], next_worker_id=0, micro_batch_size=None)


def test_state_survives_json_in_both_forms():
    value = json.loads(json.dumps(inner_to_json(in_process())))
    assert (value["draws"], value["skip"]) == (9, 0)
    assert inner_from_json(value, loader_processes=0) == (in_process(), 0)
    restored, skip = inner_from_json(value, loader_processes=1)
    assert restored is not None
    (worker,) = restored.worker_states
    assert isinstance(worker, SavableDatasetCheckpoint)
    assert (skip, worker.offset, worker.state.sample_index) == (0, 0, 9)
    assert worker.state.dataset_state == DATASET
    assert inner_to_json(restored) == value


def test_draws_behind_a_process_state_are_skipped_by_hand_without_a_process():
    value = {**inner_to_json(in_process()), "skip": 4}
    assert inner_from_json(value, loader_processes=0) == (in_process(), 4)
    fresh = {"draws": 0, "skip": 2, "dataset": None}
    assert inner_from_json(fresh, loader_processes=0) == (None, 2)
    restored, _ = inner_from_json(fresh, loader_processes=1)
    assert restored is not None
    assert inner_to_json(restored) == fresh


def test_an_unknown_kind_of_value_is_not_pickled_but_refused():
    state = in_process()
    state.worker_states[0]["datasets"][0] = FlexState(what=object())
    with pytest.raises(TypeError, match="holds a object"):
        inner_to_json(state)


def test_size_of_a_state(tokenizer: PreTrainedTokenizerBase, tmp_path: Path):
    """It grows with the number of slices of the shard, not with its rows: at most some ten thousand numbers."""
    source = loaders(tokenizer, write_rows(tmp_path / "rows.jsonl", 3000), energon={"max_samples_per_sequence": 100})
    batch = source.next_train()
    source.close()
    assert len(json.dumps(batch.states)) < 10_000


def test_differences_name_each_key():
    old = {"a": 1, "same": [1], "deep": {"x": 1, "y": {"z": "t"}}, "gone": None}
    new = {"a": 2, "same": [1], "deep": {"x": 1, "y": {"z": "u"}}, "come": 3}
    assert list(differences(old, new)) == [
        "a 1 -> 2",
        "come (absent) -> 3",
        "deep.y.z 't' -> 'u'",
        "gone None -> (absent)",
    ]
    assert list(differences(old, json.loads(json.dumps(old)))) == []


def test_tokenizer_digest_follows_template_and_vocabulary_but_not_use(tokenizer: PreTrainedTokenizerBase):
    before = tokenizer_digest(tokenizer)
    tokenizer(["a", "bcd"], padding=True, truncation=True, max_length=3)
    assert tokenizer_digest(tokenizer) == before
    template, tokenizer.chat_template = tokenizer.chat_template, "other"
    other = tokenizer_digest(tokenizer)
    tokenizer.chat_template = template
    assert other != before == tokenizer_digest(tokenizer)

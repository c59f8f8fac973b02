"""Loader and data config: defaults, spellings, refusals, and what is said about values without effect."""

import pytest
from pydantic import ValidationError

from nemo_rl.data import DataConfig
from nemo_rl.data.energon.config import EnergonCookerConfig, EnergonLoaderConfig, EnergonTaskEncoderConfig

RECIPE = {
    "model_family": "qwen",
    "num_workers": 8,
    "shuffle_buffer_size": 1000,
    "processor_adapter": "hf_multimodal",
    "topology_mapper": "default",
    "task_encoder": {"name": "generic_sft", "options": {}},
    "cookers": [{"name": "generic_conversation", "options": {}}],
}


def test_the_block_of_the_original_recipe_is_accepted_and_explained():
    config = EnergonLoaderConfig.model_validate(RECIPE)
    assert config.loader_processes == 1
    assert config.notes() == [
        "data.energon.num_workers: 8 is taken as 1",
        "data.energon.model_family: qwen has no effect",
        "data.energon.processor_adapter: hf_multimodal has no effect",
        "data.energon.shuffle_buffer_size: 1000 has no effect",
    ]
    assert EnergonLoaderConfig().notes() == []


def test_components_by_word_name_or_file():
    assert EnergonTaskEncoderConfig.model_validate("generic_sft").name == "generic_sft"
    by_file = EnergonCookerConfig.model_validate({"python_file": "/x.py", "object": "cook"})
    assert (by_file.object_name, by_file.name) == ("cook", None)
    assert EnergonCookerConfig.model_validate({"python_file": "/x.py", "object_name": "cook"}).object_name == "cook"


@pytest.mark.parametrize(
    ("block", "said"),
    [
        ({"cookers": []}, "at least 1 item"),
        ({"task_encoder": {"name": "a", "python_file": "/x.py", "object": "b"}}, "both `name` and `python_file`"),
        ({"task_encoder": {"python_file": "/x.py"}}, "needs `python_file` and `object` together"),
        ({"task_encoder": {"object": "b", "object_name": "b"}}, "both spellings"),
        ({"topology_mapper": "elastic"}, "needs logical_shards"),
        ({"logical_shards": 2}, "needs topology_mapper: elastic"),
        ({"num_worker": 1}, "num_worker"),
    ],
)
def test_refusals(block: dict, said: str):
    with pytest.raises(ValidationError, match=said):
        EnergonLoaderConfig.model_validate(block)


def test_data_config_reads_as_a_mapping_and_refuses_bad_sources():
    config = DataConfig.model_validate({"train": {"path": "a.jsonl", "virtual_epoch_length": None}})
    assert config["train"]["split"] == "train"
    assert config.validation is None
    assert config.get("max_input_seq_length") is None
    for bad in ({"path": ""}, {"path": "a", "limit": 0}, {"path": "a", "virtual_epoch_length": -1}, {"pth": "a"}):
        with pytest.raises(ValidationError):
            DataConfig.model_validate({"train": bad})

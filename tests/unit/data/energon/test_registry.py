"""Cookers and task encoders by name and from a user's file."""

from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

from nemo_rl.data.energon.config import EnergonCookerConfig
from nemo_rl.data.energon.multimodal.cookers import select_cooker
from nemo_rl.data.energon.multimodal.registry import (
    COOKER_REGISTRY,
    LazyRegistry,
    selected_registry_identity,
)
from nemo_rl.data.energon.multimodal.types import EncoderSettings
from nemo_rl.utils.errors import UserError

from .conftest import loaders, write_rows

USER_FILE = """
from nemo_rl.data.conversation import Conversation
from nemo_rl.data.tokenize import tokenize_conversation

def upper(suffix=""):
    def cook(row):
        turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": str(row["n"]) + suffix}]
        return Conversation(turns)
    return cook

def first_two(settings):
    def encode(conversation):
        row = tokenize_conversation(settings.tokenizer, conversation.messages)
        return "empty" if len(row) % 2 else [row]
    return encode
"""


def cooker(**fields: object) -> EnergonCookerConfig:
    return EnergonCookerConfig.model_validate(fields)


def test_a_users_file_cooks_and_encodes(tokenizer: PreTrainedTokenizerBase, tmp_path: Path):
    file = tmp_path / "mine.py"
    file.write_text(USER_FILE)
    energon = {
        "cookers": [{"python_file": str(file), "object": "upper", "options": {"suffix": "!"}}],
        "task_encoder": {"python_file": str(file), "object": "first_two"},
    }
    source = loaders(tokenizer, write_rows(tmp_path / "rows.jsonl", 20), rows_per_shard=20, energon=energon)
    batch = source.next_train()
    source.close()
    texts = {bytes(int(i) for i in row.input_ids if i < 256).decode() for row in batch.rows if row.weight}
    kept, left_out = len(texts), batch.dropped["empty"]
    assert kept + left_out == 20
    assert {kept, left_out} == {10}
    assert all(text.rstrip().endswith("!") for text in texts)


def test_identity_follows_name_options_and_file_content(tmp_path: Path):
    file = tmp_path / "mine.py"
    file.write_text("a = 1")
    named = COOKER_REGISTRY.identity(cooker(options={"system_prompt": "s"}))
    assert named == {"name": "generic_conversation", "options": {"system_prompt": "s"}}
    before = COOKER_REGISTRY.identity(cooker(python_file=str(file), object="a"))
    file.write_text("a = 2")
    after = COOKER_REGISTRY.identity(cooker(python_file=str(file), object="a"))
    assert {key for key in before if before[key] != after[key]} == {"sha256"}
    both = selected_registry_identity(task_encoder=cooker(), cookers=[cooker(has_subflavors={"a": 1})])
    assert both["cookers"][0]["has_subflavors"] == {"a": 1}


def test_refusals_say_what_there_is(tmp_path: Path, tokenizer: PreTrainedTokenizerBase):
    file = tmp_path / "mine.py"
    file.write_text("def a(): pass")
    said = {
        "no cooker is called 'generic'; there are generic_conversation": [cooker(name="generic")],
        "must be an absolute path of a .py file": [cooker(python_file="mine.py", object="a")],
        "does not exist": [cooker(python_file=str(tmp_path / "other.py"), object="a")],
        "has no object 'b'": [cooker(python_file=str(file), object="b")],
        "options {'x': 1} don't fit": [cooker(options={"x": 1})],
        "only the last cooker": [cooker(), cooker()],
        "two cookers have the same": [cooker(has_subflavors={"a": 1})] * 2,
        "none takes rows with the subflavors {}": [cooker(has_subflavors={"a": 1})],
    }
    for message, cookers in said.items():
        with pytest.raises(UserError, match=message):
            select_cooker(cookers, {})
    registry = LazyRegistry("thing", "one")
    registry.register("one", "math:sqrt")
    assert registry.resolve_configured(None, None, None)(4) == 2
    with pytest.raises(ValueError, match="registered already"):
        registry.register("one", "math:sqrt")
    assert EncoderSettings(tokenizer, 8).overlong == "truncate"

"""Loading tokenizers from local folders. Not covered: hub names, because nothing here asks the network."""

import json
import shutil

import pytest
from unit.data.chat_cases import DATA, MARKED

from nemo_rl.data.tokenizer import get_tokenizer
from nemo_rl.utils.errors import UserError

T0 = DATA / "t0"
TEMPLATE = DATA / "templates" / "c0_marked.jinja"


@pytest.fixture
def folder(tmp_path):
    """A copy of the byte tokenizer with a template of its own."""
    shutil.copytree(T0, tmp_path / "t")
    (tmp_path / "t" / "chat_template.jinja").write_text("{{ messages[0].content }}")
    return tmp_path / "t"


def _configure(folder, **changes):
    path = folder / "tokenizer_config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def test_template_as_path_or_text():
    for template in (str(TEMPLATE), MARKED):
        tokenizer = get_tokenizer({"name": str(T0), "chat_template": template})
        assert tokenizer.chat_template == MARKED
        assert tokenizer.is_fast
        assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (256, 258)


@pytest.mark.parametrize("template", [None, "default"])
def test_own_template_is_kept(folder, template):
    assert get_tokenizer({"name": str(folder), "chat_template": template}).chat_template == "{{ messages[0].content }}"


def test_pad_falls_back_to_eos(folder):
    _configure(folder, pad_token=None)
    assert get_tokenizer({"name": str(folder)}).pad_token_id == 258
    _configure(folder, eos_token=None)
    with pytest.raises(UserError, match="neither a pad token nor an EOS token"):
        get_tokenizer({"name": str(folder)})


def test_processor_of_a_text_model_is_its_tokenizer(folder):
    assert get_tokenizer({"name": str(folder)}, get_processor=True).is_fast


def test_refusals_name_value_and_remedy(tmp_path, folder):
    with pytest.raises(UserError, match="no chat template; give one as text or as a path"):
        get_tokenizer({"name": str(T0)})
    with pytest.raises(UserError, match=r"nowhere/model' is not a directory"):
        get_tokenizer({"name": str(tmp_path / "nowhere" / "model")})
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"empty' holds no tokenizer; one of tokenizer.json"):
        get_tokenizer({"name": str(tmp_path / "empty")})
    with pytest.raises(UserError, match=r"missing.jinja' is neither a file nor the text of a template"):
        get_tokenizer({"name": str(T0), "chat_template": "missing.jinja"})
    with pytest.raises(UserError, match="syntax error in line 2"):
        get_tokenizer({"name": str(T0), "chat_template": "{{ bos_token }}\n{% if %}"})
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match="no tokenizer could be loaded from"):
        get_tokenizer({"name": str(folder)})

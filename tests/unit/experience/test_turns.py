"""Text of responses, stop tokens, and observations rendered by several templates."""

import pytest
from tiny import DATA, make_tokenizer
from unit.experience.fakes import CLOSE, make_prompt

from nemo_rl.experience.turns import TurnTokens, default_stop_token_ids
from nemo_rl.utils.errors import UserError

USER = {"role": "user", "content": "obs"}


def template(name: str) -> str:
    return (DATA / "templates" / f"{name}.jinja").read_text()


def conversation(text: str):
    return [{"role": "user", "content": "q"}, {"role": "assistant", "content": text}]


def test_response_text_has_no_stop_token_and_no_special_tokens():
    turns = TurnTokens(make_tokenizer(), "chat", (CLOSE, ord("E")))
    assert turns.response_text((*b"ab", CLOSE)) == "ab"
    assert turns.response_text(tuple(b"abE")) == "ab"
    assert turns.response_text(tuple(b"aEb")) == "aEb"
    assert turns.response_text((259, *b" ab ", 258)) == " ab "
    assert turns.response_text(()) == ""


@pytest.mark.parametrize("name", ["c0_marked", "c0_plain", "c1_drops_old_thinking", "c2_needs_user"])
def test_prompt_response_and_observation_are_what_the_template_renders(name: str):
    """Whole conversation rendered at once, against prompt ids + drawn ids + observation ids."""
    tokenizer = make_tokenizer(template(name))
    render = {"tokenize": False, "add_generation_prompt": True}
    prompt_text = tokenizer.apply_chat_template(conversation("")[:1], **render)
    whole = tokenizer.apply_chat_template([*conversation("ans"), USER], **render)
    turns = TurnTokens(tokenizer, "chat", (CLOSE,))
    observed = turns.observation_ids(make_prompt(), conversation("ans"), (USER,), (*b"ans", CLOSE))
    assert prompt_text + "ans<|e|>" + tokenizer.decode(observed) == whole


def test_a_template_that_hides_old_thinking_does_not_change_what_was_drawn():
    tokenizer = make_tokenizer(template("c1_drops_old_thinking"))
    turns = TurnTokens(tokenizer, "chat", (CLOSE,))
    text = "<think>long</think>ans"
    observed = turns.observation_ids(make_prompt(), conversation(text), (USER,), (*text.encode(), CLOSE))
    assert "think>long" not in tokenizer.decode(observed)
    assert "obs" in tokenizer.decode(observed)


def test_a_text_observation_is_its_text():
    turns = TurnTokens(make_tokenizer(), "text", (258,))
    assert turns.observation_ids(make_prompt(), conversation("x"), (USER,), (*b"x", 258)) == list(b"obs")


def test_default_stop_tokens():
    tokenizer = make_tokenizer()
    assert default_stop_token_ids(tokenizer, "chat") == (258, CLOSE)
    assert default_stop_token_ids(tokenizer, "text") == (258,)
    tokenizer.eos_token = None
    assert default_stop_token_ids(tokenizer, "chat") == (CLOSE,)
    with pytest.raises(UserError, match="no EOS token"):
        default_stop_token_ids(tokenizer, "text")

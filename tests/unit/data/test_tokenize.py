"""Ids and masks of conversations: the written cases, templates of every habit, and marker-free against marked.

Not covered: tokenizers that merge across the border of header and words other than by the byte-pair model below, and
templates for media.
"""

import itertools
import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast
from unit.data.chat_cases import (
    MARKED,
    PLAIN,
    REASONING_MARKED,
    REASONING_PLAIN,
    byte_tokenizer,
    case_rows,
    case_tokenizer,
    trained_text,
)

from nemo_rl.data.tokenize import DropReason, TokenizedConversation, fit_row, tokenize_conversation
from nemo_rl.utils.errors import UserError

USER = {"role": "user", "content": "hi"}


def answer(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def positions(row: TokenizedConversation) -> list[int]:
    return [position for position, trained in enumerate(row.token_mask) if trained]


@pytest.mark.parametrize("template", ["c0_plain", "c0_marked"])
def test_b01_mask_with_and_without_markers(template):
    (case,) = case_rows("b01_three_turns")
    row = tokenize_conversation(case_tokenizer(template), case["messages"])
    assert len(row) == 95
    assert positions(row) == [*range(51, 57), *range(87, 94)]
    assert row.num_trained == 13


def test_b01_only_the_final_turn():
    (case,) = case_rows("b01_three_turns")
    for template in ("c0_plain", "c0_marked"):
        row = tokenize_conversation(case_tokenizer(template), case["messages"], only_unmask_final=True)
        assert positions(row) == list(range(87, 94))


def test_b02_template_that_drops_old_reasoning():
    (case,) = case_rows("b02_reasoning_history")
    row = tokenize_conversation(case_tokenizer("c1_drops_old_thinking"), case["messages"])
    assert (len(row), row.num_trained) == (79, 20)
    assert trained_text(row) == ["Plum<|e|>", "<think>not plum</think>Kiwi<|e|>"]


def test_b02_template_that_demands_a_user_turn():
    (case,) = case_rows("b02_system_first")
    row = tokenize_conversation(case_tokenizer("c2_needs_user"), case["messages"])
    assert (len(row), row.num_trained) == (65, 5)
    assert trained_text(row) == ["Blue<|e|>"]


@pytest.mark.parametrize("add_bos", [False, True])
def test_b04_template_writes_bos(add_bos):
    (case,) = case_rows("b02_system_first")
    row = tokenize_conversation(case_tokenizer("c3_writes_bos"), case["messages"], add_bos=add_bos)
    assert len(row) == 66
    assert row.input_ids[:2] == [257, 259]
    assert row.num_trained == 5


def test_b04_bos_is_added_once():
    (case,) = case_rows("b02_system_first")
    row = tokenize_conversation(case_tokenizer("c0_plain"), case["messages"], add_bos=True)
    assert row.input_ids[:2] == [257, 259]
    assert row.input_ids.count(257) == 1
    assert trained_text(row) == ["Blue<|e|>"]


@pytest.mark.parametrize("before", ["<|bos|>", "\n <|bos|>"])
def test_b04_bos_behind_white_space_of_the_template(before):
    tokenizer = byte_tokenizer(before.replace("\n", "{{ '\\n' }}") + PLAIN)
    row = tokenize_conversation(tokenizer, [USER, answer("yo")], add_bos=True)
    assert row.input_ids.count(257) == 1
    assert row.text.startswith(before)


@pytest.mark.parametrize(
    ("template", "add_bos"), [("c3_writes_bos", False), ("c3_writes_bos", True), ("c0_plain", True)]
)
def test_b04_tokenizer_that_adds_bos_by_itself(template, add_bos):
    """Its own rule, as many stock tokenizers have one, plays no part: the template and the switch decide."""
    (case,) = case_rows("b02_system_first")
    tokenizer = case_tokenizer(template)
    expected = tokenize_conversation(tokenizer, case["messages"], add_bos=add_bos)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A <|eos|>", special_tokens=[("<|bos|>", 257), ("<|eos|>", 258)]
    )
    assert tokenizer("a")["input_ids"] == [257, 97, 258]
    assert tokenize_conversation(tokenizer, case["messages"], add_bos=add_bos) == expected
    assert (len(expected), expected.input_ids[:2], expected.input_ids.count(257)) == (66, [257, 259], 1)


def test_b04_eos_is_added_once_and_trained_after_an_answer():
    tokenizer = case_tokenizer("c0_plain")
    row = tokenize_conversation(tokenizer, [USER, answer("yo")], add_eos=True)
    assert row.input_ids[-3:] == [260, 10, 258]
    assert row.token_mask[-5:] == [1, 1, 1, 0, 1]
    asked = tokenize_conversation(tokenizer, [USER, answer("yo"), USER], add_eos=True)
    assert asked.input_ids[-1] == 258
    assert asked.token_mask[-1] == 0
    closes = byte_tokenizer(PLAIN.replace("<|e|>", "<|eos|>"))
    assert tokenize_conversation(closes, [USER, answer("yo")], add_eos=True).input_ids.count(258) == 2


@pytest.mark.parametrize("case", ["b05_tool_args_mapping", "b05_tool_args_string"])
def test_b05_tool_arguments(case):
    rows = case_rows(case)
    row = tokenize_conversation(case_tokenizer("c4_tools"), rows[0]["messages"])
    assert (len(row), row.num_trained) == (106, 41)
    assert trained_text(row) == ['<tool>weather {"city": "Oslo"}</tool><|e|>', "Cold and wet.<|e|>"]
    assert "None" not in row.text
    assert "null" not in row.text


def test_b05_text_that_was_encoded_twice_is_refused():
    """112 tokens is what encoding the text of b05_tool_args_string once more gives."""
    (case,) = case_rows("b05_tool_args_string")
    (call,) = (turn["tool_calls"][0] for turn in case["messages"] if turn.get("tool_calls"))
    function = call["function"]
    function["arguments"] = json.dumps(function["arguments"])
    with pytest.raises(UserError, match="are text, an object is needed"):
        tokenize_conversation(case_tokenizer("c4_tools"), case["messages"])


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"a": None},
        {"a": {"b": [1, 2.5, True, None, "é"]}, "c": '"quoted" \\ \n'},
        {"z": 1, "a": 2},
        {"n": 2**53 + 1},
    ],
)
@pytest.mark.parametrize("template", ["c4_tools", "c4_tools_marked"])
def test_b05_spellings_of_any_arguments_agree(template, arguments):
    """Order of keys, nesting, null inside the arguments and escapes; content null, missing and empty."""
    tokenizer = case_tokenizer(template)
    spellings = [arguments, json.dumps(arguments), json.dumps(arguments, ensure_ascii=False, indent=2)]
    turns = [{}, {"content": None}, {"content": ""}]
    rows = [
        tokenize_conversation(
            tokenizer,
            [USER, {"role": "assistant", **turn, "tool_calls": [{"function": {"name": "f", "arguments": spelling}}]}],
        )
        for spelling in spellings
        for turn in turns
    ]
    assert all(row == rows[0] for row in rows)
    assert trained_text(rows[0]) == [f"<tool>f {json.dumps(arguments, ensure_ascii=False)}</tool><|e|>"]


@pytest.mark.parametrize("turns", ["saua", "uau", "ua", "auaa", "sasuatt"])
def test_b01_last_assistant_turn_wherever_it_stands(turns):
    """`only_unmask_final` means the last turn of the assistant, not the last turn."""
    roles = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
    messages = [{"role": roles[letter], "content": f"text {place}"} for place, letter in enumerate(turns)]
    for template in ("c0_plain", "c0_marked", "c4_tools", "c4_tools_marked"):
        row = tokenize_conversation(case_tokenizer(template), messages, only_unmask_final=True)
        assert trained_text(row) == [f"text {turns.rindex('a')}<|e|>"]


@pytest.mark.parametrize("field", ["reasoning_content", "inline"])
@pytest.mark.parametrize("marked", [False, True])
def test_b02_reasoning_in_a_field_of_its_own(field, marked):
    """Old reasoning is dropped from either place; each answer is there once."""
    template = REASONING_MARKED if marked else REASONING_PLAIN
    source = "m.reasoning_content if m.reasoning_content else (" if field != "inline" else "("
    template = template.replace("set thought = ", f"set thought = {source}").replace("else '' -%}", "else '') -%}", 1)

    def turn(thought, words):
        if field == "inline":
            return answer(f"<think>{thought}</think>{words}")
        return {**answer(words), "reasoning_content": thought}

    row = tokenize_conversation(byte_tokenizer(template), [USER, turn("old", "one"), USER, turn("new", "two")])
    assert trained_text(row) == ["one<|e|>", "<think>\nnew\n</think>\n\ntwo<|e|>"]
    assert row.text.count("one") == row.text.count("two") == 1
    assert "old" not in row.text


def test_b06_prompt_fills_the_window():
    tokenizer = case_tokenizer("c0_plain")
    rows = [tokenize_conversation(tokenizer, row["messages"]) for row in case_rows("b06_prompt_fills_window")]
    assert [len(row) for row in rows] == [29, 103, 31]
    fitted = [fit_row(row, 40) for row in rows]
    assert fitted[1] is DropReason.NO_TRAINED_TOKEN
    kept = [piece for pieces in fitted if isinstance(pieces, list) for piece in pieces]
    assert [piece.num_trained for piece in kept] == [3, 4]


def test_b13_unicode_is_data():
    tokenizer = case_tokenizer("c0_plain")
    cases = case_rows("b13_unicode_separators")
    rows = [tokenize_conversation(tokenizer, case["messages"]) for case in cases]
    assert [len(row) for row in rows] == [75, 45]
    assert [len(case["messages"][0]["content"].encode()) for case in cases] == [35, 9]
    for row, case in zip(rows, cases, strict=True):
        assert bytes(i for i in row.input_ids if i < 256).decode().count(case["messages"][1]["content"]) == 1
        assert trained_text(row) == [case["messages"][1]["content"] + "<|e|>"]


# A conversation of any shape the marked and the plain template both take; the texts hold the template's own tags.
texts = st.text(st.sampled_from("ab \n<é👩😀\u2028"), max_size=8) | st.sampled_from(
    ["", "<|s|>assistant\n", "<|e|>\n<|s|>user\n", "<|e|>", "\ue000", " x ", "assistant", "<think>q</think>a"]
)
turns = st.lists(
    st.builds(lambda role, text: {"role": role, "content": text}, st.sampled_from(["user", "assistant"]), texts),
    min_size=1,
    max_size=6,
)


@settings(max_examples=150, deadline=None)
@given(turns, st.booleans())
def test_marker_free_mask_equals_the_marked_one(messages, only_final):
    plain = tokenize_conversation(_PLAIN_TOKENIZER, messages, only_unmask_final=only_final)
    marked = tokenize_conversation(_MARKED_TOKENIZER, messages, only_unmask_final=only_final)
    assert plain == marked
    assert plain.input_ids == _PLAIN_TOKENIZER.apply_chat_template(messages, return_dict=True)["input_ids"]


@settings(max_examples=150, deadline=None)
@given(turns)
def test_mask_equals_a_character_by_character_reference(messages):
    """The reference writes the plain template out by hand and marks each byte of an answer and its tag."""
    ids: list[int] = []
    mask: list[int] = []
    for turn in messages:
        trained = int(turn["role"] == "assistant")
        header, words = _byte_ids(f"<|s|>{turn['role']}\n"), _byte_ids(turn["content"] + "<|e|>")
        ids += [*header, *words, 10]
        mask += [0] * len(header) + [trained] * len(words) + [0]
    row = tokenize_conversation(_PLAIN_TOKENIZER, messages)
    assert row.input_ids == ids
    assert row.token_mask == mask


@settings(max_examples=100, deadline=None)
@given(turns.filter(lambda messages: any(turn["role"] == "user" for turn in messages)))
def test_reasoning_template_gives_one_mask_with_and_without_markers(messages):
    plain = tokenize_conversation(_REASONING_TOKENIZER, messages)
    assert plain.token_mask == tokenize_conversation(_REASONING_MARKED_TOKENIZER, messages).token_mask


def _byte_ids(text: str) -> list[int]:
    return _PLAIN_TOKENIZER.backend_tokenizer.encode(text, add_special_tokens=False).ids


_PLAIN_TOKENIZER = byte_tokenizer(PLAIN)
_MARKED_TOKENIZER = byte_tokenizer(MARKED)
_REASONING_TOKENIZER = byte_tokenizer(REASONING_PLAIN)
_REASONING_MARKED_TOKENIZER = byte_tokenizer(REASONING_MARKED)


def test_reasoning_block_is_part_of_the_turn():
    history = [USER, answer("<think>old</think>one"), USER]
    row = tokenize_conversation(_REASONING_TOKENIZER, [*history, answer("<think>new</think>two")])
    assert trained_text(row) == ["one<|e|>", "<think>\nnew\n</think>\n\ntwo<|e|>"]
    # Without reasoning the template opens the turn with an empty block that the generation prompt doesn't hold.
    row = tokenize_conversation(_REASONING_TOKENIZER, [*history, answer("two")])
    assert trained_text(row) == ["one<|e|>", "<think>\n\n</think>\n\ntwo<|e|>"]


@pytest.mark.parametrize("tokenizer", [_REASONING_TOKENIZER, _REASONING_MARKED_TOKENIZER], ids=["plain", "marked"])
def test_tool_loop_with_reasoning(tokenizer):
    call = {"role": "assistant", "content": "<think>look</think>", "tool_calls": [{"name": "f", "arguments": {"k": 1}}]}
    row = tokenize_conversation(tokenizer, [USER, call, {"role": "tool", "content": "ok"}, answer("done")])
    assert trained_text(row) == [
        '<think>\nlook\n</think>\n\n<tool>{"name": "f", "arguments": {"k": 1}}</tool><|e|>',
        "<think>\n\n</think>\n\ndone<|e|>",
    ]


def test_what_the_generation_prompt_writes_is_not_trained():
    prompt = "<|s|>assistant\\n<think>\\n"
    tokenizer = byte_tokenizer(PLAIN.replace("'<|s|>assistant\\n' -}}", f"'{prompt}' -}}}}"))
    row = tokenize_conversation(tokenizer, [USER, answer("<think>\na</think>b"), USER, answer("c")])
    assert trained_text(row) == ["a</think>b<|e|>", "c<|e|>"]


MARKER_HABITS = {
    "tag left out": "{% generation %}{{ m.content }}{% endgeneration %}<|e|>\n",
    "newline inside": "{% generation %}{{ m.content }}<|e|>\n{% endgeneration %}",
    "header inside": None,
    "inside a macro": None,
}


@pytest.mark.parametrize("habit", MARKER_HABITS)
def test_marker_habits_give_the_same_mask(habit):
    body = MARKER_HABITS[habit]
    head = "{% for m in messages %}"
    header = "<|s|>{{ m.role }}\n"
    if habit == "header inside":
        header, body = "", "{% generation %}<|s|>assistant\n{{ m.content }}<|e|>{% endgeneration %}\n"
        other = "<|s|>{{ m.role }}\n{{ m.content }}<|e|>\n"
    else:
        other = "{{ m.content }}<|e|>\n"
    if habit == "inside a macro":
        head = "{% macro say(m) %}{% generation %}{{ m.content }}<|e|>{% endgeneration %}{% endmacro %}" + head
        body = "{{ say(m) }}\n"
    # `trim_blocks` swallows a newline after a block tag, so those are written as expressions.
    template = f"{head}{header}{{% if m.role == 'assistant' %}}{body}{{% else %}}{other}{{% endif %}}{{% endfor %}}"
    template = template.replace("\n", "{{ '\\n' }}")
    template += "{% if add_generation_prompt %}<|s|>assistant{{ '\\n' }}{% endif %}"
    messages = [USER, answer(" one\n"), USER, answer("two")]
    assert tokenize_conversation(byte_tokenizer(template), messages) == tokenize_conversation(
        _PLAIN_TOKENIZER, messages
    )


def test_final_turn_with_several_marked_stretches():
    template = MARKED.replace(
        "{%- generation -%}{{- m['content'] + '<|e|>' -}}{%- endgeneration -%}",
        "{%- generation -%}{{- m['content'] -}}{%- endgeneration -%}{%- for c in m.tool_calls or [] -%}{{- '\\n' -}}"
        "{%- generation -%}{{- '<tool>' + c.function.name + '</tool>' -}}{%- endgeneration -%}{%- endfor -%}"
        "{%- generation -%}{{- '<|e|>' -}}{%- endgeneration -%}",
    )
    calls = [{"name": "f", "arguments": {}}, {"name": "g", "arguments": {}}]
    messages = [USER, answer("a"), USER, {**answer("b"), "tool_calls": calls}]
    row = tokenize_conversation(byte_tokenizer(template), messages, only_unmask_final=True)
    assert trained_text(row) == ["b", "<tool>f</tool>", "<tool>g</tool><|e|>", "<|e|>"]


def test_template_without_closing_tag():
    tokenizer = byte_tokenizer("{% for m in messages %}<|s|>{{ m.role }}{{ '\\n' ~ m.content ~ '\\n' }}{% endfor %}")
    row = tokenize_conversation(tokenizer, [USER, answer("one"), USER, answer("two")])
    assert trained_text(row) == ["one", "two"]


def test_eos_at_the_end_only_is_trained():
    tokenizer = byte_tokenizer(
        "{% for m in messages %}<|s|>{{ m.role ~ '\\n' ~ m.content }}{% if loop.last %}<|eos|>{% endif %}{% endfor %}"
    )
    row = tokenize_conversation(tokenizer, [USER, answer("one"), USER, answer("two")])
    assert trained_text(row) == ["one", "two<|eos|>"]


def test_end_of_text_after_the_closing_tag_is_not_part_of_it():
    tokenizer = byte_tokenizer(PLAIN + "{%- if not add_generation_prompt -%}{{- '<|eos|>' -}}{%- endif -%}")
    row = tokenize_conversation(tokenizer, [USER, answer("one"), USER, answer("two")])
    assert trained_text(row) == ["one<|e|>", "two<|e|>"]


STRICT = """\
{%- set ns = namespace(odd=false) -%}
{%- for m in messages if m.role != 'tool' and not m.tool_calls -%}
{%- if (m.role == 'user') == ns.odd -%}{{- raise_exception('roles must alternate') -}}{%- endif -%}
{%- set ns.odd = not ns.odd -%}
{%- endfor -%}
{%- for m in messages -%}
{%- if m.role == 'user' -%}{{- '[Q] ' + m.content + ' [/Q]' -}}
{%- elif m.tool_calls -%}
{{- '<tool>' -}}{%- for c in m.tool_calls -%}{{- c.function | tojson -}}{%- endfor -%}{{- '<|eos|>' -}}
{%- elif m.role == 'tool' -%}{{- '</tool>' + m.content -}}
{%- else -%}{{- ' ' + m.content + '<|eos|>' -}}{%- endif -%}
{%- endfor -%}"""


@pytest.mark.parametrize("header", [" ", "A: "])
def test_template_that_checks_the_order_of_turns_around_tool_calls(header):
    """A turn with its call replaced would break the alternation, so the span comes from what the turn adds."""
    template = STRICT.replace("{{- ' ' +", f"{{{{- '{header}' +").replace("{{- '<tool>'", f"{{{{- '{header}<tool>'")
    calls = [{"id": "a", "function": {"name": "f", "arguments": "{}"}}]
    call = {"role": "assistant", "content": None, "tool_calls": calls}
    row = tokenize_conversation(
        byte_tokenizer(template), [USER, call, {"role": "tool", "content": "ok"}, answer("done")]
    )
    assert trained_text(row) == ['<tool>{"name": "f", "arguments": {}}<|eos|>', "done<|eos|>"]


def test_template_that_joins_arguments_as_text():
    tokenizer = byte_tokenizer(
        "{% for m in messages %}<|s|>{{ m.role ~ '\\n' ~ m.content }}"
        "{% for c in m.tool_calls or [] %}"
        "{{ '<tool>' + c.function.name + c.function.arguments + '</tool>' }}"
        "{% endfor %}"
        "<|e|>{% endfor %}"
    )
    for arguments in ({"city": "Oslo"}, '{"city": "Oslo"}'):
        call = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}
        row = tokenize_conversation(tokenizer, [USER, call])
        assert trained_text(row) == ['<tool>f{"city": "Oslo"}</tool><|e|>']


def test_dropped_tool_call_is_refused():
    call = {"role": "assistant", "content": "x", "tool_calls": [{"function": {"name": "weather", "arguments": {}}}]}
    with pytest.raises(UserError, match="leaves out the tool call 'weather' of turn 1"):
        tokenize_conversation(_PLAIN_TOKENIZER, [USER, call])


def test_turn_that_the_template_leaves_out_is_not_trained():
    window = byte_tokenizer(PLAIN.replace("for m in messages", "for m in messages[-2:]"))
    row = tokenize_conversation(window, [USER, answer("gone"), USER, answer("kept")])
    assert trained_text(row) == ["kept<|e|>"]


def test_ambiguous_text_between_turns_is_settled_turn_by_turn():
    """The answer repeats the whole following user turn, so the pieces fit the text in two ways."""
    messages = [USER, answer("a<|e|>\n<|s|>user\nhi<|e|>\n<|s|>assistant\nb"), USER, answer("c")]
    row = tokenize_conversation(_PLAIN_TOKENIZER, messages)
    assert trained_text(row) == [messages[1]["content"] + "<|e|>", "c<|e|>"]


def test_unplaceable_turn_is_refused_with_the_remedy():
    """The template writes the length of the last answer in front, so what stands around the answer depends on it."""
    counting = PLAIN.replace("messages -%}", "messages -%}{{- messages[-1]['content'] | length -}}", 1)
    with pytest.raises(UserError, match=r"turn 1 can't be told .* put {% generation %}"):
        tokenize_conversation(byte_tokenizer(counting), [USER, answer("four")])


def test_content_that_the_template_changes():
    loud = byte_tokenizer(PLAIN.replace("m['content']", "m['content'] | trim | upper"))
    assert trained_text(tokenize_conversation(loud, [USER, answer(" four ")])) == ["FOUR<|e|>"]


def test_template_refusal_names_its_reason():
    with pytest.raises(UserError, match="refuses the conversation: at least one user turn is required"):
        tokenize_conversation(case_tokenizer("c2_needs_user"), [{"role": "system", "content": "x"}])


def test_template_kwargs_reach_the_template():
    tokenizer = byte_tokenizer(PLAIN + "{{- mood or '' -}}")
    plain = tokenize_conversation(tokenizer, [USER, answer("a")])
    moody = tokenize_conversation(tokenizer, [USER, answer("a")], chat_template_kwargs={"mood": "x"})
    assert moody.text == plain.text + "x"
    assert moody.token_mask == [*plain.token_mask, 0]


def test_no_assistant_turn_trains_nothing():
    row = tokenize_conversation(_PLAIN_TOKENIZER, [USER])
    assert row.num_trained == 0
    assert fit_row(row, 100) is DropReason.NO_TRAINED_TOKEN


def test_first_column_is_never_trained():
    bare = byte_tokenizer("{% for m in messages %}{{ m.content }}{% endfor %}")
    assert tokenize_conversation(bare, [answer("abc")]).token_mask == [0, 1, 1]


def test_half_a_surrogate_pair_is_refused():
    with pytest.raises(UserError, match="isn't valid Unicode"):
        tokenize_conversation(_PLAIN_TOKENIZER, [USER, answer("\ud800")])


def test_byte_pair_tokens_across_the_borders():
    """A merged token is trained if it covers a character of the turn; transformers' own marker mask says the same."""
    rng = random.Random(0)
    words = ["".join(rng.choice("ab>\n ") for _ in range(rng.randint(1, 12))) for _ in range(300)]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        [f":\n{w}>\n" for w in words], trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet)
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token="a")
    marked = (
        "{%- for m in messages -%}{{- m.role + ':\\n' -}}{%- if m.role == 'assistant' -%}"
        "{%- generation -%}{{- m.content + '>' -}}{%- endgeneration -%}{{- '\\n' -}}"
        "{%- else -%}{{- m.content + '>\\n' -}}{%- endif -%}{%- endfor -%}"
    )
    plain = marked.replace("{%- generation -%}", "").replace("{%- endgeneration -%}", "")
    for one, other in itertools.pairwise(words):
        messages = [{"role": "user", "content": one}, answer(other), USER, answer(one)]
        tokenizer.chat_template = marked
        wanted = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        for template in (marked, plain):
            tokenizer.chat_template = template
            row = tokenize_conversation(tokenizer, messages)
            assert row.input_ids == wanted["input_ids"]
            assert row.token_mask == wanted["assistant_masks"]

"""The byte tokenizer, the case files and small templates in the manner of stock ones, for the tests of this folder."""

import json
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from nemo_rl.data.tokenizer import get_tokenizer

DATA = Path(__file__).parents[2] / "data"


def byte_tokenizer(template: str) -> PreTrainedTokenizerBase:
    """One token per UTF-8 byte, ids 0 to 255, and special tokens from 256 on."""
    return get_tokenizer({"name": str(DATA / "t0"), "chat_template": template})


def case_tokenizer(name: str) -> PreTrainedTokenizerBase:
    return byte_tokenizer(str(DATA / "templates" / f"{name}.jinja"))


def case_rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (DATA / "cases" / f"{name}.jsonl").read_bytes().split(b"\n") if line]


def trained_text(row: Any) -> list[str]:
    return [row.text[start:end] for start, end in row.spans]


PLAIN = (DATA / "templates" / "c0_plain.jinja").read_text()
MARKED = (DATA / "templates" / "c0_marked.jinja").read_text()

# Keeps the reasoning of turns after the last user turn, and opens the last turn with an empty block where it has none.
REASONING = """\
{%- set ns = namespace(last=-1) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- for m in messages -%}
{{- '<|s|>' + m.role + '\\n' -}}
{%- if m.role == 'assistant' -%}
{%- set answer = m.content.split('</think>')[-1] -%}
{%- set thought = m.content.split('</think>')[0].split('<think>')[-1] if '</think>' in m.content else '' -%}
{%- GENERATION -%}
{%- if loop.index0 > ns.last and (loop.last or thought) -%}
{{- '<think>\\n' + thought.strip() + '\\n</think>\\n\\n' -}}
{%- endif -%}
{{- answer.lstrip('\\n') -}}
{%- for c in m.tool_calls or [] -%}{{- '<tool>' + c.function | tojson + '</tool>' -}}{%- endfor -%}
{{- '<|e|>' -}}
{%- END -%}
{{- '\\n' -}}
{%- else -%}
{{- m.content + '<|e|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|s|>assistant\\n' -}}{%- endif -%}"""
REASONING_MARKED = REASONING.replace("GENERATION", "generation").replace("END", "endgeneration")
REASONING_PLAIN = REASONING.replace("{%- GENERATION -%}\n", "").replace("{%- END -%}\n", "")

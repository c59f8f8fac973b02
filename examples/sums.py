"""The sums task: a character tokenizer, a small model with random weights, rows to fine-tune on and prompts.

    python examples/sums.py OUT [--seed 0]

"012+034=" is continued by "6400": the sum in four digits, lowest digit first, so that each digit needs only what
stands before it. Nothing is downloaded.
"""

import argparse
import json
import random
from pathlib import Path

DIGITS, END, PAD = "0123456789+=", "E", "P"
# A turn is its text alone; the answer ends with E, which is what stops a sample.
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }}E{% endgeneration %}{% else %}{{ message['content'] }}{% endif %}"
    "{% endfor %}"
)


def problem(rng: random.Random) -> tuple[str, str]:
    """A prompt and its answer: `("012+034=", "6400")`."""
    a, b = rng.randint(0, 99), rng.randint(0, 99)
    return f"{a:03d}+{b:03d}=", f"{a + b:04d}"[::-1]


def write_rows(path: Path, rng: random.Random, count: int, answer: str) -> None:
    """`count` JSON lines with the fields `prompt` and `answer`."""
    rows = [dict(zip(("prompt", answer), problem(rng), strict=True)) for _ in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def make_model(out: Path, seed: int) -> int:
    """Write a Qwen3 model of 0.8 M random weights and its tokenizer; returns the number of parameters."""
    import torch
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    vocabulary = {character: number for number, character in enumerate([*DIGITS, END, PAD])}
    characters = Tokenizer(models.WordLevel(vocabulary, unk_token=PAD))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    characters.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=characters, pad_token=PAD, eos_token=END)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(out)
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=16,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=64,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen3ForCausalLM(config)
    model.save_pretrained(out)
    return model.num_parameters()


def make_task(out: Path, seed: int) -> int:
    """Write `base/`, `data/sft.jsonl`, `data/prompts.jsonl` and `data/val_prompts.jsonl`; the model's parameters."""
    rng = random.Random(seed)
    for folder in ("base", "data"):
        (out / folder).mkdir(parents=True, exist_ok=True)
    write_rows(out / "data" / "sft.jsonl", rng, 64_000, "completion")
    write_rows(out / "data" / "prompts.jsonl", rng, 80_000, "answer")
    write_rows(out / "data" / "val_prompts.jsonl", rng, 512, "answer")
    return make_model(out / "base", seed)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    words = parser.parse_args()
    make_task(words.out, words.seed)

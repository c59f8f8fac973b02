"""Models, tokenizers and rows that tests make on the spot: nothing is downloaded, everything is seeded."""

import json
import random
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

DATA = Path(__file__).parent / "data"
VOCAB = 266
"""Size of T0: 256 bytes and ten special tokens."""

TEMPLATE = (DATA / "templates" / "c0_marked.jinja").read_text()


def make_tokenizer(chat_template: str = TEMPLATE) -> PreTrainedTokenizerFast:
    """The byte-level tokenizer T0; ids 0 to 255 are bytes."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(DATA / "t0")
    tokenizer.chat_template = chat_template
    return tokenizer


def make_model_dir(
    path: Path,
    *,
    tied: bool = True,
    hidden: int = 32,
    layers: int = 2,
    seed: int = 0,
    family: str = "qwen3",
    positions: int = 512,
) -> Path:
    """A random model of about 30 k weights with T0 beside it; returns `path`."""
    torch.manual_seed(seed)
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": positions,
        "tie_word_embeddings": tied,
        "pad_token_id": 256,
        "bos_token_id": 257,
        "eos_token_id": 258,
    }
    if family == "llama":
        model = LlamaForCausalLM(LlamaConfig(**sizes))
    else:
        model = Qwen3ForCausalLM(Qwen3Config(head_dim=hidden // 4, **sizes))
    model.save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    return path


def make_chat_rows(path: Path, count: int, seed: int = 0) -> Path:
    """Chat rows of uneven length with `id` 0, 1, ...; returns `path`."""
    rng = random.Random(seed)
    with path.open("w") as file:
        for i in range(count):
            question = " ".join(rng.choice(["add", "sub", "mul"]) for _ in range(rng.randint(1, 8)))
            answer = " ".join(str(rng.randint(0, 99)) for _ in range(rng.randint(1, 8)))
            messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            file.write(json.dumps({"id": i, "messages": messages}) + "\n")
    return path


def make_rows(count: int, *, seed: int = 0, max_length: int = 40) -> dict[str, torch.Tensor]:
    """A padded batch of random rows of uneven length, half of their tokens trained."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(4, max_length, (count,), generator=generator)
    width = int(lengths.max())
    inside = torch.arange(width)[None] < lengths[:, None]
    token_mask = (torch.rand(count, width, generator=generator) < 0.5) & inside
    token_mask[:, 0] = False
    token_mask[:, 1] = True
    return {
        "input_ids": torch.randint(0, 256, (count, width), generator=generator) * inside,
        "input_lengths": lengths,
        "token_mask": token_mask.float(),
        "sample_mask": torch.ones(count),
    }


def select_rows(rows: dict[str, torch.Tensor], index: list[int]) -> dict[str, torch.Tensor]:
    """Some rows of a batch."""
    return {key: value[index] for key, value in rows.items()}

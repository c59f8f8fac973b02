"""The demo: make a tiny model and chat rows, fine-tune with two workers, export, report, and ask the model something.

    python examples/demo_sft.py

Everything it writes lies under runs/demo; nothing is downloaded. `make demo` runs it.
"""

from __future__ import annotations

import json
import random
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.text import Text

from nemo_rl.cli.metrics_log import find_metrics_file, read_metrics

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "runs" / "demo"
CONFIG = ROOT / "examples" / "configs" / "sft_tiny.yaml"
TRAIN_ROWS, VAL_ROWS = 2400, 96

# `generation` marks what is trained; a template without such marks gives the same mask.
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}<|end|>{% endgeneration %}"
    "{% else %}{{ message['content'] }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL_TOKENS = ["<|pad|>", "<|end|>", "<|user|>", "<|assistant|>"]

console = Console()


def chat_row(rng: random.Random) -> dict[str, list[dict[str, str]]]:
    """One row: a duration to convert into minutes, and the working.

    Example: `{"messages": [{"role": "user", "content": "How many minutes are 2 h 5 min?"},
    {"role": "assistant", "content": "2 h are 120 min, and 5 more make 125."}]}`
    """
    hours, minutes = rng.randint(1, 9), 5 * rng.randint(1, 11)
    task = rng.choice(["How many minutes are", "Write in minutes:", "Tell me the minutes of"])
    total = 60 * hours + minutes
    question = f"{task} {hours} h {minutes} min?"
    answer = f"{hours} h are {60 * hours} min, and {minutes} more make {total}."
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def make_data(out: Path) -> list[str]:
    """Write train.jsonl and val.jsonl; returns the texts of the training rows."""
    rng = random.Random(0)
    rows = [chat_row(rng) for _ in range(TRAIN_ROWS + VAL_ROWS)]
    for name, part in (("train", rows[:TRAIN_ROWS]), ("val", rows[TRAIN_ROWS:])):
        (out / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part), encoding="utf-8")
    return [message["content"] for row in rows[:TRAIN_ROWS] for message in row["messages"]]


def make_model(texts: list[str], out: Path) -> int:
    """Write a Qwen3 model with random weights and a byte-level tokenizer; returns the number of its parameters."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=320, special_tokens=SPECIAL_TOKENS, initial_alphabet=alphabet, show_progress=False
        ),
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token="<|pad|>", eos_token="<|end|>")
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(out)

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen3ForCausalLM(config)
    model.save_pretrained(out)
    return model.num_parameters()


def onehop(*words: str) -> None:
    """Run the command line as a user does, from the root of the repository; a failure ends the demo."""
    console.print(Text("\n$ onehop " + " ".join(words), style="bold"), soft_wrap=True)
    done = subprocess.run([sys.executable, "-m", "nemo_rl.cli.main", *words], cwd=ROOT, check=False)
    if done.returncode:
        sys.exit(done.returncode)


def ask(model_dir: Path, question: str) -> str:
    """The exported model's greedy answer, through plain transformers."""
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(model_dir)
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    ids = model.generate(**prompt, max_new_tokens=60, do_sample=False)
    return str(tokenizer.decode(ids[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True))


def write_summary(name: str, section: dict[str, object]) -> Path:
    """Put `section` under `name` in runs/demo/summary.json, beside what other demos wrote there."""
    path = OUT / "summary.json"
    summary = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    path.write_text(json.dumps({**summary, name: section}, indent=2) + "\n", encoding="utf-8")
    return path


def main() -> None:
    started = time.monotonic()
    for stale in ("base", "data", "sft"):
        shutil.rmtree(OUT / stale, ignore_errors=True)
    for new in ("base", "data"):
        (OUT / new).mkdir(parents=True)
    parameters = make_model(make_data(OUT / "data"), OUT / "base")
    console.print(
        f"{TRAIN_ROWS:,} chat rows and a model of {parameters:,} random weights are in {OUT.relative_to(ROOT)}"
    )

    run, model = OUT / "sft", OUT / "sft" / "model"
    onehop("data", "inspect", "runs/demo/data/train.jsonl", "--model", "runs/demo/base", "--row", "0")
    onehop("sft", "--config", str(CONFIG.relative_to(ROOT)))
    onehop("export", "runs/demo/sft/checkpoints", "runs/demo/sft/model", "--dtype", "float32")
    onehop("report", "runs/demo/sft/logs", "--out", "runs/demo/sft/report.html")

    question = "How many minutes are 7 h 25 min?"
    console.print(f"\nYou:   {question}\nModel: {ask(model, question)}")

    metrics = read_metrics(find_metrics_file(run / "logs"))
    loss, speed = metrics.series["loss"], metrics.series["tokens_per_second"]
    summary = write_summary(
        "sft",
        {
            "first_loss": loss.values[0],
            "last_loss": loss.values[-1],
            "steps": loss.steps[-1],
            "tokens_per_s": statistics.median(speed.values),
            "seconds": round(time.monotonic() - started, 1),
            "report": str(run / "report.html"),
            "model": str(model),
        },
    )
    console.print(f"\nloss {loss.values[0]:.3f} -> {loss.values[-1]:.3f} in {loss.steps[-1]} steps; see {summary}")


if __name__ == "__main__":
    main()

"""New tokens per second of the embedded sampler against transformers' `generate`, in one process, turn about.

    OMP_NUM_THREADS=2 python benchmarks/generation.py [--rounds 5] [--precision bfloat16] [--profile]

`chat`: 64 chat prompts of the benchmark workload, 64 new tokens each, 10 M parameters.
`group`: the same with 8 prompts, sampled 8 times each.
`sums`: 256 prompts of 8 tokens, 5 new tokens each, 0.8 M parameters.
Prints one JSON line per task: tokens/s of both (median over the rounds), their ratio, passes of the sampler.
"""

import argparse
import cProfile
import itertools
import json
import pstats
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging as transformers_logging

from nemo_rl.models.generation.hf import HFGenerationEngine
from nemo_rl.models.generation.interfaces import GenerationRequest, SamplingParams

WORKLOAD = Path(__file__).parent / "yardsticks" / "workload.py"
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}

Prompts = list[tuple[int, ...]]


def chat_prompts(folder: Path, count: int) -> Prompts:
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    rows = [json.loads(line)["messages"] for line in (folder / "train.jsonl").open()][:count]
    texts = [tokenizer.apply_chat_template(row[:1], tokenize=False, add_generation_prompt=True) for row in rows]
    return [tuple(tokenizer(text, add_special_tokens=False).input_ids) for text in texts]


def make_sums(folder: Path) -> Prompts:
    config = Qwen3Config(
        vocab_size=16, hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=64, eos_token_id=12, pad_token_id=13,
    )  # fmt: skip
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    rng = random.Random(0)
    pairs = [f"{rng.randint(0, 99):03d}+{rng.randint(0, 99):03d}=" for _ in range(256)]
    return [tuple("0123456789+=".index(character) for character in text) for text in pairs]


def with_generate(folder: Path, dtype: torch.dtype, prompts: Prompts, new_tokens: int, eos: int) -> Callable[[], int]:
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa", dtype=dtype).eval()
    pad = model.config.pad_token_id
    width = max(map(len, prompts))
    ids = torch.tensor([[pad] * (width - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])

    @torch.no_grad()
    def sample() -> int:
        out = model.generate(
            input_ids=ids, attention_mask=mask, max_new_tokens=new_tokens, do_sample=True, top_k=0, eos_token_id=eos
        )[:, width:]
        return int(((out == eos).int().cumsum(1) - (out == eos).int() == 0).sum())

    return sample


def with_engine(engine: HFGenerationEngine, prompts: Prompts, new_tokens: int, eos: int) -> Callable[[], int]:
    sampling = SamplingParams(max_new_tokens=new_tokens, stop_token_ids=(eos,))
    turns = itertools.count()

    def sample() -> int:
        turn = next(turns)
        engine.add(
            [GenerationRequest(str(i), prompt, sampling, seed=turn * 1000 + i) for i, prompt in enumerate(prompts)]
        )
        count = 0
        while engine.num_unfinished:
            count += sum(len(output.token_ids) for output in engine.step())
        return count

    return sample


def tokens_per_second(sample: Callable[[], int]) -> float:
    started = time.perf_counter()
    count = sample()
    return count / (time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--precision", choices=DTYPES, default="bfloat16")
    parser.add_argument("--only", nargs="*", default=["chat", "group", "sums"])
    parser.add_argument("--profile", action="store_true", help="where the sampler's time goes, per task")
    args = parser.parse_args()
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        subprocess.run([sys.executable, str(WORKLOAD), str(folder)], check=True, stdout=subprocess.DEVNULL)
        chat = chat_prompts(folder, 64)
        tasks = {
            "chat": (folder / "model", chat, 64, 2),
            "group": (folder / "model", [prompt for prompt in chat[:8] for _ in range(8)], 64, 2),
            "sums": (folder / "sums", make_sums(folder / "sums"), 5, 12),
        }
        for name in args.only:
            path, prompts, new_tokens, eos = tasks[name]
            engine = HFGenerationEngine(str(path), precision=args.precision, max_slots=len(prompts))
            ours = with_engine(engine, prompts, new_tokens, eos)
            theirs = with_generate(path, DTYPES[args.precision], prompts, new_tokens, eos)
            weights = list(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).named_parameters())
            ours(), theirs()  # kernels are compiled for the shapes of the task
            passes = engine.num_passes
            rates = []
            for turn in range(args.rounds):
                # Without new weights the prompts of the last turn would still lie in the cache.
                engine.load_weights(weights, version=turn)
                rates.append((tokens_per_second(ours), tokens_per_second(theirs)))
            sampler, generate = (statistics.median(column) for column in zip(*rates, strict=True))
            result = {
                "task": name,
                "precision": args.precision,
                "threads": torch.get_num_threads(),
                "sampler_tokens_per_s": round(sampler),
                "generate_tokens_per_s": round(generate),
                "ratio": round(sampler / generate, 2),
                "passes": (engine.num_passes - passes) // args.rounds,
            }
            print(json.dumps(result), flush=True)
            if args.profile:
                engine.load_weights(weights, version=args.rounds)
                with cProfile.Profile() as profile:
                    ours()
                pstats.Stats(profile).sort_stats("tottime").print_stats(25)


if __name__ == "__main__":
    main()

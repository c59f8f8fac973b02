"""Our engine on the skewed rows of the workload, packed as it does it, or padded as a loop without packing would.

    python benchmarks/packing.py WORKLOAD [--padded] [--compiled] [--tokens 1024] [--dtype bf16|fp32] [--steps 6]

Padded: eight rows a pass, each filled up to the longest of them with tokens that are not trained but computed. Prints
one JSON line with the rows' own tokens per second; padding does not count.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoTokenizer

from nemo_rl.algorithms.loss.loss_functions import NLLLossFn
from nemo_rl.models.engine.config import EngineConfig, OptimizerSpec, ParallelSizes
from nemo_rl.models.engine.engine import Engine
from nemo_rl.models.engine.mesh import build_mesh

ROWS, PASS_ROWS, WARM_UP, TOKENS = 32, 8, 2, 1024


def batch(rows: list[tuple[list[int], list[int]]], *, padded: bool) -> dict[str, torch.Tensor]:
    width = max(len(ids) for ids, _ in rows)
    input_ids, token_mask = torch.zeros(len(rows), width, dtype=torch.int64), torch.zeros(len(rows), width)
    for i, (ids, trained) in enumerate(rows):
        input_ids[i, : len(ids)], token_mask[i, : len(ids)] = torch.tensor(ids), torch.tensor(trained).float()
    lengths = [width if padded else len(ids) for ids, _ in rows]
    return {
        "input_ids": input_ids,
        "input_lengths": torch.tensor(lengths),
        "token_mask": token_mask,
        "sample_mask": torch.ones(len(rows)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", type=Path)
    parser.add_argument("--padded", action="store_true")
    parser.add_argument("--compiled", action="store_true", help="torch_compile")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of a packed pass")
    parser.add_argument("--dtype", choices=["bf16", "fp32"], default="bf16")
    parser.add_argument("--steps", type=int, default=6)
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.workload / "model")
    lines = (args.workload / "train.jsonl").read_text().splitlines()[: ROWS * (args.steps + WARM_UP)]
    found = [
        tokenizer.apply_chat_template(json.loads(line)["messages"], return_dict=True, return_assistant_tokens_mask=True)
        for line in lines
    ]
    rows = [(row["input_ids"], row["assistant_masks"]) for row in found]
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(f"{folder}/store", 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        optimizer = OptimizerSpec(name="torch.optim.AdamW", kwargs={"lr": 1e-3})
        # A budget that no padded pass reaches: its rows are cut below.
        tokens = 1 << 30 if args.padded else args.tokens
        precision = "bfloat16" if args.dtype == "bf16" else "float32"
        config = EngineConfig(
            model_name=str(args.workload / "model"),
            optimizer=optimizer,
            precision=precision,
            microbatch_tokens=tokens,
            torch_compile=args.compiled,
        )
        engine = Engine(config, build_mesh(ParallelSizes(), torch.device("cpu")))
        loss_fn, seconds, done = NLLLossFn(), 0.0, 0
        for step in range(args.steps + WARM_UP):
            part = rows[step * ROWS : (step + 1) * ROWS]
            size = PASS_ROWS if args.padded else ROWS
            started = time.perf_counter()
            engine.begin_step(loss_fn)
            for start in range(0, ROWS, size):
                engine.microbatch(batch(part[start : start + size], padded=args.padded))
            engine.finish_step()
            if step >= WARM_UP:
                seconds += time.perf_counter() - started
                done += sum(len(ids) for ids, _ in part)
        dist.destroy_process_group()
    what = "padded" if args.padded else "packed"
    print(json.dumps({"what": what, "dtype": args.dtype, "tokens_per_s": round(done / seconds, 1)}))


if __name__ == "__main__":
    main()

"""Measure Onehop's SFT against a bare loop and TRL on this machine, and write the table.

    python benchmarks/run.py [--rounds 3] [--check] [--only WHAT ...]

The programs run one after the other in each round, so that a slow minute of the machine hits all of them; a figure is
the median over the rounds. What is compared and committed are ratios. `--check` compares them with the newest committed
table and fails when one fell by more than 20 %.
"""

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
YARDSTICKS = HERE / "yardsticks"
RESULTS = HERE / "results"
STEPS, WARM_UP, ROWS, TOKENS = 8, 2, 32, 1024
TOLERANCE = 0.2

CONFIG = """
policy:
  model_name: {workload}/model
  train_global_batch_size: {rows}
  max_total_sequence_length: 1024
  train_mb_tokens: {tokens}
  precision: {precision}
  data_parallel: replicate
  optimizer: {{name: torch.optim.AdamW, kwargs: {{lr: 1.0e-3, weight_decay: 0.01}}}}
data:
  train: {{path: {workload}/train.jsonl}}
  shuffle: false
sft: {{max_num_steps: {steps}, val_at_start: false, val_period: 0}}
data_plane: {{enabled: true, impl: local}}
logger: {{log_dir: {logs}}}
cluster: {{gpus_per_node: {workers}}}
checkpointing: {{enabled: false, checkpoint_dir: {logs}/checkpoints, save_period: 1000}}
"""

RATIOS = {
    "one worker / bare loop, bf16": ("onehop bf16", "bare bf16", 0.9),
    "one worker / TRL, bf16": ("onehop bf16", "trl bf16", 2.0),
    "one worker / bare loop, fp32": ("onehop fp32", "bare fp32", None),
    "two workers / bare two ranks, bf16": ("onehop x2 bf16", "bare x2 bf16", 0.9),
}


def last_json(command: list[str]) -> dict[str, float]:
    done = subprocess.run(command, capture_output=True, text=True, cwd=YARDSTICKS)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def onehop(workload: Path, workers: int, precision: str) -> float:
    """Tokens/s of `onehop sft` over the steps after the warm-up: tokens of the rows over whole step times."""
    with tempfile.TemporaryDirectory() as folder:
        logs = Path(folder) / "logs"
        config = Path(folder) / "run.yaml"
        settings = {"workload": workload, "rows": ROWS, "tokens": TOKENS, "steps": STEPS + WARM_UP, "logs": logs}
        config.write_text(CONFIG.format(workers=workers, precision=precision, **settings))
        command = [sys.executable, "-m", "nemo_rl.cli.main", "sft", "--config", str(config)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"onehop sft failed:\n{done.stderr[-2000:]}")
        lines = [json.loads(line) for line in (logs / "metrics.jsonl").read_text().splitlines()]
    timed = [line for line in lines if line["step"] > WARM_UP]
    return sum(line["tokens"] for line in timed) / sum(line["total_step_time"] for line in timed)


def measure(workload: Path, rounds: int, only: list[str]) -> dict[str, list[float]]:
    script = lambda name, *words: [sys.executable, str(YARDSTICKS / name), str(workload), *words]  # noqa: E731
    programs = {
        "bare bf16": lambda: last_json(script("bare_sft.py"))["tokens_per_s"],
        "onehop bf16": lambda: onehop(workload, 1, "bfloat16"),
        "trl bf16": lambda: last_json(script("trl_sft.py"))["tokens_per_s"],
        "bare fp32": lambda: last_json(script("bare_sft.py", "--dtype", "fp32"))["tokens_per_s"],
        "onehop fp32": lambda: onehop(workload, 1, "float32"),
        "bare x2 bf16": lambda: last_json(script("bare_sft_dp2.py"))["two_tokens_per_s"],
        "onehop x2 bf16": lambda: onehop(workload, 2, "bfloat16"),
    }
    figures: dict[str, list[float]] = {}
    for turn in range(rounds):
        for name, program in programs.items():
            if not only or name in only:
                figures.setdefault(name, []).append(program())
                print(f"round {turn + 1}: {name:16} {figures[name][-1]:8.0f} tokens/s", flush=True)
    return figures


def machine() -> str:
    cpu = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        platform.processor(),
    )
    return f"{os.cpu_count()} cores of {cpu}"


def report(figures: dict[str, list[float]]) -> dict[str, object]:
    import torch

    medians = {name: statistics.median(values) for name, values in figures.items()}
    ratios = {
        label: round(medians[ours] / medians[theirs], 3)
        for label, (ours, theirs, _) in RATIOS.items()
        if ours in medians and theirs in medians
    }
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=HERE)
    return {
        "date": datetime.date.today().isoformat(),
        "commit": commit.stdout.strip(),
        "machine": machine(),
        "torch": torch.__version__,
        "ratios": ratios,
        "tokens_per_s": {name: [round(value, 1) for value in values] for name, values in figures.items()},
    }


def table(result: dict) -> str:
    head = f"SFT on {result['machine']}, torch {result['torch']}, commit {result['commit']}, {result['date']}"
    lines = [f"# {head}", "", "Made by `make bench`; medians over the rounds of one run.", ""]
    lines += ["| program | tokens/s | rounds |", "|---|---|---|"]
    lines += [
        f"| {name} | {statistics.median(values):,.0f} | {', '.join(f'{v:,.0f}' for v in values)} |"
        for name, values in result["tokens_per_s"].items()
    ]
    lines += ["", "| ratio | measured | wanted |", "|---|---|---|"]
    lines += [f"| {label} | {ratio:.2f} | {RATIOS[label][2] or '-'} |" for label, ratio in result["ratios"].items()]
    return "\n".join(lines) + "\n"


def check(ratios: dict[str, float]) -> list[str]:
    committed = sorted(RESULTS.glob("sft-*.json"))
    if not committed:
        return ["there is no committed table in benchmarks/results; run `make bench` first"]
    before = json.loads(committed[-1].read_text())["ratios"]
    return [
        f"{label}: {ratios[label]:.2f}, was {before[label]:.2f} in {committed[-1].name}"
        for label in ratios.keys() & before.keys()
        if ratios[label] < before[label] * (1 - TOLERANCE)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--check", action="store_true", help="compare with the committed table instead of writing one")
    parser.add_argument("--only", nargs="*", default=[], help="names of programs, for a quick look")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        workload = Path(folder)
        last_json([sys.executable, str(YARDSTICKS / "workload.py"), str(workload)])
        result = report(measure(workload, args.rounds, args.only))
    print(table(result))
    if args.check:
        problems = check(result["ratios"])
        sys.exit("\n".join(problems) if problems else 0)
    if not args.only:
        RESULTS.mkdir(exist_ok=True)
        name = f"sft-{result['date']}"
        (RESULTS / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
        (RESULTS / f"{name}.md").write_text(table(result))


if __name__ == "__main__":
    main()

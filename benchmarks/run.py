"""Measure Onehop's SFT, PPO and GRPO against bare loops and TRL on this machine, and write the table.

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

from programs import YARDSTICKS, last_json, onehop_rl, onehop_sft

HERE = Path(__file__).parent
RESULTS = HERE / "results"
TOLERANCE = 0.2

RATIOS = {
    "one worker / bare loop, bf16": ("onehop bf16", "bare bf16", 0.9),
    "one worker / TRL, bf16": ("onehop bf16", "trl bf16", 2.0),
    "one worker / bare loop, fp32": ("onehop fp32", "bare fp32", None),
    "two workers / bare two ranks, bf16": ("onehop x2 bf16", "bare x2 bf16", 0.9),
    "PPO with a critic / bare loop, bf16": ("onehop ppo", "bare ppo", 0.85),
    "GRPO / TRL, bf16": ("onehop grpo", "trl grpo", 1.1),
}
UNITS = {"ppo": "samples/s", "grpo": "samples/s"}


def measure(workload: Path, rounds: int, only: list[str]) -> dict[str, list[float]]:
    script = lambda name, *words: [sys.executable, str(YARDSTICKS / name), str(workload), *words]  # noqa: E731
    programs = {
        "bare bf16": lambda: last_json(script("bare_sft.py"))["tokens_per_s"],
        "onehop bf16": lambda: onehop_sft(workload, 1, "bfloat16"),
        "trl bf16": lambda: last_json(script("trl_sft.py"))["tokens_per_s"],
        "bare fp32": lambda: last_json(script("bare_sft.py", "--dtype", "fp32"))["tokens_per_s"],
        "onehop fp32": lambda: onehop_sft(workload, 1, "float32"),
        "bare x2 bf16": lambda: last_json(script("bare_sft_dp2.py"))["two_tokens_per_s"],
        "onehop x2 bf16": lambda: onehop_sft(workload, 2, "bfloat16"),
        "bare ppo": lambda: last_json(script("bare_ppo.py"))["samples_per_s"],
        "onehop ppo": lambda: onehop_rl(workload, "ppo"),
        "trl grpo": lambda: last_json(script("trl_grpo.py"))["samples_per_s"],
        "onehop grpo": lambda: onehop_rl(workload, "grpo"),
    }
    figures: dict[str, list[float]] = {}
    for turn in range(rounds):
        for name, program in programs.items():
            if not only or name in only:
                figures.setdefault(name, []).append(program())
                print(f"round {turn + 1}: {name:16} {figures[name][-1]:10,.1f} {unit(name)}", flush=True)
    return figures


def unit(name: str) -> str:
    """What the figure of a program counts."""
    return UNITS.get(name.split()[-1], "tokens/s")


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
        "figures": {name: [round(value, 1) for value in values] for name, values in figures.items()},
    }


def table(result: dict) -> str:
    where = f"{result['machine']}, torch {result['torch']}, commit {result['commit']}, {result['date']}"
    lines = [f"# SFT, PPO and GRPO on {where}", "", "Made by `make bench`; medians over the rounds of one run.", ""]
    lines += ["| program | figure | rounds | |", "|---|---|---|---|"]
    lines += [
        f"| {name} | {statistics.median(values):,.1f} | {', '.join(f'{v:,.1f}' for v in values)} | {unit(name)} |"
        for name, values in result["figures"].items()
    ]
    lines += ["", "| ratio | measured | wanted |", "|---|---|---|"]
    lines += [f"| {label} | {ratio:.2f} | {RATIOS[label][2] or '-'} |" for label, ratio in result["ratios"].items()]
    return "\n".join(lines) + "\n"


def check(ratios: dict[str, float]) -> list[str]:
    committed = sorted(RESULTS.glob("*.json"))
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
        name = result["date"]
        (RESULTS / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
        (RESULTS / f"{name}.md").write_text(table(result))


if __name__ == "__main__":
    main()

"""Measure Onehop's SFT, PPO and GRPO against bare loops and TRL on this machine, and write the table.

    python benchmarks/run.py [--rounds 3] [--check] [--only WHAT ...]

The programs run one after the other in each round, so that a slow minute of the machine hits all of them. What is
compared and committed are ratios: the median over the rounds of ours through theirs in the same round. `--check`
compares them with the newest committed table and fails when one fell by more than 20 %. The table is written after
every round.
"""

import argparse
import datetime
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from programs import VLLM_PYTHON, YARDSTICKS, last_json, onehop_rl, onehop_sft

HERE = Path(__file__).parent
RESULTS = HERE / "results"
TOLERANCE = 0.2

# ratio: (ours, theirs, what is aimed at in bf16, in fp32). Names of programs get the precision behind them.
RATIOS = {
    "one worker / bare loop": ("onehop", "bare", 1.1, 1.0),
    "one worker / TRL": ("onehop", "trl", 2.5, None),
    "two workers / bare two ranks": ("onehop x2", "bare x2", 1.0, 1.0),
    "PPO with a critic / bare loop": ("onehop ppo", "bare ppo", 1.0, 1.0),
    "PPO with a critic, vLLM / bare loop": ("onehop ppo vllm", "bare ppo", 1.1, 1.1),
    "GRPO / TRL": ("onehop grpo", "trl grpo", 1.2, 1.2),
    "GRPO, vLLM / TRL": ("onehop grpo vllm", "trl grpo", 1.4, 1.4),
    "engine packed / padded": ("packed", "padded", 2.0, 2.0),
}
NAMES = {"bf16": "bfloat16", "fp32": "float32"}
TOKENS, SAMPLES = "tokens/s", "samples/s"
# Figures by what they count; the first is the one that ratios compare.
Program = Callable[[], dict[str, float]]


def programs_of(workload: Path, precision: str) -> dict[str, Program]:
    """The programs in one precision, in the order in which they run."""

    def script(name: Path, key: str, unit: str, *words: str) -> Program:
        command = [sys.executable, str(name), str(workload), "--dtype", precision, *words]
        return lambda: {unit: last_json(command)[key]}

    ours = NAMES[precision]
    programs = {
        "bare": script(YARDSTICKS / "bare_sft.py", "tokens_per_s", TOKENS),
        "onehop": lambda: onehop_sft(workload, 1, ours),
        "trl": script(YARDSTICKS / "trl_sft.py", "tokens_per_s", TOKENS),
        "bare x2": script(YARDSTICKS / "bare_sft_dp2.py", "two_tokens_per_s", TOKENS),
        "onehop x2": lambda: onehop_sft(workload, 2, ours),
        "bare ppo": script(YARDSTICKS / "bare_ppo.py", "samples_per_s", SAMPLES),
        "onehop ppo": lambda: onehop_rl(workload, "ppo", ours),
        "trl grpo": script(YARDSTICKS / "trl_grpo.py", "samples_per_s", SAMPLES),
        "onehop grpo": lambda: onehop_rl(workload, "grpo", ours),
        "packed": script(HERE / "packing.py", "tokens_per_s", TOKENS),
        "padded": script(HERE / "packing.py", "tokens_per_s", TOKENS, "--padded"),
    }
    if VLLM_PYTHON.exists():  # make setup-vllm
        programs["onehop ppo vllm"] = lambda: onehop_rl(workload, "ppo", ours, "vllm")
        programs["onehop grpo vllm"] = lambda: onehop_rl(workload, "grpo", ours, "vllm")
    return {f"{name} {precision}": program for name, program in programs.items()}


def measure(workload: Path, rounds: int, only: list[str]) -> Iterator[dict[str, list[float]]]:
    """After each round, the figures by program, one for each round so far.

    Where the hardware multiplies in bfloat16 that is measured, and SFT with one worker in float32; else float32.
    """
    programs = programs_of(workload, "fp32")
    if has_bf16():
        programs = programs_of(workload, "bf16") | {name: programs[name] for name in ("bare fp32", "onehop fp32")}
    unknown = sorted(set(only) - set(programs))
    if unknown:
        sys.exit(f"--only {', '.join(unknown)}: this machine's programs are {', '.join(programs)}")
    figures: dict[str, list[float]] = {}
    for turn in range(rounds):
        for name, program in programs.items():
            if only and name not in only:
                continue
            for number, (unit, value) in enumerate(program().items()):
                key = f"{name}, {unit}" if number else name
                figures.setdefault(key, []).append(value)
                print(f"round {turn + 1}: {key:32} {shown(value)}{'' if number else f' {unit}'}", flush=True)
        yield figures


def shown(value: float) -> str:
    """A figure for people, in at least three digits."""
    return f"{value:.3f}" if value < 1 else f"{value:.2f}" if value < 100 else f"{value:,.0f}"


def has_bf16() -> bool:
    """Whether this machine's CPU multiplies in bfloat16, so that `precision: auto` is that."""
    import torch

    from nemo_rl.models.engine.precision import has_bfloat16

    return has_bfloat16(torch.device("cpu"))


def cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":")[1].strip() for line in lines if "model name" in line), platform.processor())


def wanted(label: str) -> float | None:
    """The bound of a ratio whose label ends with its precision."""
    name, precision = label.rsplit(", ", 1)
    return RATIOS[name][2 if precision == "bf16" else 3]


def environment() -> dict[str, object]:
    """Where a measurement was made: date, commit, machine, torch."""
    import torch

    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=HERE)
    return {
        "date": datetime.date.today().isoformat(),
        "commit": commit.stdout.strip(),
        "machine": f"{os.cpu_count()} cores of {cpu_name()}",
        "torch": torch.__version__,
    }


def report(figures: dict[str, list[float]]) -> dict[str, object]:
    def ratio(ours: str, theirs: str) -> float:
        pairs = zip(figures[ours], figures[theirs], strict=True)
        return round(statistics.median(mine / other for mine, other in pairs), 3)

    ratios = {
        f"{label}, {precision}": ratio(f"{ours} {precision}", f"{theirs} {precision}")
        for precision in NAMES
        for label, (ours, theirs, *_) in RATIOS.items()
        if {f"{ours} {precision}", f"{theirs} {precision}"} <= figures.keys()
    }
    rounded = {name: [round(value, 4) for value in values] for name, values in figures.items()}
    return environment() | {"ratios": ratios, "figures": rounded}


def table(result: dict) -> str:
    where = f"{result['machine']}, torch {result['torch']}, commit {result['commit']}, {result['date']}"
    lines = [
        f"# SFT, PPO and GRPO on {where}",
        "",
        "Made by `make bench`; medians over the rounds of one run, of ratios as well: ours through theirs in the same",
        "round. SFT in tokens/s, PPO and GRPO in samples/s. Onehop's SFT runs with `torch_compile: true` and",
        "`train_mb_tokens: auto`, whose time falls before the first step.",
        "",
    ]
    lines += ["| program | median | rounds |", "|---|---|---|"]
    lines += [
        f"| {name} | {shown(statistics.median(values))} | {', '.join(map(shown, values))} |"
        for name, values in result["figures"].items()
    ]
    lines += ["", "| ratio | measured | wanted |", "|---|---|---|"]
    lines += [f"| {label} | {ratio:.2f} | {wanted(label) or '-'} |" for label, ratio in result["ratios"].items()]
    return "\n".join(lines) + "\n"


def results_name() -> str:
    """Name of this machine's tables: words of the processor's name, as in `intel-xeon`."""
    words = [word for word in re.findall(r"[a-z]+", cpu_name().lower()) if len(word) > 2]
    return "-".join(word for word in words if word not in ("cpu", "core", "processor", "with"))


def check(ratios: dict[str, float]) -> list[str]:
    """One line per ratio that fell against the newest committed table of such a processor, else of any."""
    tables = sorted(RESULTS.glob("20*.json"), key=lambda path: (results_name() in path.name, path.name), reverse=True)
    if not tables:
        return ["there is no committed table in benchmarks/results; run `make bench` first"]
    problems = []
    for label, ratio in ratios.items():
        found = next(((t, r[label]) for t in tables if label in (r := json.loads(t.read_text())["ratios"])), None)
        if found and ratio < found[1] * (1 - TOLERANCE):
            problems.append(f"{label}: {ratio:.2f}, was {found[1]:.2f} in {found[0].name}")
    return problems


def write(result: dict) -> None:
    """The table of this machine and day, as JSON and for people."""
    RESULTS.mkdir(exist_ok=True)
    name = f"{result['date']}-{results_name()}"
    (RESULTS / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    (RESULTS / f"{name}.md").write_text(table(result))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--check", action="store_true", help="compare with the committed table instead of writing one")
    parser.add_argument("--only", nargs="*", default=[], help="names of programs, for a quick look")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        workload = Path(folder)
        last_json([sys.executable, str(YARDSTICKS / "workload.py"), str(workload)])
        for figures in measure(workload, args.rounds, args.only):
            result = report(figures)
            if not args.check and not args.only:
                write(result)
    print(table(result))
    if args.check:
        problems = check(result["ratios"])
        sys.exit("\n".join(problems) if problems else 0)


if __name__ == "__main__":
    main()

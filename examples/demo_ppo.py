"""The PPO demo: fine-tune a tiny model on sums, stop it early, and let PPO with a critic improve it by its own samples.

    python examples/demo_ppo.py [--seed 0] [--steps 60]

Everything it writes lies under runs/demo/ppo; nothing is downloaded. `make demo` runs it after the SFT demo.
"""

from __future__ import annotations

import argparse
import bisect
import json
import shutil
import statistics
import tempfile
import time
from pathlib import Path

from demo_sft import OUT, ROOT, console, onehop, write_summary
from rich.text import Text
from sums import make_task

from nemo_rl.cli.metrics_log import find_metrics_file, read_metrics

RUN = OUT / "ppo"
START = 0.2  # where the fine-tuning is stopped: sampled exact match
SFT_STEPS = (400, 520, 640, 760, 880, 1000)
CONFIGS = "examples/configs"


def exact_match(model_dir: Path, prompts: Path) -> float:
    """The part of sampled answers that are right, through plain transformers."""
    import torch
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(model_dir)
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    rows = [json.loads(line) for line in prompts.read_text(encoding="utf-8").splitlines()]
    ids = torch.tensor(tokenizer([row["prompt"] for row in rows], add_special_tokens=False)["input_ids"])
    torch.manual_seed(0)
    drawn = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=5, do_sample=True, top_k=0
    )
    answers = tokenizer.batch_decode(drawn[:, ids.size(1) :])
    return sum(answer == f"{row['answer']}E" for answer, row in zip(answers, rows, strict=True)) / len(rows)


def stop_early(checkpoints: Path, prompts: Path) -> tuple[Path, float]:
    """The first checkpoint that is right in `START` of its samples, or the last one, and its part of right ones."""
    from nemo_rl.models.engine.export import export_hf

    steps = sorted(checkpoints.glob("step_*"), key=lambda path: int(path.name.removeprefix("step_")))
    scores: dict[int, float] = {}

    def is_enough(index: int) -> bool:
        with tempfile.TemporaryDirectory() as folder:
            model = export_hf(steps[index], Path(folder) / "model", "float32")
            scores[index] = exact_match(model, prompts)
        return scores[index] >= START

    first = min(bisect.bisect_left(range(len(steps)), True, key=is_enough), len(steps) - 1)
    if first not in scores:
        is_enough(first)
    return steps[first], scores[first]


def last_answers(path: Path, count: int) -> list[str]:
    """Some of the last step's samples, as `012+034= 6400 (reward 1)`."""
    answers = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [f"{answer['prompt']} {answer['response']} (reward {answer['reward']:g})" for answer in answers[-count:]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=60, help="steps of PPO")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings of the PPO run")
    words = parser.parse_args()
    shutil.rmtree(RUN, ignore_errors=True)
    parameters = make_task(RUN, words.seed)
    console.print(f"\nSums to learn, and a model of {parameters:,} random weights, are in {RUN.relative_to(ROOT)}")
    checkpoint, start = RUN, 0.0
    for steps in SFT_STEPS:
        # Digits fall into place at a step that nobody can tell; the same command goes on where the last one ended.
        settings = (f"sft.seed={words.seed}", f"sft.max_num_steps={steps}")
        onehop("sft", "--config", f"{CONFIGS}/sft_sums.yaml", *settings)
        checkpoint, start = stop_early(RUN / "sft" / "checkpoints", RUN / "data" / "val_prompts.jsonl")
        if start >= START:
            break
    console.print(f"\n{checkpoint.name} is right in {start:.0%} of its samples: PPO starts there")
    onehop("export", str(checkpoint.relative_to(ROOT)), "runs/demo/ppo/sft_model", "--dtype", "float32")

    started = time.monotonic()
    limit = f"ppo.max_num_steps={words.steps}"
    onehop("ppo", "--config", f"{CONFIGS}/ppo_sums.yaml", f"ppo.seed={words.seed}", limit, *words.overrides)
    seconds = time.monotonic() - started
    onehop("export", "runs/demo/ppo/checkpoints", "runs/demo/ppo/model", "--dtype", "float32")
    onehop("report", "runs/demo/ppo/logs", "--out", "runs/demo/ppo/report.html")

    console.print("\nAnswers at the end (lowest digit first):")
    for answer in last_answers(RUN / "logs" / "samples.jsonl", 4):
        console.print(Text(f"  {answer}"))
    metrics = read_metrics(find_metrics_file(RUN / "logs"))
    reward, step_time = metrics.series["val_reward"], metrics.series["total_step_time"]
    summary = write_summary(
        "ppo",
        {
            "first_reward": reward.values[0],
            "last_reward": reward.values[-1],
            "steps": step_time.steps[-1],
            "step_s": statistics.median(step_time.values),
            "seconds": round(seconds, 1),
            "report": str(RUN / "report.html"),
            "model": str(RUN / "model"),
        },
    )
    console.print(
        f"\nsampled exact match {reward.values[0]:.3f} -> {reward.values[-1]:.3f} in {step_time.steps[-1]} steps; "
        f"see {summary}"
    )


if __name__ == "__main__":
    main()

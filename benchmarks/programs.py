"""The programs that are measured: their configs, and how a figure comes out of a run."""

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

YARDSTICKS = Path(__file__).parent / "yardsticks"
VLLM_PYTHON = Path(__file__).parent.parent / ".venv-vllm" / "bin" / "python"
STEPS, WARM_UP, ROWS = 8, 2, 32
RL_STEPS, RL_WARM_UP, SAMPLES, NEW_TOKENS, RL_TOKENS = 4, 2, 64, 64, 2048

SFT_CONFIG = """
policy:
  model_name: {workload}/model
  train_global_batch_size: {rows}
  max_total_sequence_length: 1024
  train_mb_tokens: {tokens}
  torch_compile: {compiled}
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

# Like bare_ppo.py and trl_grpo.py: 64 samples of up to 64 tokens, one update of each model; GRPO: 8 samples a prompt.
RL_CONFIG = """
policy: &model
  model_name: {workload}/model
  train_global_batch_size: {samples}
  max_total_sequence_length: 1024
  train_mb_tokens: {tokens}
  precision: {precision}
  optimizer: {{name: torch.optim.AdamW, kwargs: {{lr: 1.0e-5}}}}
  generation: {{backend: {backend}, max_new_tokens: {new_tokens}, max_slots: {samples}}}
{critic}
{algorithm}:
  num_prompts_per_step: {prompts}
  num_generations_per_prompt: {generations}
  max_num_steps: {steps}
  {algorithm}_epochs: 1
loss_fn: {{reference_policy_kl_penalty: 0.0, force_on_policy_ratio: {on_policy}}}
env: {{name: python, function: {here}/reward.py:gold_occurs}}
data: {{train: {{path: {workload}/train.jsonl}}, shuffle: false}}
data_plane: {{enabled: true, impl: transfer_queue, backend: simple}}
logger: {{log_dir: {logs}}}
cluster: {{gpus_per_node: 1}}
checkpointing: {{enabled: false, checkpoint_dir: {logs}/checkpoints, save_period: 1000}}
"""
CRITIC = """
value:
  model_name: {workload}/model
  train_global_batch_size: {samples}
  max_total_sequence_length: 1024
  train_mb_tokens: {tokens}
  precision: {precision}
  optimizer: {{name: torch.optim.AdamW, kwargs: {{lr: 1.0e-5}}}}
"""


def last_json(command: list[str]) -> dict[str, float]:
    done = subprocess.run(command, capture_output=True, text=True, cwd=YARDSTICKS)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def sft_config(
    workload: Path,
    workers: int,
    precision: str,
    *,
    rows: int = ROWS,
    tokens: int | str = "auto",
    steps: int = STEPS + WARM_UP,
    compiled: bool = True,
) -> str:
    """A run of `steps` steps of `rows` rows, as YAML with a place for `logs`."""
    return SFT_CONFIG.format(
        workload=workload,
        workers=workers,
        precision=precision,
        rows=rows,
        tokens=tokens,
        steps=steps,
        compiled=str(compiled).lower(),
        logs="{logs}",
    )


def rl_config(
    workload: Path,
    algorithm: str,
    precision: str,
    *,
    samples: int = SAMPLES,
    new_tokens: int = NEW_TOKENS,
    tokens: int = RL_TOKENS,
    steps: int = RL_STEPS + RL_WARM_UP,
    backend: str = "hf",
) -> str:
    """A run of `steps` steps of `samples` samples, as YAML with a place for `logs`."""
    generations = 8 if algorithm == "grpo" else 1
    shared = {"workload": workload, "samples": samples, "precision": precision, "tokens": tokens}
    return RL_CONFIG.format(
        **shared,
        here=Path(__file__).parent,
        logs="{logs}",
        critic=CRITIC.format(**shared) if algorithm == "ppo" else "",
        algorithm=algorithm,
        prompts=samples // generations,
        generations=generations,
        new_tokens=new_tokens,
        steps=steps,
        backend=backend,
        # One update of samples that were just drawn: their probabilities need no pass of their own. The bare loop
        # makes that pass, so PPO does here too.
        on_policy="true" if algorithm == "grpo" else "false",
    )


def onehop_metrics(
    command: str, config: str, folder: Path, python: str | Path = sys.executable
) -> list[dict[str, float]]:
    """The metrics of a whole run of `onehop COMMAND`, by step."""
    logs, path = folder / f"{command}_logs", folder / f"{command}.yaml"
    path.write_text(config.replace("{logs}", str(logs)))
    words = [str(python), "-m", "nemo_rl.cli.main", command, "--config", str(path)]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"onehop {command} failed:\n{done.stderr[-2000:]}")
    return [json.loads(line) for line in (logs / "metrics.jsonl").read_text().splitlines()]


def onehop_sft(workload: Path, workers: int, precision: str) -> dict[str, float]:
    """`onehop sft` over the steps after the warm-up.

    `tokens/s`: tokens of the rows over whole step times; `engine busy`: part of the time in which the engine trained;
    `load and commit`: part of the time in which the controller waited for rows, or for the loader to commit them.
    """
    with tempfile.TemporaryDirectory() as folder:
        lines = onehop_metrics("sft", sft_config(workload, workers, precision), Path(folder))
    timed = [line for line in lines if line["step"] > WARM_UP]
    seconds = sum(line["total_step_time"] for line in timed)
    return {
        "tokens/s": sum(line["tokens"] for line in timed) / seconds,
        "engine busy": statistics.median(line["engine_busy"] for line in timed),
        "load and commit": 1 - sum(line["policy_time"] for line in timed) / seconds,
    }


def onehop_rl(workload: Path, algorithm: str, precision: str, backend: str = "hf") -> dict[str, float]:
    """`samples/s` of `onehop ppo` over the steps after the warm-up."""
    python = VLLM_PYTHON if backend == "vllm" else sys.executable
    with tempfile.TemporaryDirectory() as folder:
        config = rl_config(workload, algorithm, precision, backend=backend)
        lines = onehop_metrics("ppo", config, Path(folder), python)
    timed = [line["total_step_time"] for line in lines if line["step"] > RL_WARM_UP]
    return {"samples/s": SAMPLES / statistics.fmean(timed)}

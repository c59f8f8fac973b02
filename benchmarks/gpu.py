"""SFT and PPO of a 0.4 B model on one GPU; `benchmarks/gpu.sh` runs it.

Prints one table: tokens/s, the share of the GPU's bfloat16 rate that SFT's forward and backward use (MFU, at 6 FLOP per
parameter and token), and the peak of the GPU's memory.
"""

import json
import subprocess
import sys
import tempfile
import threading
from contextlib import contextmanager
from pathlib import Path

from programs import YARDSTICKS, last_json, onehop_metrics, rl_config, sft_config

# Qwen3-0.6B without its vocabulary.
SIZES = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
# Dense bfloat16, TFLOP/s, from the makers' data sheets.
PEAK = {"H200": 989, "H100": 989, "A100": 312, "L40S": 362, "L4": 121, "RTX 4090": 165, "B200": 2250}


def make_model(workload: Path) -> int:
    """Puts a model of `SIZES` in the place of the workload's; its number of parameters."""
    from transformers import AutoConfig, Qwen3ForCausalLM

    config = AutoConfig.from_pretrained(workload / "model")
    for name, value in SIZES.items():
        setattr(config, name, value)
    config.layer_types = ["full_attention"] * config.num_hidden_layers
    model = Qwen3ForCausalLM(config)
    model.save_pretrained(workload / "model")
    return model.num_parameters()


@contextmanager
def peak_memory():
    """A list whose only entry is the most memory that the GPU has had in use, in GiB."""
    peak, over = [0.0], threading.Event()

    def watch() -> None:
        command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
        while not over.wait(0.5):
            used = subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.split()
            peak[0] = max(peak[0], float(used[0]) / 1024) if used else peak[0]

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        over.set()
        thread.join()


def main() -> None:
    import torch

    device = torch.cuda.get_device_name(0)
    tflops = next((rate for name, rate in PEAK.items() if name in device), None)
    with tempfile.TemporaryDirectory() as folder:
        workload = Path(folder) / "workload"
        last_json([sys.executable, str(YARDSTICKS / "workload.py"), str(workload)])
        parameters = make_model(workload)
        with peak_memory() as sft_memory:
            config = sft_config(workload, 1, "bfloat16", rows=256, tokens=16384, steps=14, compiled=False)
            lines = onehop_metrics("sft", config, Path(folder))
        timed = [line for line in lines if line["step"] > 4]
        speed = sum(line["tokens"] for line in timed) / sum(line["total_step_time"] for line in timed)
        with peak_memory() as ppo_memory:
            config = rl_config(workload, "ppo", "bfloat16", samples=256, new_tokens=64, tokens=16384, steps=6)
            lines = onehop_metrics("ppo", config, Path(folder))
        timed = [line for line in lines if line["step"] > 2]
        seconds = sum(line["total_step_time"] for line in timed)
    mfu = f", MFU {6 * parameters * speed / tflops / 1e12:.1%}" if tflops else ""
    print(f"{device}, torch {torch.__version__}, {parameters / 1e6:,.0f} M parameters, bfloat16")
    print(f"SFT: {speed:,.0f} tokens/s{mfu}, peak {sft_memory[0]:.1f} GiB")
    phases = {key: sum(line[key] for line in timed) / len(timed) for key in timed[0] if key.startswith("timing/")}
    print(
        f"PPO: {256 * len(timed) / seconds:,.1f} samples/s of up to 64 new tokens, "
        f"{sum(line['tokens_per_second'] * line['total_step_time'] for line in timed) / seconds:,.0f} tokens/s, "
        f"peak {ppo_memory[0]:.1f} GiB"
    )
    print(json.dumps({key.removeprefix("timing/"): round(value, 3) for key, value in phases.items()}))


if __name__ == "__main__":
    main()

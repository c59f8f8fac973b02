#!/usr/bin/env bash
# SFT and PPO of a 0.4 B model with random weights, in bfloat16 on one GPU: tokens/s, MFU, peak memory. Under 5 minutes.
#
#     bash benchmarks/gpu.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
command -v nvidia-smi > /dev/null || { echo "benchmarks/gpu.sh needs an NVIDIA GPU, and there is no nvidia-smi here" >&2; exit 1; }
make --no-print-directory setup
.venv/bin/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || {
  echo "torch in .venv does not see the GPU: install a build with CUDA, .venv/bin/pip install torch" >&2
  exit 1
}
exec .venv/bin/python benchmarks/gpu.py

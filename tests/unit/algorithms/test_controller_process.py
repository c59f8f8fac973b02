"""The controller handles metadata only: its process does not even load a tensor library."""

import subprocess
import sys

HEAVY = ["torch", "transformers", "tensordict", "megatron.energon", "tensorboard"]


def test_the_controllers_module_imports_no_tensor_library() -> None:
    code = f"import sys, nemo_rl.algorithms.sft_v2; print([m for m in {HEAVY} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr

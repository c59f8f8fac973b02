"""Where the fused attention kernel overtakes the plain formula on this CPU: forward and backward.

    python benchmarks/attention.py [bf16|fp32]

Without a word: in the precision that `auto` is on this machine.
"""

import sys
import time

import torch

from nemo_rl.models.engine import attention
from nemo_rl.models.engine.attention import DocumentGroup, Documents, per_document_attention
from nemo_rl.models.engine.precision import compute_dtype

HEADS, KV_HEADS, WIDTH, REPEATS = 6, 2, 64, 10


def milliseconds(count: int, length: int, explicit_up_to: int, dtype: torch.dtype) -> float:
    attention._EXPLICIT_UP_TO = {dtype: explicit_up_to}
    shapes = [(1, heads, count * length, WIDTH) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    q, k, v = (torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes)
    documents = Documents((DocumentGroup(0, count * length, count),))
    started = 0.0
    for turn in range(REPEATS + 2):
        if turn == 2:
            started = time.perf_counter()
        out, _ = per_document_attention(torch.nn.Identity(), q, k, v, None, documents=documents)
        out.backward(torch.ones_like(out))
    return (time.perf_counter() - started) / REPEATS * 1e3


def main() -> None:
    dtype = compute_dtype(sys.argv[1] if len(sys.argv) > 1 else "auto", torch.device("cpu"))
    print(f"{torch.get_num_threads()} threads, {dtype}; milliseconds for some documents of equal length")
    print("documents  tokens  formula   fused")
    for count, length in ((1, 64), (8, 64), (4, 128), (2, 256), (1, 256), (1, 512), (1, 768), (1, 1024)):
        formula, fused = (milliseconds(count, length, limit, dtype) for limit in (10**9, 0))
        print(f"{count:9}  {length:6}  {formula:7.2f} {fused:7.2f}")


if __name__ == "__main__":
    main()

"""Where the fused attention kernel overtakes the plain formula on this CPU: forward and backward, bf16.

python benchmarks/attention.py
"""

import time

import torch

from nemo_rl.models.engine import attention
from nemo_rl.models.engine.attention import DocumentGroup, per_document_attention

HEADS, KV_HEADS, WIDTH, REPEATS = 6, 2, 64, 10


def milliseconds(count: int, length: int, explicit_up_to: int) -> float:
    attention._EXPLICIT_UP_TO = explicit_up_to
    shapes = [(1, heads, count * length, WIDTH) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    q, k, v = (torch.randn(shape, dtype=torch.bfloat16, requires_grad=True) for shape in shapes)
    documents = (DocumentGroup(0, count * length, count),)
    started = 0.0
    for turn in range(REPEATS + 2):
        if turn == 2:
            started = time.perf_counter()
        out, _ = per_document_attention(torch.nn.Identity(), q, k, v, None, documents=documents)
        out.backward(torch.ones_like(out))
    return (time.perf_counter() - started) / REPEATS * 1e3


def main() -> None:
    print(f"{torch.get_num_threads()} threads; milliseconds for some documents of equal length")
    print("documents  tokens  formula   fused")
    for count, length in ((1, 64), (8, 64), (4, 128), (2, 256), (1, 256), (1, 512), (1, 768), (1, 1024)):
        formula, fused = milliseconds(count, length, 10**9), milliseconds(count, length, 0)
        print(f"{count:9}  {length:6}  {formula:7.2f} {fused:7.2f}")


if __name__ == "__main__":
    main()

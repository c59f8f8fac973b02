"""What a worker process does before its class is imported. Not covered: C libraries other than glibc."""

import subprocess
import sys

_PROGRAM = """
import resource, sys
if sys.argv[1] == "kept":
    from nemo_rl.distributed.worker_host import keep_freed_memory
    keep_freed_memory()
import ctypes
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
def use(size):
    block = libc.malloc(size)
    ctypes.memset(block, 1, size)
    libc.free(block)
use(64 << 20)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    use(64 << 20)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(how: str) -> int:
    """Page faults of using 64 MiB five times."""
    done = subprocess.run([sys.executable, "-c", _PROGRAM, how], capture_output=True, text=True, check=True, timeout=60)
    return int(done.stdout)


def test_freed_memory_is_used_again_without_page_faults() -> None:
    assert page_faults("kept") < 100 < 10_000 < page_faults("given back")

"""Freed memory is used again inside, and given back at the end."""

import subprocess
import sys

import pytest

MEASURE = """
import ctypes, resource
from tandem.runtime.heap import freed_memory_kept
c = ctypes.CDLL("libc.so.6")
c.malloc.restype, c.malloc.argtypes, c.free.argtypes = ctypes.c_void_p, (ctypes.c_size_t,), (ctypes.c_void_p,)
c.memset.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t)
SIZE = 48 << 20  # beyond what glibc ever keeps by itself

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        memory = c.malloc(SIZE)
        c.memset(memory, 1, SIZE)
        c.free(memory)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

outside = faults()
with freed_memory_kept():
    faults()
    inside, held = faults(), resident()
print(outside, inside, held - resident())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs glibc on Linux, which gives memory back as it is told")
def test_large_blocks_are_touched_once_inside_and_given_back_at_the_end() -> None:
    done = subprocess.run([sys.executable, "-c", MEASURE], check=True, capture_output=True, text=True)
    outside, inside, returned = map(int, done.stdout.split())
    assert inside < 0.1 * outside and returned > 0.9 * (48 << 20)

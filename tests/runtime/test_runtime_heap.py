"""Freed memory is reused within a process, and returned to the system at the end."""

import os
import subprocess
import sys

import pytest

from tandem.runtime.machine.heap import kept_heap_environment

MEASURE = """
import ctypes, resource, sys
from tandem.runtime.machine.heap import freed_memory_kept
c = ctypes.CDLL("libc.so.6")
c.malloc.restype, c.malloc.argtypes, c.free.argtypes = ctypes.c_void_p, (ctypes.c_size_t,), (ctypes.c_void_p,)
c.memset.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t)
SIZE = 80 << 20  # beyond what glibc ever keeps by itself

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(3):
        memory = c.malloc(SIZE)
        c.memset(memory, 1, SIZE)
        c.free(memory)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

outside = faults()
with freed_memory_kept(gives_back=sys.argv[1] == "at-once"):
    faults()
    inside, held = faults(), resident()
after = resident()
c.free(c.malloc(1 << 20))
print(outside, inside, held - after, held - resident())
"""


TENSORS = """
import torch
from tandem.runtime.machine.heap import freed_memory_kept

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

SIZE, kept = 12 << 20, []
with freed_memory_kept():
    before = resident()
    for turn in range(12):
        first, second = torch.ones(SIZE // 4), torch.ones(SIZE // 4 + 1000 * turn)
        del first
        kept.append(torch.ones(64))
        third = torch.ones(SIZE // 4)
        del second, third
    print(resident() - before)
"""


SMALL_STEPS = """
import ctypes, resource, sys
from tandem.runtime.machine.heap import small_steps_keep_memory
c = ctypes.CDLL("libc.so.6")
c.malloc.restype, c.malloc.argtypes, c.free.argtypes = ctypes.c_void_p, (ctypes.c_size_t,), (ctypes.c_void_p,)
c.memset.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t)
SIZE = 5 << 20

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

def step(count):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [c.malloc(SIZE) for _ in range(count)]
    for block in blocks:
        c.memset(block, 1, SIZE)
    for block in reversed(blocks):
        c.free(block)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

if sys.argv[1] == "kept":
    small_steps_keep_memory()
before = resident()
step(8), step(8)
print(step(8), step(40), resident() - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs glibc on Linux, which gives memory back as it is told")
def test_steps_reuse_up_to_64_mib_that_they_have_freed_and_give_more_back() -> None:
    def run(how: str) -> list[int]:
        done = subprocess.run([sys.executable, "-c", SMALL_STEPS, how], check=True, capture_output=True, text=True)
        return [int(value) for value in done.stdout.split()]

    pages = 8 * (5 << 20) // 4096
    assert run("as it is")[0] > 0.5 * pages
    again, _, left = run("kept")
    assert again < 0.05 * pages and left < (64 + 10) << 20


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs glibc on Linux, which gives memory back as it is told")
def test_memory_of_freed_tensors_is_used_again_by_tensors_of_their_size() -> None:
    environment = {**os.environ, **kept_heap_environment(os.environ)}
    done = subprocess.run([sys.executable, "-c", TENSORS], check=True, capture_output=True, text=True, env=environment)
    # Two or three are alive at a time; without the environment's settings the heap holds 7 to 15.
    assert int(done.stdout) < 5 * (12 << 20)


def test_what_the_environment_asks_of_glibc_already_stays() -> None:
    given = {"GLIBC_TUNABLES": "glibc.malloc.arena_max=3:glibc.malloc.perturb=1"}
    assert kept_heap_environment(given)["GLIBC_TUNABLES"] == "glibc.malloc.arena_max=3:glibc.malloc.perturb=1:glibc.malloc.tcache_count=0"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs glibc on Linux, which gives memory back as it is told")
@pytest.mark.parametrize("when", ["at-once", "with-the-next-block"])
def test_large_blocks_are_touched_once_inside_and_given_back_at_the_end(when: str) -> None:
    done = subprocess.run([sys.executable, "-c", MEASURE, when], check=True, capture_output=True, text=True)
    outside, inside, at_once, returned = map(int, done.stdout.split())
    assert inside < 0.1 * outside and returned > 0.9 * (80 << 20)
    assert (at_once > 0.9 * (80 << 20)) == (when == "at-once")

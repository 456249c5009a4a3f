"""A kernel that cannot allocate memory raises, and the process continues."""

import os
import subprocess
import sys
import textwrap

import pytest

PROGRAM = """
    import resource, sys
    import torch
    from tandem.kernels import QuantizedWeight, select
    from tandem.types import RunError

    threads, what, headroom_mib = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    torch.set_num_threads(threads)
    kernels = select("cpu")

    def leave(mib):
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (mib << 20), resource.RLIM_INFINITY))

    small, few = [torch.randn(64, 2, 16) for _ in range(3)], torch.tensor([0, 64], dtype=torch.int32)
    x, weight = torch.randn(300, 2048), torch.randn(9000, 2048)
    packed = kernels.pack(weight[:640])
    expected = kernels.packed_attention(*small, few, 64, 0.25, None), kernels.linear_packed(x, packed, None)  # starts the threads
    if what == "packed_attention":  # 12 MiB of output, as much of transposed keys
        heads, bounds = [torch.randn(6000, 8, 64) for _ in range(3)], torch.tensor([0, 6000], dtype=torch.int32)
        call = lambda: kernels.packed_attention(*heads, bounds, 6000, 0.1, 64)
    elif what == "packed_attention_backward":  # 6 MiB of gradients, 4 MiB in each task's thread
        heads, bounds = [torch.randn(1024, 1, 512, requires_grad=True) for _ in range(3)], torch.tensor([0, 512, 1024], dtype=torch.int32)
        out, grad = kernels.packed_attention(*heads, bounds, 512, 0.1, None), torch.randn(1024, 1, 512)
        torch.autograd.grad(weight[0].requires_grad_() * 2, weight[0].requires_grad_(), weight[0], allow_unused=True)  # its imports
        call = lambda: torch.autograd.grad(out, heads, grad, retain_graph=True)
    elif what == "int8":  # 1 MiB of output, 12 MiB of rounded inputs
        codes = torch.ones(64, 4096, dtype=torch.int8)
        coded, wide = kernels.pack_quantized(QuantizedWeight("int8", codes, torch.ones(64, 1), None, 4096, None, "int8")), torch.randn(3000, 4096)
        call = lambda: kernels.linear_packed(wide, coded, None)
    elif what == "int4":  # 64 KiB of decoded weight in each thread, once all that is free in the heap is taken
        codes, scales = torch.ones(128, 2048, dtype=torch.uint8), torch.ones(128, 64)
        coded, few_rows = kernels.pack_quantized(QuantizedWeight("int4", codes, scales, scales, 32)), x[:8].clone()
        call = lambda: kernels.linear_packed(few_rows, coded, None)
    else:  # 10 MiB of output, 24 MiB and more of packed weight
        call = lambda: kernels.linear(x, weight, None)
    taken = [None] * 100_000
    leave(headroom_mib)
    try:
        for i in range(len(taken) if what == "int4" else 0):
            taken[i] = bytearray(1 << 16)
    except MemoryError:
        pass
    try:
        call()
        print("did not raise")
    except RunError as error:
        print(error)
    leave(64)
    del taken
    assert torch.equal(kernels.packed_attention(*small, few, 64, 0.25, None), expected[0])
    assert torch.equal(kernels.linear_packed(x, packed, None), expected[1])
    leave(512)
    call()
    print("goes on")
"""


@pytest.mark.parametrize("threads", [pytest.param(1, marks=pytest.mark.full), 2])
@pytest.mark.parametrize(
    ("what", "headroom_mib"),
    [
        ("packed_attention_backward", 8),
        ("int4", 0),
        *(pytest.param(*case, marks=pytest.mark.full) for case in (("packed_attention", 18), ("linear", 20), ("int8", 6))),
    ],
)
def test_a_kernel_without_memory_raises_and_leaves_a_working_process(what: str, headroom_mib: int, threads: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM), str(threads), what, str(headroom_mib)], capture_output=True, text=True,
        # Every large block is allocated from the system and all threads share one heap, so that freed memory is returned immediately.
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_ARENA_MAX": "1"}, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    raised, *_, last = done.stdout.splitlines()
    assert raised.startswith("a kernel could not allocate its working memory"), raised
    assert last == "goes on"

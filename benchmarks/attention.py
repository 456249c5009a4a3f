"""Attention beside torch's ``scaled_dot_product_attention``, decoding, prefilling and training, over each kind of KV cache.

Both take turns on one thread, so that both meet the same neighbours, and the least CPU time counts. The peer gets what suits it
best: dense [B, H, T, D] keys and values that already lie in order, with grouped heads (``enable_gqa``); ours reads blocks of 16
tokens in shuffled order through a block table. "prompt shared" decodes groups of 16 sequences that read the same prompt blocks.
"MB" is the keys and values that one call reads.

    python benchmarks/attention.py [--seconds 0.5] [--out benchmarks/results]
"""

import os
import time
from collections.abc import Callable
from typing import NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.nn.functional as F
from machine import machine, write_report
from options import parser
from torch import Tensor

from tandem.kernels import BLOCK_TOKENS, KVLayer, PagedBatch, empty_cache, select, stored_dtype
from tandem.types.kv_cache import KV_CACHE_DTYPES


class Case(NamedTuple):
    """``sequences`` that each compute their last ``queries`` of ``context`` tokens; the first ``shared`` tokens of 16 neighbours
    are the same blocks."""

    name: str
    sequences: int
    context: int
    queries: int
    heads: tuple[int, int, int]
    shared: int = 0


CASES = [
    Case("decode, 256 short", 256, 100, 1, (4, 2, 32)),
    Case("decode, 64", 64, 512, 1, (8, 2, 64)),
    Case("decode, 64, prompt shared", 64, 512, 1, (8, 2, 64), 384),
    Case("decode, 1 at 4k", 1, 4096, 1, (14, 2, 64)),
    Case("decode, 1 at 32k", 1, 32768, 1, (14, 2, 64)),
    Case("prefill, 8 x 256", 8, 256, 256, (8, 2, 64)),
    Case("prefill, 1 x 2048", 1, 2048, 2048, (8, 2, 64)),
    Case("prefill, last 256 of 4k", 1, 4096, 256, (8, 2, 64)),
]


def least_cpu(calls: list[Callable[[], object]], seconds: float) -> list[float]:
    """Each call in turn, again and again for ``seconds`` of each; its least CPU seconds."""
    best = [float("inf")] * len(calls)
    for call in calls:
        call()
    end, rounds = time.perf_counter() + seconds * len(calls), 0
    while rounds < 5 or time.perf_counter() < end:
        for i, call in enumerate(calls):
            repeat = max(1, min(100, int(1e-3 / best[i]))) if rounds else 1
            start = time.process_time()
            for _ in range(repeat):
                call()
            best[i] = min(best[i], (time.process_time() - start) / repeat)
        rounds += 1
    return best


def filled(case: Case, blocks: int, name: str) -> KVLayer:
    _, kv_heads, size = case.heads
    dtype = stored_dtype(name, torch.float32)
    layer = empty_cache((blocks, kv_heads, size), 1, dtype, torch.device("cpu"))[0]
    for tensor in layer.tensors():
        tensor.copy_(torch.randint(-100, 100, tensor.shape) if dtype == torch.int8 and tensor.dtype == dtype else torch.rand(tensor.shape))
    return layer


def paged_call(case: Case, name: str) -> tuple[Callable[[], object], int]:
    """Our call, and the bytes of keys and values that it reads."""
    heads, _, size = case.heads
    each = -(-case.context // BLOCK_TOKENS)
    blocks = each * case.sequences
    layer = filled(case, blocks, name)
    tables = torch.randperm(blocks).int().view(case.sequences, each)
    for s in range(case.sequences):
        tables[s, : case.shared // BLOCK_TOKENS] = tables[s - s % 16, : case.shared // BLOCK_TOKENS]
    counts = torch.arange(case.sequences + 1) * case.queries
    batch = PagedBatch(counts.int(), torch.full((case.sequences,), case.context, dtype=torch.int32), tables, torch.empty(0, dtype=torch.int64))
    q = torch.randn(case.sequences * case.queries, heads, size)
    kernels = select("cpu")
    read = sum(t.numel() * t.element_size() for t in layer.tensors())
    return lambda: kernels.paged_attention(q, layer, batch, size**-0.5, None), read


def torch_call(case: Case) -> Callable[[], object]:
    heads, kv_heads, size = case.heads
    q = torch.randn(case.sequences, heads, case.queries, size)
    k, v = (torch.randn(case.sequences, kv_heads, case.context, size) for _ in range(2))
    mask = None
    if 1 < case.queries < case.context:
        mask = torch.ones(case.queries, case.context, dtype=torch.bool).tril(case.context - case.queries)
    causal = case.queries == case.context
    return lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=True)


def forward_table(seconds: float) -> list[str]:
    names = [name if name != "auto" else "float32" for name in KV_CACHE_DTYPES]
    lines = [
        f"| case (Hq, Hkv, D) | MB fp32 | torch us | {' | '.join(f'{name} us' for name in names)} | torch / float32 | float32 / int8 |",
        "| --- " * (len(names) + 5) + "|",
    ]
    for case in CASES:
        ours = [paged_call(case, name) for name in KV_CACHE_DTYPES]
        peer, *times = least_cpu([torch_call(case), *(call for call, _ in ours)], seconds)
        figures = " | ".join(f"{t * 1e6:.0f}" for t in times)
        lines.append(
            f"| {case.name} {case.heads} | {ours[0][1] / 1e6:.1f} | {peer * 1e6:.0f} | {figures} | {peer / times[0]:.2f} "
            f"| {times[0] / times[names.index('int8')]:.2f} |"
        )
        print(lines[-1], flush=True)
    return lines


def training_table(seconds: float) -> list[str]:
    kernels = select("cpu")
    lines = ["| case (Hq, Hkv, D) | torch us | ours us | torch / ours |", "| --- | --- | --- | --- |"]
    for sequences, length, (heads, kv_heads, size) in [(32, 128, (4, 2, 32)), (8, 512, (8, 2, 64)), (1, 2048, (8, 2, 64))]:
        tokens = sequences * length
        packed = [torch.randn(tokens, count, size, requires_grad=True) for count in (heads, kv_heads, kv_heads)]
        dense = [torch.randn(sequences, count, length, size, requires_grad=True) for count in (heads, kv_heads, kv_heads)]
        bounds = (torch.arange(sequences + 1) * length).int()
        grad, dense_grad = torch.randn(tokens, heads, size), torch.randn(sequences, heads, length, size)

        def ours(packed: list[Tensor] = packed, bounds: Tensor = bounds, length: int = length, grad: Tensor = grad) -> object:
            scale = packed[0].shape[-1] ** -0.5
            return torch.autograd.grad(kernels.packed_attention(*packed, bounds, length, scale, None), packed, grad)

        def peer(dense: list[Tensor] = dense, grad: Tensor = dense_grad) -> object:
            return torch.autograd.grad(F.scaled_dot_product_attention(*dense, is_causal=True, enable_gqa=True), dense, grad)

        theirs, own = least_cpu([peer, ours], seconds)
        name = f"{sequences} x {length} ({heads}, {kv_heads}, {size})"
        lines.append(f"| {name} | {theirs * 1e6:.0f} | {own * 1e6:.0f} | {theirs / own:.2f} |")
        print(lines[-1], flush=True)
    return lines


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--seconds", type=float, default=0.5, help="time for each call")
    options = made.parse_args()
    torch.set_num_threads(1)
    text = ["# Attention", "", machine(), "", *__doc__.split("\n\n")[1:2], "", "## Forward, over the paged cache", ""]
    text += [*forward_table(options.seconds), "", "## Forward and gradients, packed sequences", "", *training_table(options.seconds)]
    print(f"wrote {write_report('attention', chr(10).join(text), options.out)}")


if __name__ == "__main__":
    main()

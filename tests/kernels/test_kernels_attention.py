"""Attention: right against float64, and the same bits packed and paged, in any chunks, blocks and company."""

import math

import pytest
import torch
from torch import Tensor

from tandem.kernels import BLOCK_TOKENS, Kernels, KVLayer, PagedBatch

LENGTHS = [1, 5, 40, 130, 64, 17]
CASES = [  # (head size, query heads, key-value heads, window)
    (32, 4, 2, None),
    (24, 3, 1, None),
    (64, 8, 2, 20),
    (80, 2, 2, 7),
    (128, 7, 1, None),
    (6, 2, 1, 16),
]


def bounds_of(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)


def exact(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, scale: float, window: int | None) -> Tensor:
    """Causal attention by its definition in float64."""
    parts = []
    for start, end in zip(bounds.tolist(), bounds.tolist()[1:], strict=False):
        group = q.shape[1] // k.shape[1]
        keys, values = (x[start:end].double().repeat_interleave(group, dim=1) for x in (k, v))
        scores = torch.einsum("ihd,jhd->hij", q[start:end].double(), keys) * scale
        distance = torch.arange(end - start).unsqueeze(1) - torch.arange(end - start)
        hidden = (distance < 0) | (distance >= (window or math.inf))
        parts.append(torch.einsum("hij,jhd->ihd", scores.masked_fill(hidden, -math.inf).softmax(-1), values))
    return torch.cat(parts)


def make(lengths: list[int], size: int, heads: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    tokens = sum(lengths)
    return torch.randn(tokens, heads, size), torch.randn(tokens, kv_heads, size), torch.randn(tokens, kv_heads, size)


class Paged:
    """Sequences in a cache of shuffled blocks whose unused slots are NaN, fed in chunks."""

    def __init__(self, kernels: Kernels, lengths: list[int], size: int, kv_heads: int) -> None:
        self.kernels, self.lengths, self.bounds = kernels, lengths, bounds_of(lengths).tolist()
        needed = [-(-length // BLOCK_TOKENS) for length in lengths]
        blocks = sum(needed) + 3
        shuffled = torch.randperm(blocks).int()
        self.cache = KVLayer(
            torch.full((blocks, kv_heads, size, BLOCK_TOKENS), math.nan),
            torch.full((blocks, kv_heads, BLOCK_TOKENS, size), math.nan),
        )
        self.tables = torch.zeros(len(lengths), max(needed) + 1, dtype=torch.int32)
        for s, count in enumerate(needed):
            self.tables[s, :count] = shuffled[sum(needed[:s]) : sum(needed[: s + 1])]
        self.done = [0] * len(lengths)
        self.table = torch.cat([torch.ones(max(lengths), size // 2), torch.zeros(max(lengths), size // 2)], 1)

    def step(self, chunks: dict[int, int], qkv: tuple[Tensor, Tensor, Tensor], scale: float, window: int | None, out: Tensor) -> None:
        rows, positions, starts, lengths, slots = [], [], [0], [], []
        for s, count in chunks.items():
            for p in range(self.done[s], self.done[s] + count):
                rows.append(self.bounds[s] + p)
                positions.append(p)
                slots.append(int(self.tables[s, p // BLOCK_TOKENS]) * BLOCK_TOKENS + p % BLOCK_TOKENS)
            self.done[s] += count
            starts.append(len(rows))
            lengths.append(self.done[s])
        (_, heads, size), kv_heads = qkv[0].shape, qkv[1].shape[1]
        fused = torch.cat([x[rows].flatten(1) for x in qkv], 1)
        at, slot = torch.tensor(positions), torch.tensor(slots)
        q = self.kernels.rope_to_cache(
            fused, at, self.table, (heads, kv_heads, size), None, None, 1e-6, self.cache, slot
        )
        batch = PagedBatch(
            torch.tensor(starts, dtype=torch.int32), torch.tensor(lengths, dtype=torch.int32),
            self.tables[list(chunks)].contiguous(), slot,
        )  # fmt: skip
        out[rows] = self.kernels.paged_attention(q, self.cache, batch, scale, window)

    def left(self, s: int) -> int:
        return self.lengths[s] - self.done[s]


@pytest.mark.parametrize(("size", "heads", "kv_heads", "window"), CASES)
def test_packed_attention_is_attention(
    kernels: Kernels, size: int, heads: int, kv_heads: int, window: int | None
) -> None:
    q, k, v = make(LENGTHS, size, heads, kv_heads)
    out = kernels.packed_attention(q, k, v, bounds_of(LENGTHS), max(LENGTHS), size**-0.5, window)
    expected = exact(q, k, v, bounds_of(LENGTHS), size**-0.5, window)
    assert (out - expected).norm() / expected.norm() < 1e-6


@pytest.mark.parametrize("window", [None, 1, 600])
def test_attention_over_several_spans_is_attention(kernels: Kernels, window: int | None) -> None:
    q, k, v = make([1300], 32, 2, 1)
    out = kernels.packed_attention(q * 4, k, v, bounds_of([1300]), 1300, 32**-0.5, window)
    expected = exact(q * 4, k, v, bounds_of([1300]), 32**-0.5, window)
    assert (out - expected).norm() / expected.norm() < 3e-6


@pytest.mark.parametrize("sizes", [[1], [7, 1, 16, 3], [64], [33, 1]], ids=str)
@pytest.mark.parametrize(("size", "heads", "kv_heads", "window"), CASES)
def test_paged_attention_has_the_bits_of_packed_in_any_chunks_and_batch(
    kernels: Kernels, size: int, heads: int, kv_heads: int, window: int | None, sizes: list[int]
) -> None:
    qkv = make(LENGTHS, size, heads, kv_heads)
    expected = kernels.packed_attention(*qkv, bounds_of(LENGTHS), max(LENGTHS), size**-0.5, window)
    paged, out = Paged(kernels, LENGTHS, size, kv_heads), torch.full_like(qkv[0], math.nan)
    step = 0
    while any(paged.left(s) for s in range(len(LENGTHS))):
        # Sequences come and go, so that every step has another mix.
        chosen = [s for s in range(len(LENGTHS)) if paged.left(s) and (s + step) % 3 != 0]
        chunks = {s: min(sizes[(s + step) % len(sizes)], paged.left(s)) for s in chosen}
        if chunks:
            paged.step(chunks, qkv, size**-0.5, window, out)
        step += 1
    assert torch.equal(out, expected)


@pytest.mark.parametrize("window", [None, 530])
def test_decoding_far_into_a_long_sequence_keeps_the_bits(kernels: Kernels, window: int | None) -> None:
    length = 1100
    qkv = make([length], 16, 4, 2)
    expected = kernels.packed_attention(*qkv, bounds_of([length]), length, 0.25, window)
    paged, out = Paged(kernels, [length], 16, 2), torch.full_like(qkv[0], math.nan)
    for chunk in [500, 11, 1, 1, 1, 1, 509, 1, 1, 63, 1, 1, 9]:
        paged.step({0: chunk}, qkv, 0.25, window, out)
    assert torch.equal(out[: paged.done[0]], expected[: paged.done[0]])
    assert paged.left(0) == 0


def test_packed_attention_does_not_depend_on_neighbouring_sequences(kernels: Kernels) -> None:
    q, k, v = make(LENGTHS, 32, 4, 2)
    whole = kernels.packed_attention(q, k, v, bounds_of(LENGTHS), max(LENGTHS), 0.2, None)
    for start, end in zip(bounds_of(LENGTHS).tolist(), bounds_of(LENGTHS).tolist()[1:], strict=False):
        part = slice(start, end)
        alone = kernels.packed_attention(q[part], k[part], v[part], bounds_of([end - start]), end - start, 0.2, None)
        assert torch.equal(alone, whole[part])


def test_blocks_behind_the_window_are_never_read(kernels: Kernels) -> None:
    length, window = 100, 20
    qkv = make([length], 16, 2, 1)
    expected = kernels.packed_attention(*qkv, bounds_of([length]), length, 0.25, window)
    paged, out = Paged(kernels, [length], 16, 1), torch.full_like(qkv[0], math.nan)
    paged.step({0: length - 1}, qkv, 0.25, window, out)
    behind = paged.tables[0, : (length - window) // BLOCK_TOKENS].long()
    paged.cache.keys[behind] = math.nan
    paged.cache.values[behind] = math.nan
    paged.step({0: 1}, qkv, 0.25, window, out)
    assert torch.equal(out[-1], expected[-1])


def test_paged_attention_does_not_depend_on_the_thread_count(cpu_kernels: Kernels) -> None:
    lengths = [700, 300]
    qkv = make(lengths, 64, 4, 2)
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        torch.manual_seed(0)
        paged, out = Paged(cpu_kernels, lengths, 64, 2), torch.empty_like(qkv[0])
        paged.step({0: 700, 1: 300}, qkv, 0.1, None, out)
        results.append(out)
    assert torch.equal(*results)


def test_a_window_of_the_whole_sequence_is_no_window(kernels: Kernels) -> None:
    qkv = make(LENGTHS, 32, 2, 2)
    bounds = bounds_of(LENGTHS)
    full = kernels.packed_attention(*qkv, bounds, 130, 0.2, None)
    assert torch.equal(kernels.packed_attention(*qkv, bounds, 130, 0.2, 130), full)


def test_a_wrong_call_raises_and_reads_no_stray_memory(cpu_kernels: Kernels) -> None:
    q, k, v = make([20], 16, 2, 1)
    with pytest.raises(ValueError, match="cu_seqlens"):
        cpu_kernels.packed_attention(q, k, v, bounds_of([21]), 21, 0.25, None)
    paged = Paged(cpu_kernels, [20], 16, 1)
    paged.tables[0, 0] = 99
    with pytest.raises(IndexError, match="slot"):
        paged.step({0: 20}, (q, k, v), 0.25, None, torch.empty_like(q))
    batch = PagedBatch(bounds_of([20]), torch.tensor([20], dtype=torch.int32), paged.tables, torch.arange(20))
    with pytest.raises(IndexError, match="block"):
        cpu_kernels.paged_attention(q, paged.cache, batch, 0.25, None)
    with pytest.raises(TypeError, match="fp32"):
        cpu_kernels.packed_attention(q.double(), k, v, bounds_of([20]), 20, 0.25, None)
    with pytest.raises(IndexError, match="position"):
        cpu_kernels.rope(torch.randn(2, 64), torch.tensor([0, 7]), torch.randn(7, 16), (2, 1, 16), None, None, 1e-6)

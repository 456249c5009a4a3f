"""Attention: correct against float64, with the same bits packed and paged, in any chunks, blocks and batch."""

import math

import pytest
import torch
import torch.nn.functional as F
from paged_sequences import LENGTHS, Paged, bounds_of, exact, make
from torch import Tensor

from tandem.kernels import BLOCK_TOKENS, Kernels, PagedBatch

CASES = [  # (head size, query heads, key-value heads, window)
    (32, 4, 2, None),
    (24, 3, 1, None),
    (64, 8, 2, 20),
    (80, 2, 2, 7),
    (128, 7, 1, None),
    (6, 2, 1, 16),
]


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
        # Sequences join and leave, so that every step has another batch.
        chosen = [s for s in range(len(LENGTHS)) if paged.left(s) and (s + step) % 3 != 0]
        chunks = {s: min(sizes[(s + step) % len(sizes)], paged.left(s)) for s in chosen}
        if chunks:
            paged.step(chunks, qkv, size**-0.5, window, out)
        step += 1
    assert torch.equal(out, expected)


@pytest.mark.parametrize(("size", "heads", "kv_heads", "window", "cap"), [(24, 3, 1, None, 1.5), (64, 8, 2, 20, 50.0)])
def test_capped_scores_are_attention_with_the_bits_of_packed_in_any_chunks(
    kernels: Kernels, size: int, heads: int, kv_heads: int, window: int | None, cap: float
) -> None:
    q, k, v = make(LENGTHS, size, heads, kv_heads)
    qkv, bounds = (q * 9, k, v), bounds_of(LENGTHS)
    expected = kernels.packed_attention(*qkv, bounds, max(LENGTHS), 0.3, window, cap=cap)
    true = exact(*qkv, bounds, 0.3, window, cap)
    assert (expected - true).norm() / true.norm() < 2e-6
    assert not torch.allclose(expected, kernels.packed_attention(*qkv, bounds, max(LENGTHS), 0.3, window), atol=1e-2)
    paged, out = Paged(kernels, LENGTHS, size, kv_heads), torch.full_like(q, math.nan)
    for chunk in (1, 7, 33, 200):
        paged.step({s: min(chunk, paged.left(s)) for s in range(len(LENGTHS)) if paged.left(s)}, qkv, 0.3, window, out, cap)
    assert torch.equal(out, expected)
    last = torch.cat([torch.arange(end - min(2, n), end) for n, end in zip(LENGTHS, bounds[1:].tolist(), strict=True)])
    starts = bounds_of([min(2, n) for n in LENGTHS])
    assert torch.equal(kernels.packed_attention(qkv[0][last], k, v, bounds, max(LENGTHS), 0.3, window, starts, cap), expected[last])


def test_capped_scores_of_a_long_sequence_have_the_same_bits_on_one_thread_and_in_pieces_on_two(cpu_kernels: Kernels) -> None:
    length = 1600
    qkv = make([length], 64, 4, 1)
    expected = cpu_kernels.packed_attention(*qkv, bounds_of([length]), length, 0.5, None, cap=3.0)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        paged, out = Paged(cpu_kernels, [length], 64, 1), torch.empty_like(qkv[0])
        for chunk in (length - 3, 1, 2):
            paged.step({0: chunk}, qkv, 0.5, None, out, 3.0)
        assert torch.equal(out, expected)


@pytest.mark.parametrize(("size", "heads", "kv_heads", "window", "cap"), [(24, 3, 1, None, None), (64, 8, 2, 20, None), (16, 4, 4, 9, 2.0)])
def test_attention_with_sinks_is_attention_with_the_bits_of_packed_in_any_chunks(
    kernels: Kernels, size: int, heads: int, kv_heads: int, window: int | None, cap: float | None
) -> None:
    q, k, v = make(LENGTHS, size, heads, kv_heads)
    # One that changes nothing, and one beside which nothing else counts.
    sinks = torch.randn(heads) * 2
    sinks[0], sinks[1] = -200.0, 100.0
    qkv, bounds = (q * 3, k, v), bounds_of(LENGTHS)
    expected = kernels.packed_attention(*qkv, bounds, max(LENGTHS), 0.3, window, cap=cap, sinks=sinks)
    true = exact(*qkv, bounds, 0.3, window, cap, sinks)
    assert (expected - true).norm() / true.norm() < 2e-6
    without = kernels.packed_attention(*qkv, bounds, max(LENGTHS), 0.3, window, cap=cap)
    assert torch.allclose(expected[:, 0], without[:, 0], atol=1e-6) and expected[:, 1].abs().max() < 1e-5
    assert not torch.allclose(expected[:, 2], without[:, 2], atol=1e-2)
    paged, out = Paged(kernels, LENGTHS, size, kv_heads), torch.full_like(q, math.nan)
    for chunk in (1, 7, 33, 200):
        paged.step({s: min(chunk, paged.left(s)) for s in range(len(LENGTHS)) if paged.left(s)}, qkv, 0.3, window, out, cap, sinks)
    assert torch.equal(out, expected)
    last = torch.cat([torch.arange(end - min(2, n), end) for n, end in zip(LENGTHS, bounds[1:].tolist(), strict=True)])
    starts = bounds_of([min(2, n) for n in LENGTHS])
    assert torch.equal(kernels.packed_attention(qkv[0][last], k, v, bounds, max(LENGTHS), 0.3, window, starts, cap, sinks), expected[last])
    with pytest.raises((ValueError, RuntimeError)):
        kernels.packed_attention(*qkv, bounds, max(LENGTHS), 0.3, window, cap=cap, sinks=sinks[1:])


def test_sinks_of_a_long_sequence_have_the_same_bits_on_one_thread_and_in_pieces_on_two(cpu_kernels: Kernels) -> None:
    length, sinks = 1600, torch.randn(4)
    qkv = make([length], 64, 4, 1)
    expected = cpu_kernels.packed_attention(*qkv, bounds_of([length]), length, 0.5, None, sinks=sinks)
    true = exact(*qkv, bounds_of([length]), 0.5, None, None, sinks)
    assert (expected - true).norm() / true.norm() < 2e-6
    for threads in (1, 2):
        torch.set_num_threads(threads)
        paged, out = Paged(cpu_kernels, [length], 64, 1), torch.empty_like(qkv[0])
        for chunk in (length - 3, 1, 2):
            paged.step({0: chunk}, qkv, 0.5, None, out, None, sinks)
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


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("window", [None, 5, 600])
@pytest.mark.parametrize("which", ["key", "value", "query"])
def test_what_is_not_finite_reaches_no_row_that_does_not_see_it(kernels: Kernels, bad: float, window: int | None, which: str) -> None:
    length = 1100
    for at in (3, 40, 523, 1099):
        q, k, v = make([length], 16, 2, 1)
        clean = kernels.packed_attention(q, k, v, bounds_of([length]), length, 0.25, window)
        {"query": q, "key": k, "value": v}[which][at] = bad
        out = kernels.packed_attention(q, k, v, bounds_of([length]), length, 0.25, window)
        seen = torch.zeros(length, dtype=torch.bool)
        seen[at : at + 1 if which == "query" else length if window is None else min(length, at + window)] = True
        assert torch.equal(out[~seen], clean[~seen]), at
        if not (which == "key" and bad == math.inf):  # an infinite key may also weigh nothing
            assert not out[seen].isfinite().all(-1).any(), at


@pytest.mark.parametrize("window", [None, 700])
def test_decoding_a_long_sequence_has_the_same_bits_on_one_thread_and_in_pieces_on_two(cpu_kernels: Kernels, window: int | None) -> None:
    length = 2600
    qkv = make([length], 64, 4, 1)
    expected = cpu_kernels.packed_attention(*qkv, bounds_of([length]), length, 0.1, window)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        paged, out = Paged(cpu_kernels, [length], 64, 1), torch.empty_like(qkv[0])
        for chunk in (length - 3, 1, 2):
            paged.step({0: chunk}, qkv, 0.1, window, out)
        assert torch.equal(out, expected), threads


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


@pytest.mark.parametrize("window", [None, 20])
def test_last_queries_of_each_sequence_have_the_bits_of_all_and_their_gradients(kernels: Kernels, window: int | None) -> None:
    """Sequences of 40, 7, 600 and 5 tokens with 40, 3, 30 and 0 queries."""
    lengths, own = torch.tensor([40, 7, 600, 5]), torch.tensor([40, 3, 30, 0])
    bounds, starts = (F.pad(count.cumsum(0), (1, 0)).to(torch.int32) for count in (lengths, own))
    q, k, v = torch.randn(652, 4, 32), torch.randn(652, 2, 32), torch.randn(652, 2, 32)
    chosen = torch.cat([torch.arange(end - count, end) for end, count in zip(bounds[1:].tolist(), own.tolist(), strict=True)])
    grad = torch.randn(len(chosen), 4, 32)

    def run(last_only: bool) -> list[Tensor]:
        inputs = [x.clone().requires_grad_() for x in (q[chosen] if last_only else q, k, v)]
        if last_only:
            out = kernels.packed_attention(*inputs, bounds, 600, 0.2, window, starts)
        else:
            out = kernels.packed_attention(*inputs, bounds, 600, 0.2, window).index_select(0, chosen)
        out.backward(grad)
        return [out.detach(), *(x.grad for x in inputs if x.grad is not None)]

    out, grad_q, grad_k, grad_v = run(True)
    every, all_q, all_k, all_v = run(False)
    assert torch.equal(out, every)
    for found, wanted in ((grad_q, all_q[chosen]), (grad_k, all_k), (grad_v, all_v)):
        assert torch.allclose(found, wanted, rtol=1e-5, atol=1e-6)

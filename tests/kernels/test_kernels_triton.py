"""The Triton kernels in the interpreter: correct against float64, with the same bits for a row in any batch."""

import math
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from paged_sequences import Paged, bounds_of, exact, make
from torch import Tensor
from triton_interpreter import interpreted

from tandem.kernels import BLOCK_TOKENS, KVLayer, PagedBatch, empty_cache
from tandem.kernels.kv_dtype import decode, encode
from tandem.kernels.reference import ReferenceKernels
from tandem.kernels.triton.kernels import TritonKernels
from tandem.kernels.triton.linear import agreeing_tiles
from tandem.kernels.triton.tiles import INTERPRETED, LinearTile, linear_tile, tiles_for

TRUTH = ReferenceKernels(tiled=False)
KERNELS = interpreted()


@pytest.fixture(autouse=True)
def quiet_numpy() -> Iterator[None]:
    # Rows beyond the last one are computed from undefined values and never stored.
    with np.errstate(all="ignore"):
        yield


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


def rows_that_differ(op: Callable[[Tensor], Tensor], x: Tensor, counts: tuple[int, ...] = (1, 7, 33)) -> list[int]:
    """Returns the numbers of rows with which ``op`` gives a row other bits than with all of ``x``."""
    whole = op(x)
    starts = {count: count * 5 % (len(x) - count + 1) for count in counts}
    return [count for count, at in starts.items() if not torch.equal(op(x[at : at + count].clone()), whole[at : at + count])]


@pytest.mark.parametrize(("columns", "width"), [(70, 100), (33, 256), (1, 64)])
def test_linear_is_the_product_and_a_row_keeps_its_bits_in_any_batch(columns: int, width: int) -> None:
    x, weight, bias = torch.randn(40, width), torch.randn(columns, width), torch.randn(columns)
    assert error(KERNELS.linear(x, weight, bias), x.double() @ weight.double().t() + bias) < 1e-6
    assert rows_that_differ(lambda rows: KERNELS.linear(rows, weight, bias), x) == []
    assert torch.equal(KERNELS.linear_packed(x, KERNELS.pack(weight), bias), KERNELS.linear(x, weight, bias))


def test_grouped_linear_has_the_bits_of_each_groups_own_linear() -> None:
    x, weight = torch.randn(41, 72), torch.randn(5, 33, 72)
    bounds = torch.tensor([0, 0, 1, 18, 18, 41])
    parts = [KERNELS.linear(x[i:j], own, None) for own, i, j in zip(weight, bounds.tolist(), bounds.tolist()[1:], strict=False)]
    assert torch.equal(KERNELS.grouped_linear(x, weight, bounds), torch.cat(parts))
    assert torch.equal(KERNELS.grouped_linear_packed(x, KERNELS.pack_groups(weight), bounds), torch.cat(parts))


def test_experts_are_routed_as_the_reference_routes_them() -> None:
    logits = torch.randn(9, 6)
    logits[3, 2] = logits[3, 4] = logits[3].max()
    for ours, theirs in zip(KERNELS.route(logits, 2, True), TRUTH.route(logits, 2, True), strict=True):
        assert torch.equal(ours, theirs)


def test_a_tile_that_gives_other_bits_is_left_out() -> None:
    reversed_sums = LinearTile(32, 64, 8, 4, 1)
    given = (*INTERPRETED.linear, reversed_sums)
    assert agreeing_tiles(given, torch.device("cpu"), torch.float32) == INTERPRETED.linear


def test_tiles_grow_with_the_rows_only_while_every_multiprocessor_has_one() -> None:
    tiles = tiles_for(torch.bfloat16).linear
    assert linear_tile(tiles, 1, 4096, 132) == tiles[0]
    assert linear_tile(tiles, 64, 4096, 132) == tiles[0]
    assert linear_tile(tiles, 128, 11264, 132) == tiles[1]
    assert linear_tile(tiles, 8192, 8192, 132) == tiles[-1]
    # Only such tiles are multiplied by the instruction for four warps, in which k goes by 16.
    assert all(tile.rows % 64 == 0 and tile.warps % 4 == 0 for tile in tiles)


@pytest.mark.parametrize("width", [16, 99])
def test_rows_of_norms_gates_and_logprobs_are_right_and_keep_their_bits(width: int) -> None:
    x, weight, other = torch.randn(40, width) * 3, torch.rand(width), torch.randn(40, width)
    wide = x.double()
    target = torch.full((40,), 3)
    assert error(KERNELS.rms_norm(x, weight, 1e-6), TRUTH.rms_norm(wide, weight.double(), 1e-6)) < 1e-6
    normed, total = KERNELS.add_rms_norm(x, other, weight, 1e-6)
    assert torch.equal(total, x + other)
    assert torch.equal(normed, KERNELS.rms_norm(x + other, weight, 1e-6))
    of_groups = torch.rand(4, width)
    assert error(KERNELS.rms_norm(x, of_groups, 1e-6, True), TRUTH.rms_norm(wide, of_groups.double(), 1e-6, True)) < 1e-6
    assert torch.equal(KERNELS.add_rms_norm(x, other, weight, 1e-6, True)[0], KERNELS.rms_norm(x + other, weight, 1e-6, True))
    even = width // 2 * 2
    assert error(KERNELS.silu_mul(x[:, :even].contiguous()), TRUTH.silu_mul(wide[:, :even])) < 1e-6
    assert error(KERNELS.gelu_mul(x[:, :even].contiguous()), TRUTH.gelu_mul(wide[:, :even])) < 1e-6
    assert error(KERNELS.clamped_swiglu_mul(x[:, :even].contiguous() * 2), TRUTH.clamped_swiglu_mul(wide[:, :even] * 2)) < 1e-6
    assert error(KERNELS.soft_cap(x, 2.5), TRUTH.soft_cap(wide, 2.5)) < 1e-6
    assert (KERNELS.logits_logprobs(x, target) - wide.log_softmax(-1)[:, 3]).abs().max() < 1e-5
    for op in (
        lambda rows: KERNELS.rms_norm(rows, weight, 1e-6),
        lambda rows: KERNELS.rms_norm(rows, weight, 1e-6, True),
        lambda rows: KERNELS.silu_mul(rows[:, :even].contiguous()),
        lambda rows: KERNELS.gelu_mul(rows[:, :even].contiguous()),
        lambda rows: KERNELS.clamped_swiglu_mul(rows[:, :even].contiguous()),
        lambda rows: KERNELS.soft_cap(rows, 2.5),
        lambda rows: KERNELS.logits_logprobs(rows, target[: len(rows)]),
    ):
        assert rows_that_differ(op, x) == []


@pytest.mark.parametrize(("temperature", "cap"), [(1.0, None), (0.7, None), (0.7, 2.0)])
def test_token_logprobs_and_their_gradients_are_those_of_float64(temperature: float, cap: float | None) -> None:
    hidden, weight, targets = torch.randn(20, 24), torch.randn(50, 24), torch.arange(20)
    weights = torch.randn(2, 20)
    found, expected = [], []
    for kernels, into, dtype in ((KERNELS, found, torch.float32), (TRUTH, expected, torch.float64)):
        x, w = (v.detach().to(dtype, copy=True).requires_grad_() for v in (hidden, weight))
        scored = kernels.token_logprobs(x, w, targets, temperature, cap)
        (scored.raw * weights[0] + scored.scaled * weights[1]).sum().backward()
        assert x.grad is not None and w.grad is not None
        into += [scored.raw.detach(), scored.scaled.detach(), scored.entropy, x.grad, w.grad]
    for ours, theirs in zip(found, expected, strict=True):
        assert error(ours, theirs) < 1e-5
    logits = KERNELS.linear(hidden, weight, None)
    assert torch.equal(found[0], KERNELS.logits_logprobs(logits if cap is None else KERNELS.soft_cap(logits, cap), targets))


def test_gradients_are_those_of_the_reference_in_float64() -> None:
    lengths, size = [3, 20], 8
    q, k, v = make(lengths, size, 2, 1)
    table, norms = torch.randn(40, size), torch.rand(2, size)
    projection, hidden = torch.randn(4 * size, 12), torch.randn(23, 12)
    positions = torch.cat([torch.arange(n) for n in lengths])
    grads = []
    for kernels, dtype in ((KERNELS, torch.float32), (TRUTH, torch.float64)):
        x, w, n, a, b = (value.detach().to(dtype, copy=True).requires_grad_() for value in (hidden, projection, torch.rand(12, generator=_numbers()), *norms))
        qkv = kernels.linear(kernels.rms_norm(x, n, 1e-6), w, None)
        q, k, v = kernels.rope(qkv, positions, table, (2, 1, size), a, b, 1e-6)
        mixed = kernels.packed_attention(q, k, v, bounds_of(lengths), 20, 0.3, 7).flatten(1)
        gated, total = kernels.add_rms_norm(kernels.silu_mul(mixed), mixed[:, :size], a, 1e-6)
        (gated * total).sum().backward()
        grads.append([value.grad for value in (x, w, n, a, b)])
    for ours, theirs in zip(*grads, strict=True):
        assert ours is not None and theirs is not None
        assert error(ours, theirs) < 1e-5


@pytest.mark.parametrize("narrow", [torch.float32, torch.bfloat16])
def test_gradients_of_norms_gates_and_the_rotation_are_those_of_float64_beside_a_wider_residual_stream(narrow: torch.dtype) -> None:
    rows, width, heads = 9, 24, (3, 1, 16)
    x, residual, weight, qkv = torch.randn(rows, width), torch.randn(rows, width), torch.rand(width), torch.randn(rows, 5 * 16)
    table, positions = torch.randn(40, 16), torch.arange(rows) * 3 % 7
    scales = torch.tensor([[1.0], [2.0], [0.5]])
    shares = [torch.randn(shape) for shape in ((rows, width), (rows, width), (rows, width // 2), (rows, 3, 16), (rows, 1, 16), (rows, 1, 16))]
    found = []
    for kernels, dtypes in ((KERNELS, (narrow, torch.float32)), (TRUTH, (torch.float64, torch.float64))):
        # In 16 bits the reference starts from the same rounded numbers.
        a, b, c, d = (
            value.to(narrow if kind == 0 else torch.float32).to(dtypes[kind], copy=True).requires_grad_()
            for value, kind in ((x, 0), (residual, 1), (weight, 1), (qkv, 0))
        )  # fmt: skip
        normed, total = kernels.add_rms_norm(a, b, c, 1e-6)
        alone = kernels.rms_norm(b, c, 1e-6) + kernels.rms_norm(b, c.expand(3, -1) * scales.to(c.dtype), 1e-6, True)
        gated = kernels.silu_mul(a) + kernels.gelu_mul(a) + kernels.clamped_swiglu_mul(a * 5) + kernels.soft_cap(a, 1.5)[:, : width // 2]
        turned = kernels.rope(d, positions, table, heads, None, None, 1e-6)
        assert normed.dtype == total.dtype == dtypes[1] and gated.dtype == turned[0].dtype == dtypes[0]
        outputs = (normed + alone, total, gated, *turned)
        sum((out * share.to(out.dtype)).sum(dtype=torch.float64) for out, share in zip(outputs, shares, strict=True)).backward()
        found.append([value.grad for value in (a, b, c, d)])
    for ours, theirs in zip(*found, strict=True):
        assert ours is not None and theirs is not None
        assert error(ours, theirs) < (1e-5 if narrow == torch.float32 else 1e-2)
    assert narrow == torch.float32 or error(found[0][1], found[1][1]) < 2e-3, "the residual stream's gradient stays fp32"


def _numbers() -> torch.Generator:
    return torch.Generator().manual_seed(3)


@pytest.mark.parametrize(("heads", "kv_heads", "window", "cap"), [(3, 1, None, None), (2, 2, 9, None), (3, 1, 30, 1.5)])
def test_attentions_gradients_are_those_of_float64_over_several_tiles(heads: int, kv_heads: int, window: int | None, cap: float | None) -> None:
    lengths, grads = [1, 75, 20], []
    qkv, weights = (*make(lengths, 24, heads, kv_heads), torch.randn(heads)), torch.randn(96, heads, 24)
    for attend, dtype in (
        (lambda q, k, v, sinks: KERNELS.packed_attention(q, k, v, bounds_of(lengths), 75, 0.2, window, cap=cap, sinks=sinks), torch.float32),
        (lambda q, k, v, sinks: exact(q, k, v, bounds_of(lengths), 0.2, window, cap, sinks), torch.float64),
    ):
        given = [x.detach().to(dtype, copy=True).requires_grad_() for x in qkv]
        (attend(*given) * weights).sum().backward()
        grads.append([x.grad for x in given])
    for ours, theirs in zip(*grads, strict=True):
        assert ours is not None and theirs is not None
        assert error(ours, theirs) < 1e-6


CASES = [
    (24, 3, 1, 20, None, True), pytest.param(80, 4, 2, None, None, False, marks=pytest.mark.full),
    pytest.param(16, 2, 1, None, 1.5, True, marks=pytest.mark.full), pytest.param(24, 3, 1, 20, None, False, marks=pytest.mark.full),
]  # fmt: skip
LENGTHS = [1, 12, 100]


@pytest.mark.parametrize(("size", "heads", "kv_heads", "window", "cap", "has_sinks"), CASES)
def test_attention_is_attention_and_decoding_chunks_and_whole_prompts_have_the_same_bits(
    size: int, heads: int, kv_heads: int, window: int | None, cap: float | None, has_sinks: bool
) -> None:
    sinks = torch.randn(heads) if has_sinks else None
    qkv = make(LENGTHS, size, heads, kv_heads)
    expected = exact(*qkv, bounds_of(LENGTHS), size**-0.5, window, cap, sinks)
    whole = KERNELS.packed_attention(*qkv, bounds_of(LENGTHS), max(LENGTHS), size**-0.5, window, cap=cap, sinks=sinks)
    assert error(whole, expected) < 1e-6
    for splits in (True, False):
        paged, out = Paged(interpreted(splits), LENGTHS, size, kv_heads), torch.full_like(qkv[0], math.nan)
        # The second split begins at 64. The last steps have one token per sequence.
        for chunks in ({1: 9, 2: 63}, {0: 1, 2: 1, 1: 1}, {1: 1, 2: 34}, {1: 1, 2: 1}, {2: 1}):
            paged.step(chunks, qkv, size**-0.5, window, out, cap, sinks)
        assert torch.equal(out, whole), splits


def test_attention_does_not_depend_on_neighbouring_sequences() -> None:
    q, k, v = make(LENGTHS, 16, 2, 1)
    whole = KERNELS.packed_attention(q, k, v, bounds_of(LENGTHS), 100, 0.2, None)
    alone = KERNELS.packed_attention(q[1:13], k[1:13], v[1:13], bounds_of([12]), 12, 0.2, None)
    assert torch.equal(alone, whole[1:13])


@pytest.mark.parametrize("which", ["key", "value", "query"])
def test_what_is_not_finite_reaches_no_row_that_does_not_see_it(which: str) -> None:
    q, k, v = make([70], 16, 2, 1)
    clean = KERNELS.packed_attention(q, k, v, bounds_of([70]), 70, 0.25, 30)
    {"query": q, "key": k, "value": v}[which][20] = math.nan
    out = KERNELS.packed_attention(q, k, v, bounds_of([70]), 70, 0.25, 30)
    seen = torch.zeros(70, dtype=torch.bool)
    seen[20 : 21 if which == "query" else 50] = True
    assert torch.equal(out[~seen], clean[~seen])
    assert not out[seen].isfinite().all(-1).any()


def test_blocks_behind_the_window_are_never_read() -> None:
    length, window = 75, 20
    qkv = make([length], 16, 2, 1)
    expected = KERNELS.packed_attention(*qkv, bounds_of([length]), length, 0.25, window)
    for splits in (True, False):
        paged, out = Paged(interpreted(splits), [length], 16, 1), torch.full_like(qkv[0], math.nan)
        paged.step({0: length - 1}, qkv, 0.25, window, out)
        behind = paged.tables[0, : (length - window) // BLOCK_TOKENS].long()
        paged.cache.keys[behind], paged.cache.values[behind] = math.nan, math.nan
        paged.step({0: 1}, qkv, 0.25, window, out)
        assert torch.equal(out[-1], expected[-1])


@pytest.mark.parametrize("size", [6, 24])
def test_rope_is_the_references_and_gives_a_token_the_same_bits_in_any_batch(size: int) -> None:
    table, q_norm, k_norm = torch.randn(40, size), torch.rand(size), torch.rand(size)
    qkv, positions = torch.randn(40, 5 * size), torch.arange(40)
    found = KERNELS.rope(qkv, positions, table, (3, 1, size), q_norm, k_norm, 1e-6)
    expected = TRUTH.rope(qkv.double(), positions, table, (3, 1, size), q_norm.double(), k_norm.double(), 1e-6)
    for ours, theirs in zip(found, expected, strict=True):
        assert error(ours, theirs) < 1e-6

    def op(rows: Tensor) -> Tensor:
        at = torch.full((len(rows),), 17)
        return torch.cat([x.flatten(1) for x in KERNELS.rope(rows, at, table, (3, 1, size), None, None, 1e-6)], 1)

    assert rows_that_differ(op, qkv) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8, torch.float8_e4m3fn, torch.uint8], ids=str)
def test_the_cache_holds_the_codes_that_the_house_defines_and_attention_sees_what_they_say(dtype: torch.dtype) -> None:
    heads, size, tokens = (4, 2, 16), 16, 37
    qkv, table = torch.randn(tokens, 8 * size) * torch.logspace(-9, 3, tokens).unsqueeze(1), torch.randn(64, size)
    qkv[5, 4 * size] = math.inf
    (cache,) = empty_cache((4, 2, size), 1, dtype, torch.device("cpu"))
    slots = torch.arange(tokens) + BLOCK_TOKENS
    q = KERNELS.rope_to_cache(qkv, torch.arange(tokens), table, heads, None, None, 1e-6, cache, slots)
    plain_q, k, v = KERNELS.rope(qkv, torch.arange(tokens), table, heads, None, None, 1e-6)
    assert torch.equal(q, plain_q)
    blocks, offsets = slots // BLOCK_TOKENS, slots % BLOCK_TOKENS
    held = [(cache.keys[blocks, :, :, offsets], cache.key_scales, k), (cache.values[blocks, :, offsets], cache.value_scales, v)]
    for codes, scales, numbers in held:
        expected, expected_scales = encode(numbers, dtype)
        own = None if scales is None else scales[blocks, :, offsets]
        if own is not None and expected_scales is not None:
            assert torch.equal(own.nan_to_num(-1), expected_scales.nan_to_num(-1))
        same = decode(codes, None if own is None else own.unsqueeze(-1), torch.float32)
        assert torch.equal(same.nan_to_num(-1), decode(expected, _last(expected_scales), torch.float32).nan_to_num(-1))
    _attend_over(cache, q, k, v, dtype)


def _last(scales: Tensor | None) -> Tensor | None:
    return None if scales is None else scales.unsqueeze(-1)


def _attend_over(cache: KVLayer, q: Tensor, k: Tensor, v: Tensor, dtype: torch.dtype) -> None:
    rounded = (KERNELS.round_kv(k, dtype), KERNELS.round_kv(v, dtype))
    expected = KERNELS.packed_attention(q, *rounded, bounds_of([37]), 37, 0.25, None)
    batch = PagedBatch(
        bounds_of([37]), torch.tensor([37], dtype=torch.int32), torch.tensor([[1, 2, 3]], dtype=torch.int32), torch.arange(37) + BLOCK_TOKENS
    )
    found = KERNELS.paged_attention(q, cache, batch, 0.25, None)
    assert torch.equal(found.nan_to_num(-7), expected.nan_to_num(-7))
    assert found[:5].isfinite().all()


SETTINGS = {  # temperature, top_k, top_p, min_p
    "plain": (1.0, 0, 1.0, 0.0), "warm": (1.7, 0, 1.0, 0.0), "greedy": (0.0, 0, 1.0, 0.0), "top_k": (1.0, 5, 1.0, 0.0),
    "top_p": (0.8, 0, 0.6, 0.0), "least": (1.0, 0, 1e-9, 0.0), "min_p": (1.0, 0, 1.0, 0.2), "all": (0.9, 9, 0.8, 0.05),
}  # fmt: skip


def test_sampling_draws_what_the_reference_draws_in_float64() -> None:
    rows = len(SETTINGS)
    temperature, top_k, top_p, min_p = (torch.tensor(column) for column in zip(*SETTINGS.values(), strict=True))
    logits, uniform = torch.randn(rows, 300) * 2, torch.rand(rows, dtype=torch.float64)
    # Ties at every boundary, and banned tokens.
    logits = (logits * 2).round() / 2
    logits[:, 11] = -math.inf
    found = KERNELS.sample_rows(logits, temperature, top_k, top_p, min_p, uniform)
    expected = TRUTH.sample_rows(logits.double(), temperature, top_k, top_p, min_p, uniform)
    assert torch.equal(found.tokens, expected.tokens)
    assert (found.sampling - expected.sampling).abs().max() < 1e-5
    assert torch.equal(found.raw, KERNELS.logits_logprobs(logits, found.tokens))


def test_sampling_gives_a_row_the_same_token_and_bits_in_any_batch() -> None:
    logits, uniform = torch.randn(12, 300) * 2, torch.rand(12, dtype=torch.float64)
    ones = torch.ones(12)
    whole = KERNELS.sample_rows(logits, ones * 0.7, ones.long() * 0, ones, ones * 0, uniform)
    part = KERNELS.sample_rows(logits[3:5], ones[:2] * 0.7, ones[:2].long() * 0, ones[:2], ones[:2] * 0, uniform[3:5])
    for ours, theirs in zip(part, whole, strict=True):
        assert torch.equal(ours, theirs[3:5])


def test_bf16_is_near_float64_and_keeps_its_bits() -> None:
    lengths, size = [5, 70], 16
    q, k, v = (x.bfloat16() for x in make(lengths, size, 2, 1))
    out = KERNELS.packed_attention(q, k, v, bounds_of(lengths), 70, 0.25, None)
    assert out.dtype == torch.bfloat16
    assert error(out, exact(q, k, v, bounds_of(lengths), 0.25, None)) < 2e-2
    assert torch.equal(KERNELS.packed_attention(q[:5], k[:5], v[:5], bounds_of([5]), 5, 0.25, None), out[:5])
    x, weight = torch.randn(20, 40).bfloat16(), torch.randn(30, 40).bfloat16()
    assert error(KERNELS.linear(x, weight, None), x.double() @ weight.double().t()) < 1e-2
    assert rows_that_differ(lambda rows: KERNELS.linear(rows, weight, None), x, (1, 3)) == []


def test_a_wrong_call_raises_before_anything_runs() -> None:
    with pytest.raises(ValueError, match="linear weight"):
        KERNELS.linear(torch.randn(3, 5), torch.randn(4, 6), None)
    with pytest.raises(ValueError, match="multiple"):
        KERNELS.packed_attention(*make([4], 16, 3, 2), bounds_of([4]), 4, 0.25, None)
    assert isinstance(KERNELS, TritonKernels)
    assert KERNELS.linear(torch.randn(3, 5).double(), torch.randn(4, 5).double(), None).dtype == torch.float64

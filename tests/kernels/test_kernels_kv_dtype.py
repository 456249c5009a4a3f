"""A cache of 4, 8 or 16 bits: the values it returns, and the same bits from both sets of kernels, packed and paged."""

import math

import pytest
import torch
from paged_sequences import LENGTHS, Paged, bounds_of, exact, make
from torch import Tensor

from tandem.kernels import Kernels, KVLayer, empty_cache, select, stored_dtype
from tandem.types.kv_cache import KVCacheDtype

DTYPES: list[KVCacheDtype] = ["bfloat16", "int8", "fp8_e4m3", "int4"]
SCALED: list[KVCacheDtype] = ["int8", "fp8_e4m3", "int4"]


def heads_of_all_sizes(size: int) -> Tensor:
    """Returns [T, 2, D] with magnitudes from subnormal to nearly the largest fp32, including zeros."""
    powers = torch.arange(-149, 128).repeat_interleave(4)
    x = torch.randn(len(powers), 2, size) * torch.exp2(powers.clamp(max=120).double()).float().view(-1, 1, 1)
    x[::7, 0, ::3] = 0.0
    x[5] = 0.0
    return x


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("size", [6, 16, 24, 128])
def test_both_sets_of_kernels_round_to_the_same_bits(name: KVCacheDtype, size: int) -> None:
    x, dtype = heads_of_all_sizes(size), stored_dtype(name, torch.float32)
    ours, plain = (select(kernels).round_kv(x, dtype) for kernels in ("cpu", "reference"))
    assert ours.isfinite().all()
    assert torch.equal(ours.view(torch.int32), plain.view(torch.int32))


def test_a_code_is_the_nearest_of_its_numbers(kernels: Kernels) -> None:
    x = torch.randn(50, 2, 32) * torch.rand(50, 1, 1) * 30
    x[:, :, 0] = x.abs().amax(-1)
    of_fp8 = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn).float()
    tables = {torch.uint8: torch.arange(-7.0, 8.0), torch.int8: torch.arange(-127.0, 128.0), torch.float8_e4m3fn: of_fp8}
    for dtype, table in tables.items():
        table = table[table.isfinite()]
        scale = x.abs().amax(-1, keepdim=True).double() / table.max().double()
        nearest = (x.double().unsqueeze(-1) / scale.unsqueeze(-1) - table.double()).abs().amin(-1) * scale
        error = (kernels.round_kv(x, dtype).double() - x.double()).abs()
        assert (error <= nearest + 1e-6 * x.abs()).all()
        assert error.max() > 0


@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_head_with_a_number_that_is_not_finite_comes_back_as_nan(kernels: Kernels, name: KVCacheDtype, bad: float) -> None:
    x = torch.randn(4, 2, 24)
    x[1, 0, 17] = bad
    rounded = kernels.round_kv(x, stored_dtype(name, torch.float32))
    assert rounded[1, 0].isnan().all()
    assert rounded.isnan().sum() == 24


@pytest.mark.parametrize("name", DTYPES)
def test_the_gradient_of_rounding_goes_straight_through(kernels: Kernels, name: KVCacheDtype) -> None:
    x, grad = torch.randn(9, 2, 16, requires_grad=True), torch.randn(9, 2, 16)
    kernels.round_kv(x, stored_dtype(name, torch.float32)).backward(grad)
    assert torch.equal(x.grad, grad)


def cache_of(paged: Paged, name: KVCacheDtype, size: int, kv_heads: int) -> KVLayer:
    """Returns a cache of the same blocks whose unused slots hold NaN, or codes with NaN scales."""
    blocks = len(paged.cache.keys)
    layer = empty_cache((blocks, kv_heads, size), 1, stored_dtype(name, torch.float32), torch.device("cpu"))[0]
    for tensor in layer.tensors():
        tensor.fill_(math.nan if tensor.is_floating_point() else 77)
    return layer


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize(("size", "heads", "kv_heads", "window"), [(32, 4, 2, None), (24, 3, 1, 20), (6, 2, 1, None), (128, 7, 1, 16)])
def test_paged_attention_has_the_bits_of_packed_over_rounded_keys_and_values(
    kernels: Kernels, name: KVCacheDtype, size: int, heads: int, kv_heads: int, window: int | None
) -> None:
    q, k, v = make(LENGTHS, size, heads, kv_heads)
    dtype = stored_dtype(name, torch.float32)
    rounded = kernels.round_kv(k, dtype), kernels.round_kv(v, dtype)
    expected = kernels.packed_attention(q, *rounded, bounds_of(LENGTHS), max(LENGTHS), size**-0.5, window)
    paged, out = Paged(kernels, LENGTHS, size, kv_heads), torch.full_like(q, math.nan)
    paged.cache = cache_of(paged, name, size, kv_heads)
    step = 0
    while any(paged.left(s) for s in range(len(LENGTHS))):
        chosen = [s for s in range(len(LENGTHS)) if paged.left(s) and (s + step) % 3 != 0]
        chunks = {s: min((7, 1, 16, 33)[(s + step) % 4], paged.left(s)) for s in chosen}
        if chunks:
            paged.step(chunks, (q, k, v), size**-0.5, window, out)
        step += 1
    assert torch.equal(out, expected)
    truth = exact(q, *rounded, bounds_of(LENGTHS), size**-0.5, window)
    assert (out - truth).norm() / truth.norm() < 1e-6


@pytest.mark.parametrize("name", DTYPES)
def test_both_sets_of_kernels_write_the_same_blocks(name: KVCacheDtype) -> None:
    qkv = make([40], 32, 4, 2)
    written = []
    for kernels in (select("cpu"), select("reference")):
        torch.manual_seed(3)
        paged = Paged(kernels, [40], 32, 2)
        paged.cache = cache_of(paged, name, 32, 2)
        paged.step({0: 40}, qkv, 0.2, None, torch.empty_like(qkv[0]))
        written.append(paged.cache)
    for ours, theirs in zip(*(cache.tensors() for cache in written), strict=True):
        assert torch.equal(ours.nan_to_num() if ours.element_size() > 1 else ours.view(torch.uint8),
                           theirs.nan_to_num() if theirs.element_size() > 1 else theirs.view(torch.uint8))  # fmt: skip


@pytest.mark.parametrize("name", DTYPES)
def test_a_long_context_of_codes_split_over_threads_keeps_the_bits(cpu_kernels: Kernels, name: KVCacheDtype) -> None:
    length, dtype = 2100, stored_dtype(name, torch.float32)
    q, k, v = make([length], 64, 4, 1)
    rounded = cpu_kernels.round_kv(k, dtype), cpu_kernels.round_kv(v, dtype)
    expected = cpu_kernels.packed_attention(q, *rounded, bounds_of([length]), length, 0.1, None)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        paged, out = Paged(cpu_kernels, [length], 64, 1), torch.empty_like(q)
        paged.cache = cache_of(paged, name, 64, 1)
        paged.step({0: length - 1}, (q, k, v), 0.1, None, out)
        paged.step({0: 1}, (q, k, v), 0.1, None, out)
        assert torch.equal(out, expected), threads

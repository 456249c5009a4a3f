"""Attention over the compressed cache of latent attention: against its definition, and with the bits of packed attention however tokens come."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from paged_sequences import LENGTHS, InChunks, bounds_of, exact
from torch import Tensor
from triton_interpreter import interpreted

from tandem.kernels import BLOCK_TOKENS, Kernels, LatentLayer, PagedBatch, empty_latent_cache, select
from tandem.kernels.latent_cache import write_rows

DTYPES = [torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn]
PUBLISHED = (576, 512)
"""Numbers of a row and of its value in DeepSeek-V2 and V3."""


class Latent(InChunks):
    """Feeds sequences in chunks to a compressed cache, whose unused rows are NaN."""

    def __init__(self, kernels: Kernels, lengths: list[int], size: int, dtype: torch.dtype) -> None:
        super().__init__(lengths)
        self.kernels = kernels
        (self.cache,) = empty_latent_cache(self.blocks, size, 1, dtype, torch.device("cpu"))
        self.cache.tensors()[-1].fill_(math.nan)

    def step(self, chunks: dict[int, int], q: Tensor, rows: Tensor, scale: float, value_size: int, out: Tensor) -> None:
        of, _, batch = self.batch_of({s: min(wished, self.left(s)) for s, wished in chunks.items()})
        write_rows(self.cache, rows[of], batch.slots)
        out[of] = self.kernels.latent_attention(q[of], self.cache, batch, scale, value_size)


def kernels_named(name: str) -> Any:
    return interpreted() if name == "triton" else select(name)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def quiet_numpy() -> Iterator[None]:
    # The interpreter computes rows beyond the last one from undefined values, and never stores them.
    with np.errstate(all="ignore"):
        yield


CASES = [
    pytest.param(name, dtype, marks=pytest.mark.full if name == "triton" and dtype != torch.int8 else ())
    for name in ("reference", "cpu", "triton")
    for dtype in DTYPES
]


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_a_compressed_cache_gives_the_bits_of_packed_attention_however_tokens_come(name: str, dtype: torch.dtype) -> None:
    kernels, lengths = kernels_named(name), [1, 5, 17] if name == "triton" else LENGTHS
    # 24 are more than fit into one of Triton's tiles, and take long in its interpreter.
    heads, size, value_size = 24 if name == "triton" and dtype != torch.int8 else 4, 20, 12
    bounds, tokens = bounds_of(lengths), sum(lengths)
    q, rows = torch.randn(tokens, heads, size), torch.randn(tokens, 1, size)
    held = kernels.round_kv(rows, dtype) if dtype != torch.float32 else rows
    packed = kernels.packed_attention(q, held, held[..., :value_size], bounds, max(lengths), 0.3, None)
    assert packed.shape == (tokens, heads, value_size)
    assert (packed - exact(q, held, held[..., :value_size], bounds, 0.3, None)).abs().max() < 1e-5
    for chunk in (max(lengths), 7):
        paged, out = Latent(kernels, lengths, size, dtype), torch.full_like(packed, math.nan)
        while paged.done != lengths:
            paged.step({s: chunk for s in reversed(range(len(lengths))) if paged.done[s] < lengths[s]}, q, rows.squeeze(1), 0.3, value_size, out)
        assert torch.equal(out, packed), chunk


@pytest.mark.parametrize("threads", [pytest.param(1, marks=pytest.mark.full), 2])
def test_rows_of_the_published_size_decode_with_the_bits_of_packed_attention(threads: int) -> None:
    """One token of one sequence, which threads share span by span if few heads do not fill them."""
    kernels, (size, value_size), tokens = select("cpu"), PUBLISHED, 530
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        for heads in (4, 16):
            q, rows = torch.randn(tokens, heads, size), torch.randn(tokens, 1, size)
            packed = kernels.packed_attention(q, rows, rows[..., :value_size], bounds_of([tokens]), tokens, 0.05, None)
            paged, out = Latent(kernels, [tokens], size, torch.float32), torch.empty_like(packed)
            paged.step({0: tokens - 1}, q, rows.squeeze(1), 0.05, value_size, out)
            paged.step({0: 1}, q, rows.squeeze(1), 0.05, value_size, out)
            assert torch.equal(out[-1], packed[-1])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("name", ["reference", "cpu", pytest.param("triton", marks=pytest.mark.full)])
def test_gradients_of_values_that_are_a_part_of_the_keys(name: str) -> None:
    lengths, size, value_size = [3, 18], 12, 8
    bounds, drawn = bounds_of(lengths), torch.Generator().manual_seed(1)
    q, rows, weight = (torch.randn(21, heads, width, generator=drawn, dtype=torch.float64) for heads, width in ((24, size), (1, size), (24, value_size)))

    def gradients(kernels: Kernels, dtype: torch.dtype) -> list[Tensor]:
        inputs = [x.to(dtype).requires_grad_() for x in (q, rows)]
        out = kernels.packed_attention(*inputs, inputs[1][..., :value_size].contiguous(), bounds, 18, 0.3, None)
        (out * weight.to(dtype)).sum().backward()
        return [x.grad.double() for x in inputs if x.grad is not None]

    for own, true in zip(gradients(kernels_named(name), torch.float32), gradients(select("reference"), torch.float64), strict=True):
        assert (own - true).norm() < 1e-5 * true.norm()


@pytest.mark.full
def test_rows_of_the_published_size_in_two_parts_follow_the_definition() -> None:
    lengths, (size, value_size) = [1, 20], PUBLISHED
    kernels, bounds = interpreted(), bounds_of(lengths)
    q, rows = torch.randn(21, 16, size), torch.randn(21, 1, size)
    packed = kernels.packed_attention(q, rows, rows[..., :value_size], bounds, 20, 0.05, None)
    assert (packed - exact(q, rows, rows[..., :value_size], bounds, 0.05, None)).abs().max() < 1e-5
    paged, out = Latent(kernels, lengths, size, torch.float32), torch.empty_like(packed)
    for chunk in (1, 19):
        paged.step(dict.fromkeys(range(2), chunk), q, rows.squeeze(1), 0.05, value_size, out)
    assert torch.equal(out, packed)


def test_a_value_that_is_not_finite_spoils_only_the_rows_that_attend_to_it() -> None:
    q, rows = torch.randn(20, 2, 20), torch.randn(20, 1, 20)
    values = rows[..., :12].clone()
    values[17, 0, 3] = math.inf
    out = interpreted().packed_attention(q, rows, values, bounds_of([20]), 20, 0.3, None)
    assert out[:17].isfinite().all()
    assert out[17:].isnan().all()


def test_a_cache_of_another_shape_is_refused() -> None:
    kernels, batch = select("cpu"), PagedBatch(*(torch.zeros(n, dtype=torch.int32) for n in (2, 1)), torch.zeros(1, 1, dtype=torch.int32), torch.zeros(0))
    with pytest.raises(ValueError, match="cache rows"):
        kernels.latent_attention(torch.zeros(0, 2, 12), LatentLayer(torch.zeros(2, BLOCK_TOKENS, 8)), batch, 1.0, 8)
    with pytest.raises(TypeError, match="has no dense fp32 scales"):
        kernels.latent_attention(torch.zeros(0, 2, 8), LatentLayer(torch.zeros(2, BLOCK_TOKENS, 8, dtype=torch.int8)), batch, 1.0, 8)

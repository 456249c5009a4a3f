"""The Triton kernels on a device: near float64, and the same bits for a row whatever stands beside it."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from delta_sequences import inputs_of
from paged_sequences import Paged, bounds_of, exact, make
from torch import Tensor

from tandem.engine.sample.random_numbers import uniforms
from tandem.kernels import BLOCK_TOKENS, KVLayer, PagedBatch, empty_cache, select
from tandem.kernels.api import DeltaStates
from tandem.kernels.attention_backends import broken_law
from tandem.kernels.kv_dtype import decode, encode
from tandem.kernels.reference import ReferenceKernels

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
TRUTH = ReferenceKernels(tiled=False)
DTYPES = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 2e-3}
"""The relative error of a result that is rounded once."""


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    torch.set_default_dtype(request.param)
    yield request.param
    torch.set_default_dtype(torch.float32)


def kernels(splits: bool | None = None) -> Any:
    found: Any = type(select("triton"))(splits=splits)
    return found


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize(("columns", "width"), [(4096, 4096), (1000, 1100), (151936, 896)])
def test_linear_is_the_product_and_a_row_keeps_its_bits_at_every_number_of_rows(dtype: torch.dtype, columns: int, width: int) -> None:
    own = kernels()
    x, weight, bias = torch.randn(1500, width), torch.randn(columns, width), torch.randn(columns)
    whole = own.linear(x, weight, bias)
    assert error(whole[:64], x[:64].double() @ weight.double().t() + bias.double()) < DTYPES[dtype]
    for rows in (1, 2, 7, 16, 33, 64, 65, 128, 300, 700):
        at = rows * 5 % (1500 - rows)
        assert torch.equal(own.linear(x[at : at + rows].clone(), weight, bias), whole[at : at + rows]), rows
    assert torch.equal(own.linear(x, weight, bias), whole), "again"


def test_every_tile_gives_the_bits_of_the_first(dtype: torch.dtype) -> None:
    tiles = kernels()._linear_tiles[dtype]
    assert tiles.agreeing(CUDA, dtype) == tiles._given


def test_grouped_linear_has_the_bits_of_each_groups_own_linear(dtype: torch.dtype) -> None:
    own = kernels()
    x, weight = torch.randn(700, 512), torch.randn(6, 768, 512)
    bounds = torch.tensor([0, 0, 1, 18, 18, 400, 700])
    at = bounds.tolist()
    parts = [own.linear(x[i:j], w, None) for w, i, j in zip(weight, at, at[1:], strict=False) if j > i]
    assert torch.equal(own.grouped_linear(x, weight, bounds), torch.cat(parts))


@pytest.mark.parametrize(("size", "heads", "kv_heads", "window"), [(128, 32, 8, None), (64, 14, 2, 700), (80, 4, 4, None), (256, 8, 2, 300)])
def test_attention_is_attention_and_decoding_chunks_and_whole_prompts_have_the_same_bits(
    dtype: torch.dtype, size: int, heads: int, kv_heads: int, window: int | None
) -> None:
    lengths = [1, 40, 1300, 257]
    qkv = make(lengths, size, heads, kv_heads)
    expected = exact(*qkv, bounds_of(lengths), size**-0.5, window)
    whole = kernels().packed_attention(*qkv, bounds_of(lengths), 1300, size**-0.5, window)
    assert error(whole, expected) < 3 * DTYPES[dtype]
    for splits in (None, True, False):
        paged, out = Paged(kernels(splits), lengths, size, kv_heads), torch.full_like(qkv[0], math.nan)
        paged.table = paged.table.float()
        step = 0
        sizes = [500, 1, 1, 63, 1, 256]
        while any(paged.left(s) for s in range(len(lengths))):
            chunks = {s: min(sizes[(s + step) % len(sizes)], paged.left(s)) for s in range(len(lengths)) if paged.left(s) and (s + step) % 3}
            if chunks:
                paged.step(chunks, qkv, size**-0.5, window, out)
            step += 1
        assert torch.equal(out, whole), splits


def test_decoding_far_into_long_sequences_keeps_the_bits_of_one_alone(dtype: torch.dtype) -> None:
    lengths, size = [9000, 17, 4096], 128
    qkv = make(lengths, size, 8, 2)
    outs = []
    for own in (kernels(True), kernels(False)):
        paged, out = Paged(own, lengths, size, 2), torch.full_like(qkv[0], math.nan)
        paged.table = paged.table.float()
        paged.step({s: length - 2 for s, length in enumerate(lengths)}, qkv, 0.1, None, out)
        paged.step({0: 1, 1: 1, 2: 1}, qkv, 0.1, None, out)
        paged.step({0: 1}, qkv, 0.1, None, out)
        outs.append(out[paged.bounds[1] - 2 : paged.bounds[1]])
    assert torch.equal(*outs)
    alone = kernels().packed_attention(*(x[:9000] for x in qkv), bounds_of([9000]), 9000, 0.1, None)
    assert torch.equal(outs[0], alone[-2:])


def test_the_kernels_pass_the_check_that_other_backends_must_pass(dtype: torch.dtype) -> None:
    own = kernels()
    attend = lambda q, k, v, bounds, longest, scale, window: own.packed_attention(q, k, v, bounds, longest, scale, window)
    assert broken_law(own, attend, dtype, CUDA) == ""


@pytest.mark.parametrize("stored", [torch.int8, torch.float8_e4m3fn, torch.uint8], ids=str)
def test_the_cache_holds_the_codes_that_the_house_defines(stored: torch.dtype) -> None:
    own, size, tokens = kernels(), 128, 300
    qkv, table = torch.randn(tokens, 8 * size) * torch.logspace(-9, 3, tokens).unsqueeze(1), torch.randn(512, size)
    (cache,) = empty_cache((20, 2, size), 1, stored, CUDA)
    slots, positions = torch.arange(tokens) + BLOCK_TOKENS, torch.arange(tokens)
    q = own.rope_to_cache(qkv, positions, table, (4, 2, size), None, None, 1e-6, cache, slots)
    _, k, v = own.rope(qkv, positions, table, (4, 2, size), None, None, 1e-6)
    blocks, offsets = slots // BLOCK_TOKENS, slots % BLOCK_TOKENS
    assert cache.key_scales is not None and cache.value_scales is not None
    for codes, scales, numbers in (
        (cache.keys[blocks, :, :, offsets], cache.key_scales, k), (cache.values[blocks, :, offsets], cache.value_scales, v),
    ):
        expected, expected_scales = encode(numbers, stored)
        assert expected_scales is not None
        assert torch.equal(scales[blocks, :, offsets], expected_scales)
        assert torch.equal(
            decode(codes, expected_scales.unsqueeze(-1), torch.float32), decode(expected, expected_scales.unsqueeze(-1), torch.float32)
        )
    batch = PagedBatch(
        bounds_of([tokens]).to(CUDA), torch.tensor([tokens], dtype=torch.int32), torch.arange(1, 20, dtype=torch.int32).unsqueeze(0), slots
    )
    packed = own.packed_attention(q, own.round_kv(k, stored), own.round_kv(v, stored), bounds_of([tokens]), tokens, 0.1, None)
    assert torch.equal(own.paged_attention(q, KVLayer(*cache), batch, 0.1, None), packed)


def delta_inputs(lengths: list[int]) -> list[Tensor]:
    """On the device, of the size of Qwen3-Next with fewer heads."""
    with torch.device("cpu"):
        return [x.to(CUDA) for x in inputs_of((2, 4, 128, 128), sum(lengths))]


@pytest.mark.parametrize("deterministic", [True, False])
def test_the_gated_delta_rule_and_its_gradients_are_those_of_float64(deterministic: bool) -> None:
    lengths = [1, 700, 64, 130]
    exact = [x.double().requires_grad_() for x in delta_inputs(lengths)]
    expected = TRUTH.gated_delta_rule(*exact, bounds_of(lengths))  # type: ignore[arg-type]
    weight = torch.randn_like(expected)
    (expected * weight).sum().backward()
    given = [x.detach().float().requires_grad_() for x in exact]
    out = select("triton", deterministic=deterministic).gated_delta_rule(*given, bounds_of(lengths))  # type: ignore[arg-type]
    assert error(out.detach(), expected.detach()) < 1e-5
    (out * weight.float()).sum().backward()
    for own, other in zip(given, exact, strict=True):
        assert own.grad is not None and other.grad is not None
        assert error(own.grad, other.grad) < 1e-4


def test_the_gated_delta_rule_over_states_has_the_bits_of_packed_sequences_however_tokens_come() -> None:
    lengths, kernels = [1, 300, 64, 130], select("triton")
    inputs, bounds = delta_inputs(lengths), bounds_of(lengths).tolist()
    expected = kernels.gated_delta_rule(*inputs, bounds_of(lengths))  # type: ignore[arg-type]
    matrices, out, done = torch.full((4, 4, 128, 128), math.nan), torch.empty_like(expected), [0] * 4
    for size in (1, 1, 63, 64, 1, 170):
        spans = {s: range(bounds[s] + done[s], bounds[s] + min(done[s] + size, lengths[s])) for s in (3, 1, 0, 2) if done[s] < lengths[s]}
        of, rows = torch.tensor([t for span in spans.values() for t in span]), list(spans)
        states = DeltaStates(matrices, torch.tensor(rows), torch.tensor([done[s] == 0 for s in rows]))
        out[of] = kernels.gated_delta_rule(*(x[of] for x in inputs), bounds_of([len(span) for span in spans.values()]), states)  # type: ignore[arg-type]
        done = [done[s] + len(spans.get(s, ())) for s in range(4)]
    assert done == lengths and torch.equal(out, expected)


def test_norms_gates_and_logprobs_are_right_and_keep_their_bits(dtype: torch.dtype) -> None:
    own = kernels()
    x, weight, other = torch.randn(300, 4096) * 3, torch.rand(4096), torch.randn(300, 4096)
    target = torch.arange(300)
    normed, total = own.add_rms_norm(x, other, weight, 1e-6)
    assert torch.equal(total, x + other)
    assert error(normed, TRUTH.rms_norm(total.double(), weight.double(), 1e-6)) < DTYPES[dtype]
    assert error(own.silu_mul(x), TRUTH.silu_mul(x.double())) < DTYPES[dtype]
    logprobs = own.logits_logprobs(x, target)
    assert (logprobs - TRUTH.logits_logprobs(x.double(), target)).abs().max() < 1e-4
    for rows in (1, 7, 100):
        assert torch.equal(own.add_rms_norm(x[:rows], other[:rows], weight, 1e-6)[0], normed[:rows])
        assert torch.equal(own.logits_logprobs(x[:rows].clone(), target[:rows]), logprobs[:rows])


def test_random_numbers_are_those_of_the_cpu() -> None:
    keys, positions = torch.randint(-(2**62), 2**62, (1000,)), torch.arange(1000) * 37
    assert torch.equal(uniforms(keys, positions).cpu(), uniforms(keys.cpu(), positions.cpu()))


def test_sampling_draws_what_the_reference_draws_in_float64() -> None:
    own, rows = kernels(), 64
    logits, uniform = torch.randn(rows, 32000) * 3, torch.rand(rows, dtype=torch.float64)
    row = torch.arange(rows)
    settings = ((row % 4 * 0.4).float(), row % 3 * 40, (1 - row % 5 * 0.2).float(), (row % 2 * 0.02).float())
    found, expected = own.sample_rows(logits, *settings, uniform), TRUTH.sample_rows(logits.double(), *settings, uniform)
    # A number that falls on a border to the last bits may go either way.
    assert int((found.tokens != expected.tokens).sum()) <= 1
    same = found.tokens == expected.tokens
    assert (found.sampling - expected.sampling)[same].abs().max() < 1e-3
    part = own.sample_rows(logits[5:9], *(x[5:9] for x in settings), uniform[5:9])
    assert torch.equal(part.tokens, found.tokens[5:9]) and torch.equal(part.sampling, found.sampling[5:9])

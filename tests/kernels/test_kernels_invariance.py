"""The invariance law of ``kernels.api``: the bits of a row do not depend on other rows, on chunks or on threads."""

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tandem.kernels import Kernels

BIG = 333
COUNTS = [*range(1, 71), 127, 128, 129, 192, 193, 256, 300]
SHAPES = [(512, 128), (99, 128), (320, 513), (33, 30), (1, 64), (80, 1100)]


def counts_that_differ(op: Callable[[Tensor], Tensor], x: Tensor) -> list[int]:
    """Returns the numbers of rows with which ``op`` gives a row other bits than with all of ``x``."""
    whole = op(x)
    wrong = []
    for count in COUNTS:
        start = count * 7 % (len(x) - count)
        if not torch.equal(op(x[start : start + count].clone()), whole[start : start + count]):
            wrong.append(count)
    return wrong


@pytest.mark.parametrize(("columns", "width"), SHAPES)
def test_linear_gives_a_row_the_same_bits_in_any_batch(kernels: Kernels, columns: int, width: int) -> None:
    x, weight, bias = torch.randn(BIG, width), torch.randn(columns, width), torch.randn(columns)
    assert counts_that_differ(lambda rows: kernels.linear(rows, weight, bias), x) == []


@pytest.mark.parametrize(("columns", "width"), SHAPES)
def test_packed_linear_has_the_bits_of_linear(kernels: Kernels, columns: int, width: int) -> None:
    x, weight, bias = torch.randn(BIG, width), torch.randn(columns, width), torch.randn(columns)
    packed = kernels.pack(weight)
    assert (packed.rows, packed.columns) == (columns, width)
    for count in (1, 2, 5, 16, 65, 200, BIG):
        expected = kernels.linear(x[:count], weight, bias)
        assert torch.equal(kernels.linear_packed(x[:count], packed, bias), expected)


@pytest.mark.parametrize(("hidden", "inner"), [(128, 512), (30, 33), (72, 300)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_the_gated_mlp_has_the_bits_of_its_parts(kernels: Kernels, hidden: int, inner: int, with_bias: bool) -> None:
    x, gate_up, down = torch.randn(BIG, hidden), torch.randn(2 * inner, hidden), torch.randn(hidden, inner)
    gate_up_bias, down_bias = (torch.randn(2 * inner), torch.randn(hidden)) if with_bias else (None, None)
    parts = kernels.linear(kernels.silu_mul(kernels.linear(x, gate_up, gate_up_bias)), down, down_bias)
    packed = kernels.pack(gate_up), kernels.pack(down)

    def whole(rows: Tensor) -> Tensor:
        return kernels.gated_mlp_packed(rows, packed[0], gate_up_bias, packed[1], down_bias)

    assert torch.equal(whole(x), parts)
    assert counts_that_differ(whole, x) == []
    assert whole(x[:0]).shape == (0, hidden)
    parts = kernels.linear(kernels.gelu_mul(kernels.linear(x, gate_up, gate_up_bias)), down, down_bias)
    assert torch.equal(kernels.gated_mlp_packed(x, packed[0], gate_up_bias, packed[1], down_bias, "gelu_pytorch_tanh"), parts)
    parts = kernels.linear(kernels.clamped_swiglu_mul(kernels.linear(x, gate_up, gate_up_bias)), down, down_bias)
    assert torch.equal(kernels.gated_mlp_packed(x, packed[0], gate_up_bias, packed[1], down_bias, "clamped_swiglu"), parts)


@pytest.mark.parametrize(("columns", "width"), SHAPES)
def test_linear_does_not_depend_on_the_order_of_rows_or_where_memory_starts(
    kernels: Kernels, columns: int, width: int
) -> None:
    x, weight = torch.randn(BIG, width), torch.randn(columns, width)
    order = torch.randperm(BIG)
    expected = kernels.linear(x, weight, None)
    assert torch.equal(kernels.linear(x[order], weight, None), expected[order])
    shifted_x = torch.empty(x.numel() + 1)[1:].view_as(x).copy_(x)
    shifted_weight = torch.empty(weight.numel() + 3)[3:].view_as(weight).copy_(weight)
    assert torch.equal(kernels.linear(shifted_x, shifted_weight, None), expected)


@pytest.mark.parametrize(("columns", "width"), SHAPES)
def test_grouped_linear_has_the_bits_of_each_groups_own_linear(kernels: Kernels, columns: int, width: int) -> None:
    bounds = torch.tensor([0, 0, 1, 18, 18, 120, BIG])
    x, weight = torch.randn(BIG, width), torch.randn(len(bounds) - 1, columns, width)
    rows = list(itertools.pairwise(bounds))
    expected = torch.cat([kernels.linear(x[i:j], own, None) for own, (i, j) in zip(weight, rows, strict=True)])
    packed = kernels.pack_groups(weight)
    assert torch.equal(kernels.grouped_linear(x, weight, bounds), expected)
    assert torch.equal(kernels.grouped_linear_packed(x, packed, bounds), expected)
    torch.set_num_threads(2)
    assert torch.equal(kernels.grouped_linear_packed(x, packed, bounds), expected) or kernels.name == "reference"


def test_a_sum_in_another_order_is_caught() -> None:
    weight = torch.randn(96, 256)

    def reordered(x: Tensor) -> Tensor:
        if len(x) < 16:
            return x @ weight.t()
        return x[:, :128] @ weight[:, :128].t() + x[:, 128:] @ weight[:, 128:].t()

    assert counts_that_differ(reordered, torch.randn(BIG, 256)) != []


@pytest.mark.parametrize("width", [16, 30, 99, 128, 1030])
def test_row_kernels_give_a_row_the_same_bits_in_any_batch(kernels: Kernels, width: int) -> None:
    x, weight, targets = torch.randn(BIG, width) * 3, torch.rand(width), torch.arange(BIG) % width
    vocabulary = torch.randn(77, width)
    even = width // 2 * 2
    ops: dict[str, Callable[[Tensor], Tensor]] = {
        "rms_norm": lambda rows: kernels.rms_norm(rows, weight, 1e-6),
        "add_rms_norm": lambda rows: torch.cat(kernels.add_rms_norm(rows, rows.flip(1), weight, 1e-6), 1),
        "norm of centred rows": lambda rows: kernels.rms_norm(rows, weight, 1e-6, True),
        "norm of centred sums": lambda rows: torch.cat(kernels.add_rms_norm(rows, rows.flip(1), weight, 1e-6, True), 1),
        "silu_mul": lambda rows: kernels.silu_mul(rows[:, :even].contiguous()),
        "gelu_mul": lambda rows: kernels.gelu_mul(rows[:, :even].contiguous()),
        "clamped_swiglu_mul": lambda rows: kernels.clamped_swiglu_mul(rows[:, :even].contiguous()),
        "soft_cap": lambda rows: kernels.soft_cap(rows, 2.5),
        "logits_logprobs": lambda rows: kernels.logits_logprobs(rows, targets[: len(rows)] * 0 + 3),
        "token_logprobs": lambda rows: torch.stack(
            kernels.token_logprobs(rows, vocabulary, targets[: len(rows)] * 0 + 5, 0.7)[:3], 1
        ),
        "token_logprobs with a cap": lambda rows: torch.stack(
            kernels.token_logprobs(rows, vocabulary, targets[: len(rows)] * 0 + 5, 0.7, 2.5)[:3], 1
        ),
    }
    for name, op in ops.items():
        assert counts_that_differ(op, x) == [], name


@pytest.mark.parametrize("size", [6, 24, 32, 128])
def test_rope_gives_a_token_the_same_bits_in_any_batch(kernels: Kernels, size: int) -> None:
    table, q_norm, k_norm = torch.randn(40, size), torch.rand(size), torch.rand(size)
    qkv = torch.randn(BIG, (3 + 2) * size)

    def op(rows: Tensor) -> Tensor:
        at = torch.full((len(rows),), 17)
        return torch.cat([x.flatten(1) for x in kernels.rope(rows, at, table, (3, 1, size), q_norm, k_norm, 1e-6)], 1)

    assert counts_that_differ(op, qkv) == []


def test_sampling_gives_a_row_the_same_token_and_bits_in_any_batch(kernels: Kernels) -> None:
    logits, uniform = torch.randn(BIG, 131) * 2, torch.rand(BIG, dtype=torch.float64)
    rows = torch.arange(BIG)
    settings = (0.5 + rows % 3 * 0.5, rows % 4 * 10, 1 - rows % 3 * 0.2, rows % 5 * 0.03)
    whole = kernels.sample_rows(logits, *settings, uniform)
    for start, end in [(0, 1), (5, 12), (64, 128), (100, 333)]:
        part = kernels.sample_rows(logits[start:end], *(s[start:end] for s in settings), uniform[start:end])
        for ours, theirs in zip(part, whole, strict=True):
            assert torch.equal(ours, theirs[start:end])


def test_raw_logprobs_have_the_same_bits_wherever_they_are_taken(kernels: Kernels) -> None:
    hidden, weight = torch.randn(200, 64), torch.randn(99, 64)
    logits = kernels.linear_packed(hidden, kernels.pack(weight), None)
    ones = torch.ones(200)
    drawn = kernels.sample_rows(logits, ones * 0.7, (ones * 5).long(), ones, ones * 0, torch.rand(200).double())
    expected = kernels.logits_logprobs(logits, drawn.tokens)
    assert torch.equal(drawn.raw, expected)
    for temperature in (1.0, 0.7):
        assert torch.equal(kernels.token_logprobs(hidden, weight, drawn.tokens, temperature).raw, expected)


def test_scaled_logprobs_are_those_of_unfiltered_sampling(cpu_kernels: Kernels) -> None:
    hidden, weight, ones = torch.randn(200, 64), torch.randn(99, 64), torch.ones(200)
    logits = cpu_kernels.linear(hidden, weight, None)
    drawn = cpu_kernels.sample_rows(logits, ones * 0.7, ones.long() * 0, ones, ones * 0, torch.rand(200).double())
    assert torch.equal(cpu_kernels.token_logprobs(hidden, weight, drawn.tokens, 0.7).scaled, drawn.sampling)


def everything(kernels: Kernels, x: Tensor) -> list[Tensor]:
    """Returns values and gradients of a pass through every differentiable kernel, large enough for a second thread."""
    generator = torch.Generator().manual_seed(1)
    width, size = x.shape[1], 32

    def leaf(*shape: int) -> Tensor:
        return (torch.randn(*shape, generator=generator) / shape[-1] ** 0.5).requires_grad_()

    x = x.clone().requires_grad_()
    norm, qkv_weight, gate_up_weight, vocabulary = leaf(width), leaf(8 * size, width), leaf(2 * width, width), leaf(101, width)
    bias, q_norm, k_norm, out_weight, table = leaf(8 * size), leaf(size), leaf(size), leaf(width, 4 * size), leaf(512, size)
    bounds = torch.tensor([0, 1, 50, 300, len(x)], dtype=torch.int32)
    positions = torch.cat([torch.arange(int(n)) for n in bounds.diff()])
    qkv = kernels.linear(kernels.rms_norm(x, norm, 1e-6), qkv_weight, bias)
    q, k, v = kernels.rope(qkv, positions, table.detach(), (4, 2, size), q_norm, k_norm, 1e-6)
    mixed = kernels.packed_attention(q, k, v, bounds, 500, size**-0.5, None)
    normed, total = kernels.add_rms_norm(kernels.linear(mixed.flatten(1), out_weight, None), x, norm, 1e-6)
    hidden = total + kernels.silu_mul(kernels.linear(normed, gate_up_weight, None))
    logprobs = kernels.token_logprobs(hidden, vocabulary, torch.arange(len(x)) % 101, 0.9)
    leaves = [x, norm, qkv_weight, bias, q_norm, k_norm, out_weight, gate_up_weight, vocabulary]
    grads = torch.autograd.grad(logprobs.raw.sum() + logprobs.scaled.square().sum(), leaves)
    return [qkv, mixed, hidden, *logprobs[:3], *grads]


def test_values_and_gradients_do_not_depend_on_the_thread_count(cpu_kernels: Kernels) -> None:
    x = torch.randn(700, 128)
    alone = everything(cpu_kernels, x)
    for threads in (2, 3):
        torch.set_num_threads(threads)
        for one, many in zip(alone, everything(cpu_kernels, x), strict=True):
            assert torch.equal(one, many)

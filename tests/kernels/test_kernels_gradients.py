"""Values and gradients of every kernel against its definition in float64, written with torch operations."""

import itertools
import math
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from paged_sequences import exact as attended
from torch import Tensor

from tandem.kernels import Kernels
from tandem.kernels.reference import ReferenceKernels
from tandem.kernels.softmax import softmax

Outputs = Tensor | Sequence[Tensor]


def distance(ours: Tensor, exact: Tensor) -> float:
    return float((ours.double() - exact).norm() / exact.norm().clamp_min(1e-30))


def check(ours: Callable[..., Outputs], exact: Callable[..., Outputs], *inputs: Tensor) -> None:
    """Asserts that forward values, and the gradients of a random weighting of them, agree within 1e-5 of their norm."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    wide = [x.double().requires_grad_() for x in inputs]
    outputs, truths = ours(*leaves), exact(*wide)
    outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    truths = [truths] if isinstance(truths, Tensor) else list(truths)
    for output, truth in zip(outputs, truths, strict=True):
        assert output.shape == truth.shape
        assert distance(output.detach(), truth.detach()) < 1e-5
    weights = [torch.randn_like(x) for x in outputs]
    grads = torch.autograd.grad(outputs, leaves, weights)
    for grad, truth in zip(grads, torch.autograd.grad(truths, wide, [w.double() for w in weights]), strict=True):
        assert grad.shape == truth.shape
        assert distance(grad, truth) < 1e-5


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return weight * x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()


@pytest.mark.parametrize(("rows", "width", "columns"), [(1, 16, 1), (70, 99, 64), (300, 128, 99), (65, 1030, 130)])
def test_linear(kernels: Kernels, rows: int, width: int, columns: int) -> None:
    x, weight, bias = torch.randn(rows, width), torch.randn(columns, width), torch.randn(columns)
    check(kernels.linear, F.linear, x, weight, bias)
    check(lambda x, w: kernels.linear(x, w, None), F.linear, x, weight)


def test_grouped_linear(kernels: Kernels) -> None:
    bounds = torch.tensor([0, 30, 30, 31, 100])
    x, weight = torch.randn(100, 70), torch.randn(4, 33, 70)

    def exact(x: Tensor, weight: Tensor) -> Tensor:
        return torch.cat([x[i:j] @ own.t() for own, (i, j) in zip(weight, itertools.pairwise(bounds.tolist()), strict=True)])

    check(lambda x, w: kernels.grouped_linear(x, w, bounds), exact, x, weight)


@pytest.mark.parametrize("normalised", [False, True])
@pytest.mark.parametrize(("experts", "each"), [(3, 1), (8, 2), (128, 8), (16, 16)])
def test_route(kernels: Kernels, experts: int, each: int, normalised: bool) -> None:
    def exact(logits: Tensor) -> Tensor:
        gates = logits.softmax(-1).topk(each).values
        return gates / gates.sum(-1, keepdim=True) if normalised else gates

    logits = torch.randn(40, experts)
    if each == 1 and normalised:
        # Its only gate is 1 for any logits.
        gates = kernels.route(logits.requires_grad_(), each, True).gates
        assert torch.equal(gates, torch.ones_like(gates))
        assert torch.autograd.grad(gates.sum(), logits)[0].abs().max() < 1e-6
    else:
        check(lambda x: kernels.route(x, each, normalised).gates, exact, logits)
    assert torch.equal(kernels.route(logits.detach(), each, normalised).experts, logits.topk(each).indices)


@pytest.mark.parametrize("experts", [60, 61, 128])
def test_the_gradient_of_the_softmax_has_the_same_bits_for_any_number_of_threads(experts: int) -> None:
    logits, weight = torch.randn(3000, experts), torch.randn(3000, experts)

    def gradient(function: Callable[[Tensor], Tensor], x: Tensor, threads: int) -> Tensor:
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            x = x.clone().requires_grad_()
            return torch.autograd.grad((function(x) * weight.to(x)).sum(), x)[0]
        finally:
            torch.set_num_threads(before)

    alone = gradient(softmax, logits, 1)
    assert all(torch.equal(alone, gradient(softmax, logits, threads)) for threads in (2, 3))
    torch.testing.assert_close(alone.double(), gradient(lambda x: x.softmax(-1), logits.double(), 1), rtol=0, atol=1e-6)


def test_linear_over_several_slabs_of_the_sum(kernels: Kernels) -> None:
    x, weight = torch.randn(3, 8500), torch.randn(9, 8500)
    check(lambda x, w: kernels.linear(x, w, None), F.linear, x, weight)


def test_linear_takes_strided_inputs(kernels: Kernels) -> None:
    x, weight = torch.randn(40, 20).t(), torch.randn(40, 30).t()
    check(lambda x, w: kernels.linear(x, w, None), F.linear, x, weight)


@pytest.mark.parametrize(("rows", "width"), [(1, 16), (70, 99), (300, 128), (130, 1030)])
def test_norms(kernels: Kernels, rows: int, width: int) -> None:
    x, residual, weight = torch.randn(rows, width), torch.randn(rows, width), torch.rand(width)
    check(lambda x, w: kernels.rms_norm(x, w, 1e-6), rms_norm, x, weight)
    check(
        lambda x, r, w: kernels.add_rms_norm(x, r, w, 1e-6), lambda x, r, w: (rms_norm(x + r, w), x + r),
        x, residual, weight,
    )  # fmt: skip


def layer_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], eps=1e-5) * weight.repeat(len(x) // len(weight.view(-1, x.shape[-1])), 1).view(x.shape)


@pytest.mark.parametrize(("rows", "width"), [(1, 16), (70, 99), (300, 128)])
def test_norms_of_centred_rows_are_layer_norm_without_a_bias(kernels: Kernels, rows: int, width: int) -> None:
    x, residual, weight = torch.randn(rows, width) + 3, torch.randn(rows, width), torch.rand(width)
    check(lambda x, w: kernels.rms_norm(x, w, 1e-5, True), layer_norm, x, weight)
    check(
        lambda x, r, w: kernels.add_rms_norm(x, r, w, 1e-5, True), lambda x, r, w: (layer_norm(x + r, w), x + r), x, residual, weight
    )  # fmt: skip


def test_rows_of_norms_take_turns_with_the_weights_of_their_groups(kernels: Kernels) -> None:
    x, weight = torch.randn(3 * 130, 32) + 1, torch.rand(3, 32)
    check(lambda x, w: kernels.rms_norm(x, w, 1e-5, True), layer_norm, x, weight)
    each = [kernels.rms_norm(x[group::3].contiguous(), own, 1e-5) for group, own in enumerate(weight)]
    assert torch.equal(kernels.rms_norm(x, weight, 1e-5), torch.stack(each, 1).view(x.shape))


def test_the_sum_alone_carries_a_gradient(kernels: Kernels) -> None:
    check(
        lambda x, r, w: (kernels.add_rms_norm(x, r, w, 1e-6)[1] + w.sum() * 0,), lambda x, r, w: (x + r + w.sum() * 0,),
        torch.randn(5, 16), torch.randn(5, 16), torch.rand(16),
    )  # fmt: skip


@pytest.mark.parametrize("width", [2, 30, 128, 514])
def test_silu_mul(kernels: Kernels, width: int) -> None:
    def exact(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up

    check(kernels.silu_mul, exact, torch.randn(77, width) * 4)


@pytest.mark.parametrize("width", [2, 30, 514])
def test_gelu_mul(kernels: Kernels, width: int) -> None:
    def exact(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        return F.gelu(gate, approximate="tanh") * up

    check(kernels.gelu_mul, exact, torch.randn(77, width) * 4)


def test_gelu_mul_of_large_inputs_is_finite_and_so_are_its_gradients(kernels: Kernels) -> None:
    gates = torch.tensor([-300.0, -20.0, -10.3, 10.3, 300.0])
    x = torch.stack([gates, torch.ones(5)], 1).requires_grad_()
    out = kernels.gelu_mul(x)
    assert torch.allclose(out[:, 0], F.gelu(gates, approximate="tanh"), atol=1e-30)
    (grad,) = torch.autograd.grad(out.sum(), x)
    assert torch.allclose(grad[:, 0], torch.tensor([0.0, 0, 0, 1, 1]), atol=1e-20)


@pytest.mark.parametrize("width", [2, 30, 514])
def test_clamped_swiglu_mul(kernels: Kernels, width: int) -> None:
    def exact(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
        return gate * torch.sigmoid(1.702 * gate) * (up + 1)

    check(kernels.clamped_swiglu_mul, exact, torch.randn(77, width) * 4)


def test_clamped_swiglu_mul_of_large_inputs_is_finite_and_so_are_its_gradients(kernels: Kernels) -> None:
    gates, ups = torch.tensor([-300.0, -30.0, 6.9, 7.1, 300.0, 1.0, 1.0]), torch.tensor([1.0, 1, 1, 1, 1, -300, 300])
    x = torch.stack([gates, ups], 1).requires_grad_()
    out, one = kernels.clamped_swiglu_mul(x), 1 / (1 + math.exp(-1.702))
    at_most = 7 / (1 + math.exp(-1.702 * 7))
    assert torch.allclose(out[:, 0], torch.tensor([0, 0, 13.8, 2 * at_most, 2 * at_most, -6 * one, 8 * one]), atol=2e-4)
    (grad,) = torch.autograd.grad(out.sum(), x)
    assert grad.isfinite().all()
    assert [g != 0 for g in grad[2:, 0].tolist()] == [True, False, False, True, True]
    assert [g != 0 for g in grad[2:, 1].tolist()] == [True, True, True, False, False]


@pytest.mark.parametrize("width", [3, 99])
def test_soft_cap(kernels: Kernels, width: int) -> None:
    x = torch.randn(50, width) * torch.logspace(-4, 4, 50).unsqueeze(1)
    check(lambda x: kernels.soft_cap(x, 2.5), lambda x: 2.5 * torch.tanh(x / 2.5), x)
    small = torch.linspace(-1e-3, 1e-3, 99).view(3, 33)
    assert ((kernels.soft_cap(small, 30.0) - small).abs() <= 1e-6 * small.abs()).all()
    ends = kernels.soft_cap(torch.tensor([[torch.inf, -torch.inf, torch.nan, 1e30]]), 30.0)
    assert ends[0, :2].tolist() == [30.0, -30.0] and ends[0, 2].isnan() and ends[0, 3] == 30.0


def test_silu_mul_of_large_inputs_is_finite_and_so_are_its_gradients(kernels: Kernels) -> None:
    gates = torch.tensor([-300.0, -89.0, -88.5, -87.5, -40.0, 87.5, 300.0])
    x = torch.stack([gates, torch.full_like(gates, -2)], 1).requires_grad_()
    wide = x.detach().double().requires_grad_()
    out, exact = kernels.silu_mul(x), F.silu(wide[:, :1]) * wide[:, 1:]
    assert torch.allclose(out.double(), exact, atol=1e-30)
    (grad,), (expected,) = torch.autograd.grad(out.sum(), x), torch.autograd.grad(exact.sum(), wide)
    assert torch.allclose(grad.double(), expected, rtol=1e-5, atol=1e-15)


def test_silu_mul_of_plain_torch_has_the_bits_of_its_formula() -> None:
    for dtype, limit in ((torch.float32, 89.0), (torch.float64, 710.0)):
        gate = torch.cat((torch.linspace(-limit, -limit + 2, 500, dtype=dtype), torch.tensor([-torch.inf, torch.inf, torch.nan, 0.0], dtype=dtype)))
        out = ReferenceKernels().silu_mul(torch.stack((gate, torch.ones_like(gate)), 1))[:, 0]
        assert torch.equal(out.nan_to_num(3.0), (gate / (1 + torch.exp(-gate))).nan_to_num(3.0))


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize(("size", "heads", "kv_heads"), [(32, 4, 2), (24, 3, 1), (6, 2, 2), (128, 2, 1)])
def test_rope(kernels: Kernels, size: int, heads: int, kv_heads: int, normed: bool) -> None:
    tokens = 130
    positions = torch.randint(0, 50, (tokens,))
    angles = torch.rand(50, size // 2) * 6
    table = torch.cat([angles.cos(), angles.sin()], 1)

    def exact(qkv: Tensor, *norms: Tensor) -> list[Tensor]:
        q, k, v = qkv.view(tokens, -1, size).split([heads, kv_heads, kv_heads], 1)
        if norms:
            q, k = rms_norm(q, norms[0]), rms_norm(k, norms[1])
        cos = torch.cat([table[positions, : size // 2]] * 2, -1).double().unsqueeze(1)
        sin = torch.cat([table[positions, size // 2 :]] * 2, -1).double().unsqueeze(1)
        turn = [torch.cat([-x[..., size // 2 :], x[..., : size // 2]], -1) for x in (q, k)]
        return [q * cos + turn[0] * sin, k * cos + turn[1] * sin, v]

    def ours(qkv: Tensor, *norms: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q_norm, k_norm = norms or (None, None)
        return kernels.rope(qkv, positions, table, (heads, kv_heads, size), q_norm, k_norm, 1e-6)

    norms = [torch.rand(size) + 0.5, torch.rand(size) + 0.5] if normed else []
    check(ours, exact, torch.randn(tokens, (heads + 2 * kv_heads) * size), *norms)


@pytest.mark.parametrize(("window", "cap"), [(None, None), (9, None), (9, 1.5)])
@pytest.mark.parametrize(("size", "heads", "kv_heads"), [(32, 4, 2), (24, 3, 1), (80, 2, 2), (6, 7, 1)])
def test_packed_attention(kernels: Kernels, size: int, heads: int, kv_heads: int, window: int | None, cap: float | None) -> None:
    bounds = [0, 1, 40, 40, 104, 170]

    def exact(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = []
        for start, end in itertools.pairwise(bounds):
            length = end - start
            seen = torch.ones(length, length, dtype=torch.bool).tril()
            if window:
                seen &= ~torch.ones(length, length, dtype=torch.bool).tril(-window)
            keys, values = (x[start:end].repeat_interleave(heads // kv_heads, 1).transpose(0, 1) for x in (k, v))
            scores = q[start:end].transpose(0, 1) @ keys.transpose(1, 2) * 0.3
            scores = scores if cap is None else cap * torch.tanh(scores / cap)
            parts.append((scores.masked_fill(~seen, -torch.inf).softmax(-1) @ values).transpose(0, 1))
        return torch.cat(parts)

    tokens, cu_seqlens = bounds[-1], torch.tensor(bounds, dtype=torch.int32)
    check(
        lambda q, k, v: kernels.packed_attention(q, k, v, cu_seqlens, 66, 0.3, window, cap=cap), exact,
        torch.randn(tokens, heads, size), torch.randn(tokens, kv_heads, size), torch.randn(tokens, kv_heads, size),
    )  # fmt: skip


@pytest.mark.parametrize(("size", "heads", "kv_heads", "window", "cap"), [(32, 4, 2, None, None), (24, 3, 1, 9, None), (6, 7, 1, 9, 1.5)])
def test_packed_attention_with_sinks(kernels: Kernels, size: int, heads: int, kv_heads: int, window: int | None, cap: float | None) -> None:
    cu_seqlens = torch.tensor([0, 1, 40, 40, 104, 170], dtype=torch.int32)
    check(
        lambda q, k, v, sinks: kernels.packed_attention(q, k, v, cu_seqlens, 66, 0.3, window, cap=cap, sinks=sinks),
        lambda q, k, v, sinks: attended(q, k, v, cu_seqlens, 0.3, window, cap, sinks),
        torch.randn(170, heads, size), torch.randn(170, kv_heads, size), torch.randn(170, kv_heads, size), torch.randn(heads) * 2,
    )  # fmt: skip


@pytest.mark.parametrize(("window", "cap"), [(None, None), (600, None), (600, 2.0)])
def test_attention_gradients_over_several_spans(cpu_kernels: Kernels, window: int | None, cap: float | None) -> None:
    tokens, cu_seqlens = 1100, torch.tensor([0, 1100], dtype=torch.int32)  # three spans, each with its own task
    seen = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    if window:
        seen &= ~torch.ones(tokens, tokens, dtype=torch.bool).tril(-window)

    def exact(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q[:, 0] @ k[:, 0].t() * 0.5
        scores = (scores if cap is None else cap * torch.tanh(scores / cap)).masked_fill(~seen, -torch.inf)
        return (scores.softmax(-1) @ v[:, 0]).unsqueeze(1)

    inputs = [torch.randn(tokens, 1, 16) for _ in range(3)]
    check(lambda q, k, v: cpu_kernels.packed_attention(q, k, v, cu_seqlens, tokens, 0.5, window, cap=cap), exact, *inputs)


def test_attention_gradients_do_not_depend_on_the_thread_count_or_on_neighbours(cpu_kernels: Kernels) -> None:
    lengths, window = [2100, 70, 600], 900
    bounds = torch.tensor([0, 2100, 2170, 2770], dtype=torch.int32)
    heads = [torch.randn(sum(lengths), count, 16, requires_grad=True) for count in (4, 2, 2)]
    sinks = torch.randn(4, requires_grad=True)
    grad = torch.randn(sum(lengths), 4, 16)

    def gradients(inputs: list[Tensor], cu_seqlens: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
        out = cpu_kernels.packed_attention(*inputs, cu_seqlens, 2100, 0.25, window, sinks=sinks)
        return torch.autograd.grad(out, [*inputs, sinks], grad)

    found = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        found.append(gradients(heads, bounds, grad))
    assert all(torch.equal(one, two) for one, two in zip(*found, strict=True))
    alone = gradients([x[:2100].detach().requires_grad_() for x in heads], torch.tensor([0, 2100], dtype=torch.int32), grad[:2100])
    assert all(torch.equal(one, both[:2100]) for one, both in zip(alone[:3], found[0][:3], strict=True))


@pytest.mark.parametrize(("temperature", "cap"), [(1.0, None), (0.7, None), (1.0, 2.0), (0.7, 2.0)])
@pytest.mark.parametrize(("rows", "vocabulary"), [(1, 5), (70, 99), (200, 9000)])
def test_token_logprobs(kernels: Kernels, rows: int, vocabulary: int, temperature: float, cap: float | None) -> None:
    targets = torch.randint(0, vocabulary, (rows,))

    def exact(hidden: Tensor, weight: Tensor) -> list[Tensor]:
        logits = hidden @ weight.t()
        logits = logits if cap is None else cap * torch.tanh(logits / cap)
        return [x.log_softmax(-1).gather(1, targets.unsqueeze(1)).squeeze(1) for x in (logits, logits / temperature)]

    hidden, weight = torch.randn(rows, 48), torch.randn(vocabulary, 48) / 4
    check(lambda h, w: kernels.token_logprobs(h, w, targets, temperature, cap)[:2], exact, hidden, weight)
    ours = kernels.token_logprobs(hidden, weight, targets, temperature, cap)
    assert (ours.scaled is ours.raw) == (temperature == 1)
    assert not ours.entropy.requires_grad
    logits = hidden.double() @ weight.double().t()
    scaled = ((logits if cap is None else cap * torch.tanh(logits / cap)) / temperature).log_softmax(-1)
    assert distance(ours.entropy, -(scaled.exp() * scaled).sum(-1)) < 1e-5


def test_the_path_of_truth_passes_gradcheck() -> None:
    kernels, bounds = ReferenceKernels(), torch.tensor([0, 3, 8], dtype=torch.int32)
    targets = torch.randint(0, 5, (8,))

    def network(qkv: Tensor, norm: Tensor, weight: Tensor) -> Tensor:
        table = torch.linspace(-1, 1, 32).view(8, 4)
        q, k, v = kernels.rope(qkv, torch.arange(8), table, (2, 1, 4), norm, norm, 1e-6)
        mixed = kernels.gelu_mul(kernels.packed_attention(q, k, v, bounds, 5, 0.5, 3, cap=1.5, sinks=norm[:2]).flatten(1).repeat(1, 2))
        mixed = mixed + kernels.clamped_swiglu_mul(mixed.repeat(1, 2) * 9)
        normed, total = kernels.add_rms_norm(mixed, kernels.linear(mixed, weight, None), norm.repeat(2), 1e-6)
        logprobs = kernels.token_logprobs(normed + total, weight[:5], targets, 0.8, 3.0)
        return logprobs.raw + 2 * logprobs.scaled

    inputs = [torch.randn(8, 16), torch.rand(4) + 0.5, torch.randn(8, 8)]
    assert torch.autograd.gradcheck(network, [x.double().requires_grad_() for x in inputs])


def test_nothing_tracks_a_gradient_that_nobody_wants(kernels: Kernels) -> None:
    x, weight = torch.randn(4, 16, requires_grad=True), torch.rand(16, requires_grad=True)
    with torch.no_grad():
        assert kernels.rms_norm(x, weight, 1e-6).grad_fn is None
        assert kernels.linear(x, torch.randn(8, 16), None).grad_fn is None


def test_a_nan_is_never_hidden(kernels: Kernels) -> None:
    x = torch.randn(3, 32)
    x[1, 20] = torch.nan
    bounds = torch.tensor([0, 1, 3], dtype=torch.int32)
    heads = x.view(3, 2, 16)
    for out in (
        kernels.rms_norm(x, torch.ones(32), 1e-6),
        kernels.silu_mul(x),
        kernels.gelu_mul(x),
        kernels.clamped_swiglu_mul(x),
        kernels.soft_cap(x, 2.0),
        kernels.logits_logprobs(x, torch.zeros(3).long()).unsqueeze(1),
        kernels.packed_attention(heads, heads, heads, bounds, 2, 1.0, None).flatten(1),
        kernels.packed_attention(heads, heads, heads, bounds, 2, 1.0, None, sinks=torch.ones(heads.shape[1])).flatten(1),
    ):
        assert not out[0].isnan().any()
        assert out[1].isnan().any()

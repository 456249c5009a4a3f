"""Products in bf16: the sum of the dot-product instruction, against exact fractions, in the bits of plain torch, in any batch and on any instruction set."""

import itertools
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tandem.kernels import Kernels, select
from tandem.kernels.cpu import build
from tandem.kernels.cpu.kernels import CpuKernels
from tandem.kernels.cpu.library import Library
from tandem.kernels.reference import ReferenceKernels
from tandem.kernels.reference_bf16 import flushed, round_bf16

SHAPES = [(1, 320, 128), (37, 24, 301), (5, 99, 777), (13, 33, 513)]


def cpu(rounds: bool = False) -> CpuKernels:
    kernels = select("cpu")
    assert isinstance(kernels, CpuKernels)
    return kernels.bf16_products(rounds)


def reference(rounds: bool = False) -> ReferenceKernels:
    return ReferenceKernels().bf16_products(rounds)


def spread(rows: int, columns: int, lowest: int, highest: int) -> Tensor:
    """Returns numbers whose exponents are spread evenly, half of them negative."""
    exponents = torch.randint(lowest, highest + 1, (rows, columns)).double()
    return ((1 + torch.rand(rows, columns).double()) * torch.exp2(exponents) * torch.where(torch.rand(rows, columns) < 0.5, 1, -1)).float()


def rounded_once(exact: Fraction) -> Fraction:
    """Returns the nearest fp32 number, ties to even; 0 where the result is denormal after rounding with an unbounded exponent."""
    if exact == 0:
        return exact
    size, exponent = abs(exact), 0
    while size >= 2:
        size, exponent = size / 2, exponent + 1
    while size < 1:
        size, exponent = size * 2, exponent - 1
    # Python rounds fractions to the nearest whole number, ties to even.
    size = Fraction(round(size * 2**23), 2**23) * Fraction(2) ** exponent
    return Fraction(0) if size < Fraction(2) ** -126 else size if exact > 0 else -size


def chain_of_fractions(x: Tensor, weight: Tensor) -> float:
    """Returns the chain of at most 128 pairs by exact arithmetic."""
    a, b = ([Fraction(float(number)) for number in round_bf16(row)] for row in (x, weight))
    total = Fraction(0)
    for pair in range(0, len(a), 2):
        for k in (pair + 1, pair):
            total = rounded_once(total + a[k] * b[k])
    return float(total)


@pytest.mark.parametrize(("lowest", "highest"), [(-3, 3), (-66, -60), (-75, -50), (-126, 20)])
def test_a_chain_rounds_once_for_each_number_with_the_odd_one_of_a_pair_first(lowest: int, highest: int) -> None:
    x, weight = spread(4, 24, lowest, highest), spread(16, 24, lowest, highest)
    exact = torch.tensor([[chain_of_fractions(row, own) for own in weight] for row in x])
    assert torch.equal(reference().linear(x, weight, None), exact)
    assert torch.equal(cpu().linear(x, weight, None), exact)
    backwards = torch.arange(24).view(-1, 2).flip(1).flatten()
    assert not torch.equal(cpu().linear(x[:, backwards], weight[:, backwards], None), exact) or lowest < -100, "the order is seen"


def test_denormal_numbers_are_zeros_as_the_manuals_say() -> None:
    # The chain holds 2^-126 and loses 2^-150, 2^-151 or 2^-149: what is left is denormal after rounding with an unbounded exponent, or is not.
    smallest = torch.finfo(torch.float32).tiny
    x = torch.tensor([[2.0**-63, 0.0, -(2.0**-75), 0.0]])
    weight = torch.tensor([[2.0**-63, 0.0, second, 0.0] for second in (2.0**-75, 2.0**-76, 2.0**-74)]).repeat_interleave(8, 0)
    expected = torch.tensor([[0.0, smallest, 0.0]]).repeat_interleave(8, 1)
    for kernels in (cpu(), reference()):
        assert torch.equal(kernels.linear(x, weight, None), expected)
        # A denormal operand is 0, in its own position and rounded from fp32.
        assert not kernels.linear(torch.full((1, 2), 2.0**-127), torch.full((1, 2), 2.0**100), None).any()
    assert float(flushed(torch.tensor(-(2.0**-127))).copysign(torch.tensor(1.0))) == 0.0


def test_overflow_and_values_that_are_not_finite_are_those_of_fp32() -> None:
    x, weight = spread(20, 300, -120, 126), spread(40, 300, -120, 126)
    weight[3, 7], x[2, 5] = torch.nan, torch.inf
    ours, theirs = cpu().linear(x, weight, None), reference().linear(x, weight, None)
    assert bool(ours.isinf().any()) and bool(ours[:, 3].isnan().all())
    assert torch.equal(ours.isnan(), theirs.isnan()) and torch.equal(ours.nan_to_num(1.0), theirs.nan_to_num(1.0))


@pytest.mark.parametrize("rounds", [False, True])
@pytest.mark.parametrize(("rows", "columns", "width"), SHAPES)
def test_products_and_their_gradients_have_the_bits_of_the_reference(rows: int, columns: int, width: int, rounds: bool) -> None:
    leaves = [torch.randn(shape).requires_grad_() for shape in ((rows, width), (columns, width), (columns,))]
    grad = torch.randn(rows, columns)
    ours, theirs = (kernels(rounds).linear(*leaves) for kernels in (cpu, reference))
    assert torch.equal(ours, theirs) and torch.equal(ours, round_bf16(ours)) == rounds
    for own, other in zip(torch.autograd.grad(ours, leaves[:2], grad), torch.autograd.grad(theirs, leaves[:2], grad), strict=True):
        assert torch.equal(own, other)
    a, b, g = (round_bf16(tensor.detach()).double() for tensor in (leaves[0], leaves[1], grad))
    exact = a @ b.t() + leaves[2].detach().double()
    assert (ours.double() - exact).abs().max() <= (2**-8 if rounds else 2**-20) * exact.abs().max()
    by_x, by_weight = torch.autograd.grad(cpu(rounds).linear(*leaves), leaves[:2], grad)
    assert (by_x.double() - g @ b).abs().max() <= (2**-8 if rounds else 2**-20) * (g @ b).abs().max()
    assert (by_weight.double() - g.t() @ a).abs().max() <= 2**-20 * (g.t() @ a).abs().max()


@pytest.mark.parametrize(("columns", "width"), [(320, 128), (99, 777), (33, 30), (1, 64)])
def test_a_row_has_the_same_bits_in_any_batch_packed_and_plain(columns: int, width: int) -> None:
    x, weight, bias, kernels = torch.randn(300, width), torch.randn(columns, width), torch.randn(columns), cpu(True)
    whole, packed = kernels.linear(x, weight, bias), kernels.pack(weight)
    assert packed.data.dtype == torch.bfloat16
    for start, count in ((0, 1), (17, 1), (3, 2), (9, 7), (100, 64), (40, 193)):
        rows = x[start : start + count].clone()
        assert torch.equal(kernels.linear(rows, weight, bias), whole[start : start + count])
        assert torch.equal(kernels.linear_packed(rows, packed, bias), whole[start : start + count])
    assert torch.equal(kernels.packed_rows(torch.tensor([0, columns - 1]), packed), round_bf16(weight[[0, columns - 1]]))
    with pytest.raises(IndexError):
        kernels.packed_rows(torch.tensor([columns]), packed)
    weight[columns - 1, width - 1], weight[0, 0] = 3.0, -5.0
    places = torch.tensor([columns - 1, 0]), torch.tensor([width - 1, 0])
    assert kernels.pack_elements(packed, *places, weight[places])
    assert torch.equal(packed.data, kernels.pack(weight).data)


@pytest.mark.parametrize("threads", [1, 3])
def test_groups_and_the_gated_mlp_have_the_bits_of_their_parts(threads: int) -> None:
    torch.set_num_threads(threads)
    bounds = torch.tensor([0, 0, 1, 18, 18, 120, 200])
    x, weight, kernels = torch.randn(200, 301), torch.randn(6, 99, 301), cpu(True)
    grouped = kernels.grouped_linear(x, weight, bounds)
    for group, (first, last) in enumerate(itertools.pairwise(bounds)):
        assert torch.equal(grouped[first:last], kernels.linear(x[first:last], weight[group], None))
    assert torch.equal(kernels.grouped_linear_packed(x, kernels.pack_groups(weight), bounds), grouped)
    gate_up, bias, down = torch.randn(2 * 77, 301), torch.randn(2 * 77), torch.randn(301, 77)
    parts = kernels.linear(kernels.silu_mul(kernels.linear(x, gate_up, bias)), down, None)
    assert torch.equal(kernels.gated_mlp_packed(x, kernels.pack(gate_up), bias, kernels.pack(down), None), parts)
    torch.set_num_threads(1)
    assert torch.equal(kernels.linear(x, weight[0], None)[120:], kernels.grouped_linear(x, weight[:1], torch.tensor([0, 200]))[120:])
    assert torch.equal(kernels.grouped_linear(x, weight, bounds), grouped)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_heads_gradients_are_products_of_the_law(temperature: float) -> None:
    hidden, weight, targets = torch.randn(9, 40).requires_grad_(), torch.randn(50, 40).requires_grad_(), torch.arange(9) * 5

    def results(kernels: Kernels) -> list[Tensor]:
        out = kernels.token_logprobs(hidden, weight, targets, temperature)
        return [out.raw, out.scaled, out.entropy, *torch.autograd.grad((out.raw + 2 * out.scaled).sum(), (hidden, weight))]

    for ours, theirs in zip(results(cpu()), results(reference()), strict=True):
        # Softmax is that of each kernel set; a gradient's last bit may round to another bf16 number.
        assert torch.allclose(ours, theirs, rtol=2**-7, atol=2**-8)


@pytest.mark.full
@pytest.mark.parametrize("target", ["-march=native -mno-avx512bf16", "-march=haswell", "-march=x86-64-v2 -mtune=generic"])
def test_processors_without_the_instruction_compute_the_same_bits(target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = [flag for flag in build.FLAGS if flag != "-march=native"] + target.split()
    monkeypatch.setattr(build, "FLAGS", tuple(flags))
    other = CpuKernels(Library(build.built_library("g++", tmp_path)))
    assert not other.bf16_products(True).has_instruction
    scales = [(-3, 3), (-70, -56), (-126, 126)]
    # Fused multiply-adds are a function of the C library on the oldest of these.
    cases = [(spread(7, 301, *scale), spread(20, 301, *scale)) for scale in scales]
    edge = torch.tensor([[2.0**-63, 0.0, -(2.0**-75), 0.0]]), torch.tensor([[2.0**-63, 0.0, 2.0**-75, 0.0]]).repeat(20, 1)

    def results(kernels: CpuKernels, rounds: bool) -> list[Tensor]:
        products = kernels.bf16_products(rounds)
        out = []
        for x, weight in (*cases, edge):
            leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
            result = products.linear(*leaves, None)
            packed = products.pack(weight.repeat(5, 1))
            wide = products.linear_packed(x[:1], packed, None)
            out += [result.detach(), packed.data.view(torch.int16), wide, *torch.autograd.grad(result, leaves, torch.ones_like(result))]
        return out

    here = select("cpu")
    assert isinstance(here, CpuKernels)
    for rounds in (False, True):
        for ours, theirs in zip(results(here, rounds), results(other, rounds), strict=True):
            assert torch.equal(ours.isnan(), theirs.isnan())
            assert torch.equal(ours.nan_to_num(1.0), theirs.nan_to_num(1.0))

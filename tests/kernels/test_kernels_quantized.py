"""Quantized products: exact in integers, otherwise those of the decoded weight, and batch-invariant."""

import mmap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tandem.kernels import Kernels, QuantizedWeight, select
from tandem.kernels.cpu import build
from tandem.kernels.cpu.kernels import CpuKernels
from tandem.kernels.cpu.large_pages import PAGE_BYTES
from tandem.kernels.cpu.library import Library
from tandem.kernels.quantized import NORMAL_FLOATS, CodeKind, PackedParts, plain_weight, round_rows

SHAPES = [(512, 128), (99, 128), (128, 513), (33, 30), (1, 64), (80, 1100)]
COUNTS = [1, 2, 3, 5, 6, 7, 13, 16, 63, 64, 65, 96, 97, 193, 300]
KINDS = ["int8", "fp8", "fp8 by blocks", "int4", "int4 in order of importance", "w4a8 in order", "int8 weight only", "nf4", "bfloat16", "float16"]
BIG = 333


def weight_of(kind: str, rows: int, columns: int) -> QuantizedWeight:
    plain = torch.randn(rows, columns)
    if kind in ("bfloat16", "float16"):
        name: CodeKind = "bfloat16" if kind == "bfloat16" else "float16"
        return QuantizedWeight(name, plain.to(torch.bfloat16 if kind == "bfloat16" else torch.float16), None, None, columns)
    group = 32 if kind.startswith(("int4", "w4a8", "nf4")) or "blocks" in kind or "only" in kind else columns
    groups = -(-columns // group)
    scales = torch.rand(rows, groups) / 50 + 1e-3
    if kind.startswith(("int4", "w4a8")):
        codes, zeros = torch.randint(0, 16, (rows, columns), dtype=torch.uint8), torch.randint(0, 17, (rows, groups)).float()
        order = torch.randperm(columns) if "order" in kind else None
        return QuantizedWeight("int4", codes, scales, zeros, group, order, "int8" if kind.startswith("w4a8") else "plain")
    if kind == "nf4":
        return QuantizedWeight("nf4", torch.randint(0, 16, (rows, columns), dtype=torch.uint8), scales, None, group)
    if kind.startswith("fp8"):
        codes = (plain * 60).to(torch.float8_e4m3fn)
        return QuantizedWeight("float8_e4m3", codes, scales, None, group, None, "float8_e4m3", 32 if "blocks" in kind else 0)
    codes = torch.randint(-127, 128, (rows, columns), dtype=torch.int8)
    return QuantizedWeight("int8", codes, scales, None, group, None, "plain" if "only" in kind else "int8")


def finite(codes: Tensor, dtype: torch.dtype) -> Tensor:
    return codes.view(dtype).float().nan_to_num(0.0, 0.0, 0.0).to(dtype)


def product(kernels: Kernels, x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> Tensor:
    return kernels.linear_packed(x, kernels.pack_quantized(weight), bias)


@pytest.mark.parametrize(("columns", "width"), SHAPES)
def test_an_int8_product_is_the_exact_integer_sum_scaled(kernels: Kernels, columns: int, width: int) -> None:
    x, weight, bias = torch.randn(40, width), weight_of("int8", columns, width), torch.randn(columns)
    scale = x.abs().amax(1) / 127
    codes = [[round(float(value)) for value in row] for row in x / scale[:, None]]
    assert weight.scales is not None
    for row in (0, 7, 39):
        for column in {0, columns // 2, columns - 1}:
            exact = sum(a * int(b) for a, b in zip(codes[row], weight.codes[column], strict=True))
            expected = torch.tensor(float(exact)) * (scale[row] * weight.scales[column, 0]) + bias[column]
            assert product(kernels, x, weight, bias)[row, column] == expected


@pytest.mark.parametrize("kind", ["w4a8", "w4a8 in order"])
@pytest.mark.parametrize(("columns", "width"), SHAPES)
def test_a_w4a8_product_is_the_sum_of_the_exact_integer_sums_of_its_groups(kernels: Kernels, kind: str, columns: int, width: int) -> None:
    x, weight, bias = torch.randn(40, width), weight_of(kind, columns, width), torch.randn(columns)
    rounded, scales = round_rows(x if weight.order is None else x[:, weight.order], "int8")
    inputs, codes = rounded.int().tolist(), weight.codes.tolist()
    assert weight.scales is not None and weight.zeros is not None and kernels.pack_quantized(weight).is_integer_product
    got = product(kernels, x, weight, bias)
    for row in (0, 39):
        for column in {0, columns // 2, columns - 1}:
            total = torch.tensor(0.0)
            for group, first in enumerate(range(0, width, 32)):
                zero, end = int(weight.zeros[column, group]), min(width, first + 32)
                exact = sum(inputs[row][k] * (codes[column][k] - zero) for k in range(first, end))
                total = total + torch.tensor(float(exact)) * weight.scales[column, group]
            assert got[row, column] == total * scales[row, 0] + bias[column]


@pytest.mark.parametrize("kind", ["int4", "int4 in order of importance", "int8 weight only", "nf4", "bfloat16", "float16"])
@pytest.mark.parametrize(("columns", "width"), SHAPES)
def test_a_weight_only_product_is_that_of_the_decoded_weight(kernels: Kernels, kind: str, columns: int, width: int) -> None:
    weight, x, bias = weight_of(kind, columns, width), torch.randn(70, width), torch.randn(columns)
    truth = x.double() @ plain_weight(weight).double().t() + bias.double()
    got = product(kernels, x, weight, bias)
    torch.testing.assert_close(got.double(), truth, rtol=1e-4, atol=1e-4)
    if weight.order is None:
        assert torch.equal(got, kernels.linear(x, plain_weight(weight), bias))
    assert torch.equal(kernels.unpack_quantized(kernels.pack_quantized(weight)), plain_weight(weight))


@pytest.mark.parametrize(
    ("scale", "zeros"), [(2.0**-110, "whole"), (2.0**-146, "whole"), (2.0**90, "whole"), (0.01, "large"), (0.01, "fractional"), (-0.01, "none")]
)
def test_an_int4_product_has_the_bits_of_the_decoded_weight_whatever_its_scales_and_zeros(kernels: Kernels, scale: float, zeros: str) -> None:
    rows, columns, groups = 99, 600, 19
    scales, codes = (1 + torch.rand(rows, groups)) * scale, torch.randint(0, 16, (rows, columns), dtype=torch.uint8)
    whole = torch.randint(0, 17, (rows, groups)).float()
    of_name = {"whole": whole, "large": whole * 50 - 300, "fractional": whole + 0.375, "none": None}
    # Half of the channels have such scales in their first group alone.
    scales[: rows // 2, 1:] = (1 + torch.rand(rows // 2, groups - 1)) / 50
    weight = QuantizedWeight("int4", codes, scales, of_name[zeros], 32)
    x = torch.randn(9, columns) / (1e-20 if scale < 1e-20 else 1.0)
    plain, packed = plain_weight(weight), kernels.pack_quantized(weight)
    for count in range(1, len(x) + 1):
        got = kernels.linear_packed(x[:count], packed, None)
        assert torch.equal(got, kernels.linear(x[:count], plain, None)) and bool((got != 0).all())


def test_the_numbers_of_nf4_are_the_quantiles_of_the_published_construction() -> None:
    """QLoRA (Dettmers et al., 2023), section 3 and ``create_normal_map``: quantiles of N(0, 1), eight above 0 and seven below, scaled to [-1, 1]."""
    above = torch.special.ndtri(torch.linspace(0.9677083, 0.5, 9, dtype=torch.float64)[:-1])
    below = -torch.special.ndtri(torch.linspace(0.9677083, 0.5, 8, dtype=torch.float64)[:-1])
    numbers = torch.cat([above, below, torch.zeros(1)]).sort().values
    torch.testing.assert_close(torch.tensor(NORMAL_FLOATS, dtype=torch.float64), numbers / numbers.max(), rtol=0, atol=2e-7)


@pytest.mark.parametrize("kind", ["fp8", "fp8 by blocks"])
def test_an_fp8_product_is_that_of_the_rounded_numbers(kernels: Kernels, kind: str) -> None:
    weight, x = weight_of(kind, 99, 128), torch.randn(70, 128) * torch.logspace(-6, 3, 70).unsqueeze(1)
    runs = x.view(70, -1, weight.input_group or 128)
    scales = runs.abs().amax(-1, keepdim=True) / 448
    rounded = ((runs / scales).clamp(-448, 448).to(torch.float8_e4m3fn).double() * scales.double()).view(70, 128)
    truth = rounded @ plain_weight(weight).double().t()
    error = (product(kernels, x, weight).double() - truth).norm(dim=1) / truth.norm(dim=1)
    assert error.max() < 1e-6


def test_the_cpu_kernels_round_to_fp8_as_torch_does(cpu_kernels: Kernels) -> None:
    """Every e4m3 value, every midpoint between two values, and its neighbours, with an identity weight."""
    values = torch.arange(128, dtype=torch.uint8).view(torch.float8_e4m3fn).float()[:127]
    middles = (values[1:] + values[:-1]) / 2
    x = torch.cat([values, middles, middles.nextafter(torch.tensor(1e9)), middles.nextafter(torch.tensor(0.0))])
    x = torch.cat([x, -x]).unsqueeze(0)
    eye = torch.eye(x.shape[1]).to(torch.float8_e4m3fn)
    weight = QuantizedWeight("float8_e4m3", eye, torch.ones(len(eye), 1), None, len(eye), None, "float8_e4m3")
    assert torch.equal(product(cpu_kernels, x, weight), x.to(torch.float8_e4m3fn).float())


def test_every_code_is_decoded_as_torch_does(cpu_kernels: Kernels) -> None:
    byte = torch.arange(256, dtype=torch.uint8).repeat(3, 1)
    halves = torch.arange(-32768, 32768, dtype=torch.int16).view(64, 1024)
    weights = [
        QuantizedWeight("float8_e4m3", finite(byte, torch.float8_e4m3fn), torch.ones(3, 1), None, 256),
        QuantizedWeight("int8", byte.view(torch.int8), torch.ones(3, 1), None, 256),
        QuantizedWeight("nf4", byte % 16, torch.ones(3, 4), None, 64),
        QuantizedWeight("bfloat16", finite(halves, torch.bfloat16), None, None, 1024),
        QuantizedWeight("float16", finite(halves, torch.float16), None, None, 1024),
    ]
    for weight in weights:
        got = product(cpu_kernels, torch.eye(weight.columns), weight)
        numbers = torch.tensor(NORMAL_FLOATS)[weight.codes.long()] if weight.kind == "nf4" else weight.codes.float()
        assert torch.equal(got, numbers.t()), weight.kind


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("columns", "width"), SHAPES)
def test_a_row_has_the_same_bits_in_any_batch(kernels: Kernels, kind: str, columns: int, width: int) -> None:
    x, bias = torch.randn(BIG, width), torch.randn(columns)
    packed = kernels.pack_quantized(weight_of(kind, columns, width))
    whole = kernels.linear_packed(x, packed, bias)
    for count in COUNTS:
        start = count * 7 % (BIG - count)
        part = kernels.linear_packed(x[start : start + count].clone(), packed, bias)
        assert torch.equal(part, whole[start : start + count]), count


@pytest.mark.parametrize("kind", KINDS)
def test_threads_change_no_bit(cpu_kernels: Kernels, kind: str) -> None:
    x, packed = torch.randn(300, 520), cpu_kernels.pack_quantized(weight_of(kind, 700, 520))
    alone = cpu_kernels.linear_packed(x, packed, None)
    torch.set_num_threads(2)
    assert torch.equal(cpu_kernels.linear_packed(x, packed, None), alone)


@pytest.mark.parametrize("kind", ["int8", "w4a8", "w4a8 in order"])
def test_integer_products_have_the_same_bits_with_and_without_a_compiler(kind: str) -> None:
    weight, x = weight_of(kind, 300, 514), torch.randn(77, 514) * torch.logspace(-30, 20, 77).unsqueeze(1)
    x[5] = 0.0
    x[6, :3] = torch.tensor([1e-42, -3e-44, 0.0])
    assert torch.equal(product(select("cpu"), x, weight), product(select("reference"), x, weight))


def test_a_weight_of_some_large_pages_begins_with_one_and_is_multiplied_as_others_are(cpu_kernels: Kernels) -> None:
    weight, x = weight_of("int8", 2112, 2048), torch.randn(2, 2048)
    packed = cpu_kernels.pack_quantized(weight)
    assert packed.data.data_ptr() % PAGE_BYTES == 0 or not hasattr(mmap, "MADV_HUGEPAGE")
    assert torch.equal(cpu_kernels.linear_packed(x, packed, None), product(select("reference"), x, weight))


def test_weights_side_by_side_are_one_part_of_memory_and_are_multiplied_as_others_are(cpu_kernels: Kernels) -> None:
    kinds, x = ("int8", "w4a8", "int4 in order of importance"), torch.randn(2, 2048)
    weights = [weight_of(kind, 1500, 2048) for kind in kinds]
    plain = cpu_kernels.pack(torch.randn(33, 2048))
    kernels: Any = cpu_kernels
    *moved, other = kernels.side_by_side([*map(cpu_kernels.pack_quantized, weights), plain])
    assert other is plain and len({weight.data.untyped_storage().data_ptr() for weight in moved}) == 1
    assert moved[0].data.data_ptr() % PAGE_BYTES == 0 or not hasattr(mmap, "MADV_HUGEPAGE")
    for weight, packed in zip(weights, moved, strict=True):
        assert torch.equal(cpu_kernels.linear_packed(x, packed, None), product(cpu_kernels, x, weight))
    small = cpu_kernels.pack_quantized(weight_of("int8", 33, 64))
    assert kernels.side_by_side([small])[0].data.data_ptr() == small.data.data_ptr(), "what is too small stays where it is"


@pytest.mark.parametrize("rows", [1, 3])
def test_the_largest_sums_of_4_bits_are_exact(cpu_kernels: Kernels, rows: int) -> None:
    """Codes of 15 and inputs that all round to 127, or to -127, in one group: AVX2 sums some steps of these in 16 bits."""
    codes, scales = torch.full((70, 1024), 15, dtype=torch.uint8), torch.ones(70, 1)
    x = torch.full((rows, 1024), -3.0) * torch.tensor([1.0, -1.0, 1.0])[:rows, None]
    out = product(cpu_kernels, x, QuantizedWeight("int4", codes, scales, None, 1024, None, "int8"))
    assert torch.equal(out, (x.sign()[:, :1] * 127 * 15 * 1024 * (torch.tensor(3.0) / 127)).expand(rows, 70))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
def test_a_number_that_is_not_finite_reaches_the_outputs_of_its_row(kernels: Kernels, kind: str, wrong: float) -> None:
    x = torch.randn(3, 64)
    x[1, 40] = wrong
    out = product(kernels, x, weight_of(kind, 50, 64))
    assert not out[1].isfinite().any()
    assert out[[0, 2]].isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
def test_no_rows_are_no_outputs(kernels: Kernels, kind: str) -> None:
    assert product(kernels, torch.empty(0, 64), weight_of(kind, 50, 64)).shape == (0, 50)


def test_parts_stand_side_by_side(kernels: Kernels) -> None:
    x, bias, plain = torch.randn(9, 64), torch.randn(70), torch.randn(20, 64)
    ordered = weight_of("int4 in order of importance", 50, 64)
    parts = PackedParts((kernels.pack_quantized(ordered), kernels.pack(plain)))
    expected = torch.cat([product(kernels, x, ordered), kernels.linear(x, plain, None)], 1) + bias
    assert torch.equal(kernels.linear_packed(x, parts, bias), expected)


def test_rounding_to_int8_keeps_within_half_a_step() -> None:
    x = torch.randn(50, 300) * torch.logspace(-3, 3, 50).unsqueeze(1)
    codes, scales = round_rows(x, "int8", 100)
    error = (codes.view(50, 3, 100) * scales.unsqueeze(-1) - x.view(50, 3, 100)).abs()
    assert (error <= scales.unsqueeze(-1) * 0.5001).all()


@pytest.mark.full
@pytest.mark.parametrize("instructions", ["-mavx2 -mfma", "-msse4.2"])
def test_other_instruction_sets_give_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cpu_kernels: Kernels, instructions: str
) -> None:
    flags = [*(flag for flag in build.FLAGS if flag != "-march=native"), *instructions.split()]
    monkeypatch.setattr(build, "FLAGS", tuple(flags))
    other = CpuKernels(Library(build.built_library("g++", tmp_path)))
    for kind in KINDS:
        for columns, width in SHAPES:
            weight, x, bias = weight_of(kind, columns, width), torch.randn(70, width), torch.randn(columns)
            assert torch.equal(product(other, x, weight, bias), product(cpu_kernels, x, weight, bias)), kind


@pytest.mark.parametrize("kind", KINDS)
def test_the_rows_of_a_group_have_the_bits_of_the_product_with_its_own_weight(kernels: Kernels, kind: str) -> None:
    """Of groups of no, one, few and many rows; int4 in order of importance has another order in each."""
    weights = [weight_of(kind, 99, 300) for _ in range(5)]
    packed, x, bounds = kernels.pack_quantized_groups(weights), torch.randn(31, 300), torch.tensor([0, 1, 1, 7, 24, 31])
    out = kernels.grouped_linear_packed(x, packed, bounds)
    for weight, start, end in zip(weights, bounds, bounds[1:], strict=False):
        assert torch.equal(out[start:end], product(kernels, x[start:end], weight))
    both = kernels.grouped_linear_packed(x, PackedParts((packed, packed)), bounds)
    assert torch.equal(both, torch.cat([out, out], dim=1)) and out.abs().max() > 0.1
    assert kernels.grouped_linear_packed(x[:0], packed, torch.zeros(6, dtype=torch.int64)).shape == (0, 99)

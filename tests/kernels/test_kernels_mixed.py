"""Mixed precision: products of rounded operands against float64, their gradients, and what is not rounded."""

import pytest
import torch

from tandem.kernels import select
from tandem.kernels.mixed import MixedKernels, head_kernels, in_precision, is_emulated, round_fp8, whole_precision

CPU = torch.device("cpu")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def operands(seed=0, rows=37, columns=24, width=300):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, width, generator=generator).requires_grad_()
    weight = (0.1 * torch.randn(columns, width, generator=generator)).requires_grad_()
    return x, weight, torch.randn(rows, columns, generator=generator)


@pytest.mark.parametrize("kernels", ["reference", "auto"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_linear_is_the_product_of_rounded_operands_rounded_and_so_are_its_gradients(precision, kernels):
    dtype = DTYPES[precision]
    x, weight, grad = operands()
    out = in_precision(select(kernels), precision, CPU).linear(x, weight, None)
    out.backward(grad)
    a, b, g = (t.detach().to(dtype).double() for t in (x, weight, grad))
    ulp = torch.finfo(dtype).eps
    for found, wanted, is_rounded in ((out, a @ b.T, True), (x.grad, g @ b, True), (weight.grad, g.T @ a, False)):
        # Half a unit of the 16-bit format, and the error of an fp32 sum of 300 products.
        magnitude = wanted.abs() * (ulp / 2 if is_rounded else 0) + 1e-5 * wanted.abs().max()
        assert bool(((found.double() - wanted).abs() <= magnitude).all())
        assert torch.equal(found, found.to(dtype).float()) == is_rounded
    assert (out.double() - (x.double() @ weight.double().T)).abs().max() > 1e-5, "rounding is seen"


@pytest.mark.parametrize(("dtype", "bits"), [(torch.float8_e4m3fn, 3), (torch.float8_e5m2, 2)])
def test_fp8_rounds_to_nearest_under_a_power_of_two_that_uses_the_whole_range(dtype, bits):
    generator = torch.Generator().manual_seed(1)
    for size in (1e-20, 3.7, 1e20):
        x = torch.randn(4000, generator=generator) * size
        found = round_fp8(x, dtype)
        within = x.abs() > x.abs().max() / 2**10
        assert ((found - x).abs() / x.abs())[within].max() <= 2.0 ** -(bits + 1)
        assert ((found - x).abs() / x.abs())[within].max() > 2.0 ** -(bits + 2), "and no finer"
        assert torch.equal(round_fp8(found, dtype), found)
    assert not round_fp8(torch.zeros(5), dtype).any()
    assert bool(round_fp8(torch.tensor([1.0, float("inf")]), dtype).isnan().all()), "an overflow is seen"


def test_fp8_linear_has_e4m3_operands_and_an_e5m2_gradient():
    x, weight, grad = operands()
    out = in_precision(select("reference"), "fp8", CPU).linear(x, weight, None)
    out.backward(grad)
    a, b = (round_fp8(t.detach(), torch.float8_e4m3fn).double() for t in (x, weight))
    g = round_fp8(grad, torch.float8_e5m2).double()
    assert (out.double() - a @ b.T).norm() < 2**-8 * out.norm()
    assert (weight.grad.double() - g.T @ a).norm() < 1e-6 * weight.grad.norm()
    assert (x.grad.double() - g @ b).norm() < 1e-6 * x.grad.norm()
    # Against unrounded operands: the relative error of a product of two numbers with 3 bits.
    exact = x.detach().double() @ weight.detach().double().T
    assert 0.01 < (out.double() - exact).norm() / exact.norm() < 0.05


def test_grouped_products_and_the_head_are_rounded_alike():
    x, weight, _ = operands()
    mixed = in_precision(select("auto"), "bf16", CPU)
    bounds = torch.tensor([0, 20, 37])
    stacked = torch.stack((weight, 2 * weight)).detach()
    found = mixed.grouped_linear(x.detach(), stacked, bounds)
    assert torch.equal(found[:20], mixed.linear(x.detach()[:20], stacked[0], None))
    assert torch.equal(found[20:], mixed.linear(x.detach()[20:], stacked[1], None))
    targets = torch.arange(37) % 24
    logprobs = mixed.token_logprobs(x, weight, targets, 1.0).raw
    wanted = (x.detach().bfloat16().double() @ weight.detach().bfloat16().double().T).log_softmax(-1)[torch.arange(37), targets]
    assert (logprobs.double() - wanted).abs().max() < 1e-5


def test_fp32_changes_nothing_and_emulation_is_said():
    kernels = select("auto")
    assert in_precision(kernels, "fp32", CPU) is kernels and not is_emulated("fp32", CPU)
    mixed = in_precision(kernels, "bf16", CPU)
    assert isinstance(mixed, MixedKernels) and is_emulated("bf16", CPU) and is_emulated("fp8", torch.device("cuda"))
    assert whole_precision(mixed) is kernels and whole_precision(kernels) is kernels
    assert not is_emulated("bf16", torch.device("cuda"))
    x = torch.randn(5, 8)
    assert torch.equal(mixed.rms_norm(x, torch.ones(8), 1e-6), kernels.rms_norm(x, torch.ones(8), 1e-6))


def test_fp8_units_find_the_numbers_of_the_emulation():
    # Torch multiplies fp8 on a CPU as well, slowly; 37 rows are padded to 48.
    x, weight, grad = operands(columns=32, width=304)
    bias = torch.randn(32).requires_grad_()
    out = MixedKernels(select("reference"), "fp8", emulated=False).linear(x, weight, bias)
    out.backward(grad.bfloat16())
    a, b = (round_fp8(t.detach(), torch.float8_e4m3fn).double() for t in (x, weight))
    g = round_fp8(grad.bfloat16().float(), torch.float8_e5m2).double()
    assert out.dtype == torch.bfloat16 and (x.grad.dtype, weight.grad.dtype) == (torch.float32, torch.float32)
    assert (out.double() - a @ b.T - bias.double()).abs().max() <= 2**-7 * out.abs().max()
    assert (x.grad.double() - g @ b).abs().max() <= 2**-8 * x.grad.abs().max()
    assert (weight.grad.double() - g.T @ a).norm() < 1e-6 * weight.grad.norm()
    assert (bias.grad.double() - grad.bfloat16().double().sum(0)).norm() < 1e-6 * bias.grad.norm()


def test_matrices_that_fp8_units_do_not_take_have_the_same_rounding():
    x, weight, _ = operands()
    native, emulated = MixedKernels(select("reference"), "fp8", emulated=False), in_precision(select("reference"), "fp8", CPU)
    found = native.linear(x, weight, None)
    assert weight.shape[0] % 16 and found.dtype == torch.bfloat16
    assert (found.float() - emulated.linear(x, weight, None)).abs().max() <= 2**-7 * found.abs().max()


def test_fp8_units_show_an_overflow():
    x, weight, _ = operands(columns=32, width=304)
    wrong = x.detach().clone()
    wrong[3, 5] = float("inf")
    assert bool(MixedKernels(select("reference"), "fp8", emulated=False).linear(wrong, weight, None).isnan().all())


def test_native_products_are_those_of_torch_in_that_dtype():
    x, weight, grad = operands()
    native = MixedKernels(select("reference"), "bf16", emulated=False)
    out = native.linear(x, weight, None)
    assert out.dtype == torch.bfloat16
    out.backward(grad.bfloat16())
    assert weight.grad.dtype == torch.float32
    emulated = in_precision(select("reference"), "bf16", CPU).linear(x, weight, None)
    assert (out.float() - emulated).abs().max() <= 2**-7 * emulated.abs().max()


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("kernels", ["reference", "auto"])
def test_packed_products_have_the_bits_of_those_that_train(precision, kernels):
    mixed, generator = in_precision(select(kernels), precision, CPU), torch.Generator().manual_seed(0)
    x, gate_up, down = (torch.randn(shape, generator=generator) for shape in ((7, 48), (2 * 40, 48), (48, 40)))
    bias = torch.randn(80, generator=generator)
    plain = mixed.linear(x, gate_up, bias)
    packed = mixed.pack(gate_up), mixed.pack(down)
    assert torch.equal(mixed.linear_packed(x, packed[0], bias), plain)
    assert torch.equal(plain, plain.to(DTYPES[precision]).float())
    assert torch.equal(mixed.gated_mlp_packed(x, packed[0], bias, packed[1], None), mixed.linear(mixed.silu_mul(plain), down, None))
    experts, bounds = torch.randn(3, 40, 48, generator=generator), torch.tensor([0, 2, 2, 7])
    assert torch.equal(mixed.grouped_linear_packed(x, mixed.pack_groups(experts), bounds), mixed.grouped_linear(x, experts, bounds))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_logits_of_the_head_are_of_rounded_operands_and_are_not_rounded(precision):
    mixed, dtype, generator = in_precision(select("reference"), precision, CPU), DTYPES[precision], torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(shape, generator=generator) for shape in ((5, 32), (41, 32)))
    logits = head_kernels(mixed).linear_packed(hidden, head_kernels(mixed).pack(weight), None)
    exact = hidden.to(dtype).double() @ weight.to(dtype).double().T
    torch.testing.assert_close(logits.double(), exact, rtol=1e-6, atol=1e-5)
    assert not torch.equal(logits, logits.to(dtype).float())
    targets = torch.arange(5)
    assert torch.equal(mixed.logits_logprobs(logits, targets), mixed.token_logprobs(hidden, weight, targets, 1.0).raw)

"""The chunked LM head: the bits of the unchunked computation for any chunks, and the memory of a chunk."""

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from lm_head_kernels import kernels_named
from torch import Tensor

from tandem.kernels import Kernels
from tandem.kernels.reference import ReferenceKernels
from tandem.layout import lm_head as sizes

ROWS, VOCABULARY, HIDDEN = 600, 1100, 24
FEW = 70, 40
"""For the interpreter, which is slow."""
WHOLE = {"FORWARD_LOGITS": 1 << 40, "BACKWARD_LOGITS": 1 << 40, "KEPT_LOGITS": 0, "GPU_LOGITS": 1 << 40}
ONE_ROW = {"LEAST_FORWARD_ROWS": 1, "FORWARD_LOGITS": 1, "BACKWARD_LOGITS": 1, "GPU_LOGITS": 1}
CHUNKS = {
    "one row": ONE_ROW,
    "a few rows": {"LEAST_FORWARD_ROWS": 7, "FORWARD_LOGITS": 1, "BACKWARD_LOGITS": 256 * 512},
    "a tile": {"LEAST_FORWARD_ROWS": 64, "FORWARD_LOGITS": 64 * VOCABULARY, "BACKWARD_LOGITS": 300 * VOCABULARY, "GPU_LOGITS": 64 * VOCABULARY},
    "a third": {"FORWARD_LOGITS": 200 * VOCABULARY, "BACKWARD_LOGITS": 550 * 700, "GPU_LOGITS": 200 * VOCABULARY},
    "all of them": WHOLE,
}


def inputs(rows: int = ROWS, vocabulary: int = VOCABULARY) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    made = torch.Generator().manual_seed(3)
    hidden, weight = torch.randn(rows, HIDDEN, generator=made), torch.randn(vocabulary, HIDDEN, generator=made) / 3
    return hidden, weight, torch.randint(vocabulary, (rows,), generator=made), torch.randn(2, rows, generator=made)


def outputs_and_gradients(
    kernels: Kernels, temperature: float, dtype: torch.dtype = torch.float32, size: tuple[int, int] = (ROWS, VOCABULARY)
) -> list[Tensor]:
    hidden, weight, targets, weights = inputs(*size)
    x, w = (value.to(dtype).requires_grad_() for value in (hidden, weight))
    out = kernels.token_logprobs(x, w, targets, temperature)
    (out.raw * weights[0] + out.scaled * weights[1]).sum().backward()
    assert x.grad is not None and w.grad is not None
    return [out.raw.detach(), out.scaled.detach(), out.entropy, x.grad, w.grad]


@pytest.fixture(autouse=True)
def quiet_numpy() -> Iterator[None]:
    # In the interpreter rows beyond the last one are computed from undefined values and never stored.
    with np.errstate(all="ignore"):
        yield


def use(sizes_of: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"KEPT_LOGITS": 0, **sizes_of}.items():
        monkeypatch.setattr(sizes, name, value)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("name", ["cpu", "reference", "tensor ranks", "bf16", "fp16", "fp8"])
def test_chunks_have_the_bits_of_all_logits_at_once(name: str, temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = kernels_named(name)
    use(WHOLE, monkeypatch)
    whole = outputs_and_gradients(kernels, temperature)
    for chunks, sizes_of in CHUNKS.items():
        use(sizes_of, monkeypatch)
        found = outputs_and_gradients(kernels, temperature)
        assert [torch.equal(ours, theirs) for ours, theirs in zip(found, whole, strict=True)] == [True] * 5, chunks


def test_kept_logits_have_the_bits_of_those_computed_again(cpu_kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    again = []
    for kept in (0, 1 << 40):
        for sizes_of in (ONE_ROW, WHOLE):
            use({**sizes_of, "KEPT_LOGITS": kept}, monkeypatch)
            again.append(outputs_and_gradients(cpu_kernels, 0.7))
    for found in again[1:]:
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, again[0], strict=True))


def test_without_a_gradient_the_bits_are_the_same_and_those_of_the_sampler(cpu_kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, targets, _ = inputs()
    use(ONE_ROW, monkeypatch)
    expected = outputs_and_gradients(cpu_kernels, 0.7)[:3]
    out = cpu_kernels.token_logprobs(hidden, weight, targets, 0.7)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(out[:3], expected, strict=True))
    assert torch.equal(out.raw, cpu_kernels.logits_logprobs(cpu_kernels.linear(hidden, weight, None), targets))


def test_chunks_on_two_threads_have_the_bits_of_one(cpu_kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    use(ONE_ROW, monkeypatch)
    found = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        found.append(outputs_and_gradients(cpu_kernels, 0.7))
    assert all(torch.equal(one, two) for one, two in zip(*found, strict=True))


@pytest.mark.parametrize("name", ["cpu", "reference", "tensor ranks", "triton"])
def test_chunks_add_up_to_the_gradients_of_float64(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    size = FEW if name == "triton" else (ROWS, VOCABULARY)
    hidden, weight, targets, weights = inputs(*size)
    x, w = hidden.double().requires_grad_(), weight.double().requires_grad_()
    logits = x @ w.t()
    raw, scaled = (z.log_softmax(-1).gather(1, targets.unsqueeze(1)).squeeze(1) for z in (logits, logits / 0.7))
    entropy = -((logits / 0.7).softmax(-1) * (logits / 0.7).log_softmax(-1)).sum(-1)
    (raw * weights[0] + scaled * weights[1]).sum().backward()
    assert x.grad is not None and w.grad is not None
    use(ONE_ROW, monkeypatch)
    found = outputs_and_gradients(kernels_named(name), 0.7, size=size)
    for ours, exact in zip(found, (raw.detach(), scaled.detach(), entropy.detach(), x.grad, w.grad), strict=True):
        assert float((ours.double() - exact).norm() / exact.norm()) < 1e-6


def test_triton_chunks_have_the_log_probabilities_of_all_logits_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    use(WHOLE, monkeypatch)
    whole = outputs_and_gradients(kernels_named("triton"), 0.7, size=FEW)
    use(ONE_ROW, monkeypatch)
    found = outputs_and_gradients(kernels_named("triton"), 0.7, size=FEW)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found[:3], whole[:3], strict=True))


def test_a_head_in_16_bits_adds_its_gradient_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    use(ONE_ROW, monkeypatch)
    exact = outputs_and_gradients(ReferenceKernels(), 1.0, torch.float64)[4]
    found = outputs_and_gradients(ReferenceKernels(), 1.0, torch.bfloat16)[4]
    assert found.dtype == torch.bfloat16
    assert float((found.double() - exact).norm() / exact.norm()) < 0.01


@pytest.mark.parametrize("name", ["cpu", "reference", "triton"])
def test_no_row_at_all_has_gradients_of_zero(name: str) -> None:
    raw, *_, by_hidden, by_weight = outputs_and_gradients(kernels_named(name), 1.0, size=(0, VOCABULARY))
    assert raw.shape == (0,) and by_hidden.shape == (0, HIDDEN)
    assert torch.equal(by_weight, torch.zeros(VOCABULARY, HIDDEN))


def test_hidden_states_of_another_size_than_the_head_are_refused(cpu_kernels: Kernels) -> None:
    for needs_gradient in (False, True):
        with pytest.raises(ValueError, match=r"hidden has shape \[3, 8\]; expected \[T, 16\]"):
            cpu_kernels.token_logprobs(torch.randn(3, 8, requires_grad=needs_gradient), torch.randn(9, 16), torch.arange(3), 1.0)


MEASURE = """
import json, sys
import torch
from lm_head_kernels import kernels_named

torch.set_num_threads(1)

def in_kib(key):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(key))

def peak(name, wants, rows, vocabulary, hidden_size):
    kernels = None if name == "plain" else kernels_named(name)
    hidden, weight = torch.randn(rows, hidden_size), torch.full((vocabulary, hidden_size), 0.02)
    targets = torch.arange(rows) % vocabulary
    if wants == "gradients":
        hidden.requires_grad_(), weight.requires_grad_()
        hidden.grad, weight.grad = torch.ones_like(hidden), torch.ones_like(weight)
    open("/proc/self/clear_refs", "w").write("5")
    before = in_kib("VmRSS")
    if kernels is None:
        raw = (hidden @ weight.t()).log_softmax(-1).gather(1, targets.unsqueeze(1)).squeeze(1)
    else:
        raw = kernels.token_logprobs(hidden, weight, targets, 1.0).raw
    if wants == "gradients":
        raw.sum().backward()
    return (in_kib("VmHWM") - before) << 10

found = []
for name, wants, *size in json.loads(sys.argv[1]):
    peak(name, wants, 70, 300, size[2])  # loads what a first call loads
    found.append(peak(name, wants, *size))
print(json.dumps(found))
"""


def peak_bytes(*cases: tuple[str, str, int, int, int]) -> list[int]:
    """Returns the peak resident memory of (kernels, wanted, rows, vocabulary, hidden) in a new process, above its initial memory: that of
    the head's passes with the gradients that they return."""
    program = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n{textwrap.dedent(MEASURE)}"
    # So that freed memory is returned immediately.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "131072"}
    done = subprocess.run(
        [sys.executable, "-c", program, json.dumps(cases)], capture_output=True, text=True, timeout=300, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    return list(json.loads(done.stdout))


@pytest.mark.full
def test_the_peak_is_predicted_and_far_below_all_logits() -> None:
    size = rows, vocabulary, hidden = 1024, 40_000, 16
    whole, gradients = 4 * rows * vocabulary, 4 * hidden * (rows + vocabulary)
    predicted = sizes.logits_bytes(*size)
    assert predicted < whole / 5
    trained, scored, plain = peak_bytes(("cpu", "gradients", *size), ("cpu", "values", *size), ("plain", "gradients", *size))
    assert 0.7 * predicted < trained < predicted + gradients + (4 << 20)
    assert 0.7 * predicted < scored < predicted + (4 << 20)
    assert plain > 2 * whole


@pytest.mark.full
def test_the_peak_is_predicted_for_few_and_many_logits() -> None:
    cases = [(800, 40_000, 16), (8192, 4096, 64), (1000, 151_936, 64), (5000, 300, 64)]
    for size, measured in zip(cases, peak_bytes(*(("cpu", "gradients", *size) for size in cases)), strict=True):
        predicted, gradients = sizes.logits_bytes(*size), 4 * size[2] * (size[0] + size[1])
        assert 0.7 * predicted < measured < predicted + gradients + (6 << 20), size


@pytest.mark.full
def test_the_peak_of_a_tensor_rank_is_predicted() -> None:
    cases = [(2048, 20_000, 32), (1000, 75_968, 32)]
    for size, measured in zip(cases, peak_bytes(*(("tensor ranks", "gradients", *size) for size in cases)), strict=True):
        predicted, gradients = sizes.parallel_logits_bytes(*size[:2]), 4 * size[2] * (size[0] + size[1])
        assert 0.6 * predicted < measured < predicted + gradients + (6 << 20), (size, measured, predicted)

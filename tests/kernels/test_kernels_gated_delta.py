"""The gated delta rule: against its definition in float64 with autograd, and with the same bits by both sets of kernels, however tokens come."""

import pytest
import torch
from delta_sequences import LENGTHS, PUBLISHED, SIZES, chunked, defined, inputs_of
from paged_sequences import bounds_of
from torch import Tensor

from tandem.kernels import select
from tandem.kernels.api import DeltaStates


@pytest.mark.parametrize("sizes", [SIZES, pytest.param(PUBLISHED, marks=pytest.mark.full)], ids=["small", "published"])
@pytest.mark.parametrize(("name", "dtype", "near"), [("reference", torch.float64, 1e-10), ("cpu", torch.float32, 1e-4)], ids=["reference", "cpu"])
def test_outputs_and_gradients_are_those_of_the_definition(name: str, dtype: torch.dtype, near: float, sizes: tuple[int, int, int, int]) -> None:
    exact = [x.double().requires_grad_() for x in inputs_of(sizes, sum(LENGTHS))]
    expected = torch.cat([defined(*own) for own in zip(*(x.split(LENGTHS) for x in exact), strict=True)])
    weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    (expected * weight).sum().backward()
    given = [x.detach().to(dtype).requires_grad_() for x in exact]
    out = select(name).gated_delta_rule(*given, bounds_of(LENGTHS))  # type: ignore[arg-type]
    assert (out.double() - expected).norm() < near * expected.norm()
    (out * weight.to(dtype)).sum().backward()
    for own, other in zip(given, exact, strict=True):
        assert own.grad is not None and other.grad is not None
        assert (own.grad.double() - other.grad).norm() < near * other.grad.norm()


@pytest.mark.parametrize("sizes", [SIZES, pytest.param(PUBLISHED, marks=pytest.mark.full)], ids=["small", "published"])
def test_chunks_over_states_have_the_bits_of_packed_sequences_by_either_kernels(sizes: tuple[int, int, int, int]) -> None:
    inputs, bounds = inputs_of(sizes, sum(LENGTHS)), bounds_of(LENGTHS)
    with torch.no_grad():
        expected = select("reference").gated_delta_rule(*inputs, bounds)  # type: ignore[arg-type]
        for kernels in (select("cpu"), select("reference")):
            assert torch.equal(kernels.gated_delta_rule(*inputs, bounds), expected)  # type: ignore[arg-type]
            assert torch.equal(chunked(kernels, sizes, inputs, LENGTHS), expected)


def test_a_state_that_is_kept_within_a_run_has_the_bits_of_one_that_ended_there() -> None:
    inputs, bounds, rows = inputs_of(SIZES, sum(LENGTHS)), bounds_of(LENGTHS), torch.arange(len(LENGTHS))
    starts, fresh, after = bounds.tolist(), torch.ones(len(LENGTHS), dtype=torch.bool), {0: 0, 16: 1, 70: 1, 71: 2, 90: 3}
    kept = torch.full((sum(LENGTHS),), -1)
    kept[list(after)] = torch.arange(len(after)) + len(LENGTHS)
    for kernels in (select("cpu"), select("reference")):
        matrices = torch.full((len(LENGTHS) + len(after), *SIZES[1:]), 7.0)
        kernels.gated_delta_rule(*inputs, bounds, DeltaStates(matrices, rows, fresh, kept))  # type: ignore[arg-type]
        for place, (token, sequence) in enumerate(after.items()):
            ended = torch.full((1, *SIZES[1:]), 7.0)
            of = slice(starts[sequence], token + 1)
            states = DeltaStates(ended, rows[:1], fresh[:1])
            kernels.gated_delta_rule(*(x[of] for x in inputs), bounds_of([token + 1 - starts[sequence]]), states)  # type: ignore[arg-type]
            assert torch.equal(matrices[len(LENGTHS) + place], ended[0])


def test_gradients_do_not_depend_on_the_number_of_threads_or_the_company() -> None:
    inputs, kernels = inputs_of((2, 4, 64, 64), 400), select("cpu")

    def gradients(bounds: Tensor, tokens: int) -> list[Tensor]:
        given = [x[:tokens].clone().requires_grad_() for x in inputs]
        kernels.gated_delta_rule(*given, bounds).square().sum().backward()  # type: ignore[arg-type]
        return [x.grad for x in given if x.grad is not None]

    torch.set_num_threads(1)
    alone, both = gradients(bounds_of([150]), 150), gradients(bounds_of([150, 250]), 400)
    torch.set_num_threads(2)
    threads = gradients(bounds_of([150, 250]), 400)
    assert len(alone) == 5
    assert all(torch.equal(one, two[:150]) for one, two in zip(alone, both, strict=True))
    assert all(torch.equal(one, two) for one, two in zip(both, threads, strict=True))

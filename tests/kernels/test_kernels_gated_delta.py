"""The gated delta rule: against its definition in float64 with autograd, and with the same bits by both sets of kernels, however tokens come."""

import itertools

import pytest
import torch
from torch import Tensor

from tandem.kernels import Kernels, select
from tandem.kernels.api import DeltaStates

LENGTHS = [1, 70, 3, 17]
SIZES = (2, 4, 12, 10)
"""Key heads, value heads, numbers of a key and of a value."""
PUBLISHED = (1, 2, 128, 128)
"""Of Qwen3-Next, with fewer heads."""


def inputs_of(sizes: tuple[int, int, int, int], tokens: int) -> list[Tensor]:
    """Returns q, k, v, decay and beta as a layer computes them: keys of length 1, decays and betas between 0 and 1."""
    key_heads, heads, keys, values = sizes
    generator = torch.Generator().manual_seed(tokens)
    normal = lambda *shape: torch.randn(tokens, *shape, generator=generator)
    unit = lambda x: x / x.norm(dim=-1, keepdim=True)
    return [unit(normal(key_heads, keys)) * keys**-0.5, unit(normal(key_heads, keys)), normal(heads, values), normal(heads).sigmoid(), normal(heads).sigmoid()]


def bounds_of(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def defined(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """Equation 10 of Yang et al. (2024) for one sequence: S = S decay (1 - beta k k^T) + beta v k^T, with S transposed."""
    repeats = v.shape[1] // k.shape[1]
    q, k = (x.repeat_interleave(repeats, dim=1) for x in (q, k))
    state, one, out = q.new_zeros(v.shape[1], v.shape[2], k.shape[2]), torch.eye(k.shape[2], dtype=q.dtype), []
    for t in range(len(q)):
        erase = one - torch.einsum("h,hi,hj->hij", beta[t], k[t], k[t])
        state = torch.einsum("h,hvi,hij->hvj", decay[t], state, erase) + torch.einsum("h,hv,hj->hvj", beta[t], v[t], k[t])
        out.append(torch.einsum("hvj,hj->hv", state, q[t]))
    return torch.stack(out)


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
            assert torch.equal(chunked(kernels, sizes, inputs), expected)


def chunked(kernels: Kernels, sizes: tuple[int, int, int, int], inputs: list[Tensor]) -> Tensor:
    """Computes chunks of 1, 2, 3 and so on tokens of each sequence, in rows of states that hold other numbers at first."""
    heads, starts = sizes[1], bounds_of(LENGTHS).tolist()
    matrices, rows = torch.full((len(LENGTHS) + 2, heads, sizes[2], sizes[3]), 7.0), torch.tensor([4, 0, 5, 2])
    done, out = [0] * len(LENGTHS), torch.empty(sum(LENGTHS), heads, sizes[3])
    for size in itertools.count(1):
        chosen = [s for s, length in enumerate(LENGTHS) if done[s] < length]
        if not chosen:
            return out
        spans = [range(starts[s] + done[s], starts[s] + min(done[s] + size, LENGTHS[s])) for s in chosen]
        of = torch.tensor([token for span in spans for token in span])
        states = DeltaStates(matrices, rows[chosen], torch.tensor([done[s] == 0 for s in chosen]))
        out[of] = kernels.gated_delta_rule(*(x[of] for x in inputs), bounds_of([len(span) for span in spans]), states)  # type: ignore[arg-type]
        for s, span in zip(chosen, spans, strict=True):
            done[s] += len(span)
    raise AssertionError


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

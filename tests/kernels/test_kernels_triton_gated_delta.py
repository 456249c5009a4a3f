"""The gated delta rule by Triton's programs in the interpreter: beside its definition in float64, with the bits of the law, and their limits in chunks."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from delta_sequences import LENGTHS, PUBLISHED, SIZES, chunked, defined, inputs_of
from paged_sequences import bounds_of
from torch import Tensor
from triton_interpreter import interpreted

from tandem.estimate.training.linear_attention import scratch_in_chunks
from tandem.kernels.api import DeltaStates
from tandem.kernels.triton.gated_delta import TritonPasses
from tandem.kernels.triton.programs import gated_delta_backward, gated_delta_chunks
from tandem.layout.linear_attention import LinearAttention

FEW = [1, 9, 3]
"""Token by token the interpreter is slow."""
CHUNKS = [66, 17]
NARROW = (1, 2, 12, 10)


@pytest.fixture(autouse=True)
def quiet_numpy() -> Iterator[None]:
    with np.errstate(all="ignore"):
        yield


def hard_inputs(sizes: tuple[int, int, int, int], lengths: list[int]) -> list[Tensor]:
    """Returns inputs with what is hard to compute in chunks: equal keys one behind the other, that are kept and overwritten whole, and tiny decays."""
    inputs = inputs_of(sizes, sum(lengths))
    _, k, _, decay, beta = inputs
    for first in range(0, sum(lengths), 24):
        k[first : first + 9] = k[first].clone()
        decay[first : first + 9], beta[first : first + 9] = 1.0, 1.0
    decay[11::17] = 1e-20
    return inputs


class Unlaunched:
    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *arguments, **options: None


def test_the_backward_pass_allocates_the_scratch_that_the_memory_plan_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (gated_delta_chunks, gated_delta_backward):
        for name in [name for name in vars(module) if name.startswith("delta_")]:
            monkeypatch.setattr(module, name, Unlaunched())
    made = list[int]()
    for name in ("empty", "empty_like"):
        make = getattr(torch, name)

        def counted(*shape: Any, make: Callable[..., Tensor] = make, **options: Any) -> Tensor:
            tensor = make(*shape, **options)
            made.append(tensor.nbytes)
            return tensor

        monkeypatch.setattr(torch, name, counted)
    key_heads, heads, keys, values = NARROW
    linear, passes, sizes = LinearAttention((0,), key_heads, heads, keys, values, 4), TritonPasses(deterministic=True), []
    for tokens in (64, 128):
        inputs = inputs_of(NARROW, tokens)
        made.clear()
        passes.backward(torch.ones(tokens, heads, values), *inputs, bounds_of([tokens]))
        sizes.append(sum(made))
    # Without the place for a further chunk that every sequence has.
    assert sizes[1] - sizes[0] == 64 * scratch_in_chunks(linear)


def error(own: Tensor, expected: Tensor) -> float:
    own, expected = own.detach().double(), expected.detach()
    return float((own - expected).norm() / expected.norm())


@pytest.mark.parametrize(
    ("deterministic", "sizes", "lengths"),
    [
        pytest.param(False, NARROW, CHUNKS, id="chunks"),
        pytest.param(True, NARROW, FEW, id="tokens"),
        pytest.param(False, SIZES, LENGTHS, marks=pytest.mark.full, id="chunks of more heads"),
        pytest.param(False, PUBLISHED, [140, 64, 128, 5], marks=pytest.mark.full, id="chunks of the published size"),
        pytest.param(True, PUBLISHED, FEW, marks=pytest.mark.full, id="tokens of the published size"),
    ],
)
def test_outputs_and_gradients_are_those_of_the_definition(deterministic: bool, sizes: tuple[int, int, int, int], lengths: list[int]) -> None:
    exact = [x.double().requires_grad_() for x in hard_inputs(sizes, lengths)]
    expected = torch.cat([defined(*own) for own in zip(*(x.split(lengths) for x in exact), strict=True)])
    weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    (expected * weight).sum().backward()
    given = [x.detach().float().requires_grad_() for x in exact]
    out = interpreted(deterministic=deterministic).gated_delta_rule(*given, bounds_of(lengths))  # type: ignore[arg-type]
    assert error(out, expected) < 2e-6
    (out * weight.float()).sum().backward()
    for own, other in zip(given, exact, strict=True):
        assert own.grad is not None and other.grad is not None
        assert error(own.grad, other.grad) < 1e-5
    small = exact[3] < 1e-19
    assert given[3].grad is not None and exact[3].grad is not None
    assert error(given[3].grad[small], exact[3].grad[small]) < 1e-5, "decays that nearly forget all have gradients of full precision"


def test_token_by_token_chunks_over_states_and_kept_states_have_the_bits_of_packed_sequences() -> None:
    inputs, kernels, tokens = inputs_of(NARROW, sum(FEW)), interpreted(), sum(FEW)
    with torch.no_grad():
        expected = kernels.gated_delta_rule(*inputs, bounds_of(FEW))  # type: ignore[arg-type]
    assert torch.equal(chunked(kernels, NARROW, inputs, FEW), expected)
    kept, matrices = torch.full((tokens,), -1), torch.full((5, *NARROW[1:]), 7.0)
    kept[4], kept[12] = 3, 4
    kernels.gated_delta_rule(*inputs, bounds_of(FEW), DeltaStates(matrices, torch.arange(3), torch.ones(3, dtype=torch.bool), kept))  # type: ignore[arg-type]
    assert torch.equal(matrices[4], matrices[2])
    ended = torch.full((1, *NARROW[1:]), 7.0)
    states = DeltaStates(ended, torch.zeros(1, dtype=torch.int64), torch.ones(1, dtype=torch.bool))
    kernels.gated_delta_rule(*(x[1:5] for x in inputs), bounds_of([4]), states)  # type: ignore[arg-type]
    assert torch.equal(matrices[3], ended[0])


def test_in_chunks_a_packed_sequence_has_the_bits_of_it_alone_and_so_have_its_gradients() -> None:
    inputs, kernels = inputs_of(NARROW, sum(CHUNKS)), interpreted(deterministic=False)

    def results(given: list[Tensor], lengths: list[int]) -> list[Tensor]:
        own = [x.clone().requires_grad_() for x in given]
        out = kernels.gated_delta_rule(*own, bounds_of(lengths))  # type: ignore[arg-type]
        out.square().sum().backward()
        return [out.detach(), *(x.grad for x in own if x.grad is not None)]

    together, last = results(inputs, CHUNKS), slice(CHUNKS[0], None)
    alone = results([x[last] for x in inputs], CHUNKS[1:])
    assert len(alone) == 6
    assert all(torch.equal(one, both[last]) for one, both in zip(alone, together, strict=True))


def test_in_chunks_states_go_on_and_are_kept_within_rounding() -> None:
    lengths, cut = [90, 40], 30
    inputs, kernels = inputs_of(NARROW, 130), interpreted(deterministic=False)
    wide = [x.double() for x in inputs]
    expected = torch.cat([defined(*own) for own in zip(*(x.split(lengths) for x in wide), strict=True)])
    matrices, out = torch.full((5, *NARROW[1:]), 7.0), torch.empty_like(inputs[2])
    for first, spans in enumerate(([range(cut), range(90, 90 + cut)], [range(cut, 90), range(90 + cut, 130)])):
        of = torch.tensor(list(itertools.chain(*spans)))
        kept = torch.full((len(of),), -1)
        if first:
            kept[30], kept[-1] = 3, 4  # token 60, in a chunk that begins at token 30, and the last one
        states = DeltaStates(matrices, torch.tensor([2, 0]), torch.full((2,), first == 0), kept if first else None)
        out[of] = kernels.gated_delta_rule(*(x[of] for x in inputs), bounds_of([len(span) for span in spans]), states)  # type: ignore[arg-type]
    assert error(out, expected) < 2e-6
    assert torch.equal(matrices[4], matrices[0])
    exact = torch.full((1, *NARROW[1:]), 7.0, dtype=torch.float64)
    begin = DeltaStates(exact, torch.zeros(1, dtype=torch.int64), torch.ones(1, dtype=torch.bool))
    kernels.gated_delta_rule(*(x[:61] for x in wide), bounds_of([61]), begin)  # type: ignore[arg-type]
    assert error(matrices[3], exact[0]) < 2e-6


def test_value_heads_that_are_no_multiple_of_key_heads_are_refused() -> None:
    q, v, gates = torch.zeros(2, 2, 16), torch.zeros(2, 3, 16), torch.zeros(2, 3)
    with pytest.raises(ValueError, match="3 value heads over 2 key heads"):
        interpreted().gated_delta_rule(q, q, v, gates, gates, bounds_of([2]))

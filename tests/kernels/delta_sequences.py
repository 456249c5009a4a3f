"""Inputs of the gated delta rule for tests, its definition, and sequences that come in chunks over kept states."""

import itertools

import torch
from paged_sequences import bounds_of
from torch import Tensor

from tandem.kernels import Kernels
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


def chunked(kernels: Kernels, sizes: tuple[int, int, int, int], inputs: list[Tensor], lengths: list[int]) -> Tensor:
    """Computes chunks of 1, 2, 3 and so on tokens of each sequence, in rows of states that hold other numbers at first."""
    heads, starts = sizes[1], bounds_of(lengths).tolist()
    matrices, rows = torch.full((len(lengths) + 2, heads, sizes[2], sizes[3]), 7.0), torch.arange(len(lengths) + 1, 1, -1)
    done, out = [0] * len(lengths), torch.empty(sum(lengths), heads, sizes[3])
    for size in itertools.count(1):
        chosen = [s for s, length in enumerate(lengths) if done[s] < length]
        if not chosen:
            return out
        spans = [range(starts[s] + done[s], starts[s] + min(done[s] + size, lengths[s])) for s in chosen]
        of = torch.tensor([token for span in spans for token in span])
        states = DeltaStates(matrices, rows[chosen], torch.tensor([done[s] == 0 for s in chosen]))
        out[of] = kernels.gated_delta_rule(*(x[of] for x in inputs), bounds_of([len(span) for span in spans]), states)  # type: ignore[arg-type]
        for s, span in zip(chosen, spans, strict=True):
            done[s] += len(span)
    raise AssertionError

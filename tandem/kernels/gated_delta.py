"""The gated delta rule (Yang et al., 2024, "Gated Delta Networks", arXiv 2412.06464, equation 10), token by token, in plain torch: the definition of its sums.

A head's matrix S [Dk, Dv] is decayed, corrected by what it recalls for the token's key, and read by its query:
``S' = decay S;  delta = beta (v - k S');  S = S' + k delta;  out = q S``. Sums over Dk are taken in ascending order, products and sums rounded one by one, so
that the bits of a token depend on the tokens before it alone, in whatever chunks they came.
"""

import itertools
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from tandem.kernels.api import DeltaStates, sum_in_order

CHUNK_TOKENS = 64
"""The backward pass keeps the state of every so many tokens, and recomputes those between them: the forward pass is computed two more times."""


class Gradients(NamedTuple):
    """Those of ``q`` and ``k`` for each value head [T, Hv, Dk], of ``v`` [T, Hv, Dv], of ``decay`` and ``beta`` [T, Hv]."""

    q: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor
    beta: Tensor


class Passes(Protocol):
    """The two passes of a set of kernels, without autograd. Tensors as in ``Kernels.gated_delta_rule``."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, bounds: Tensor, states: DeltaStates | None) -> Tensor: ...

    def backward(self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, bounds: Tensor) -> Gradients: ...


def gated_delta_rule(
    passes: Passes, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, bounds: Tensor, states: DeltaStates | None
) -> Tensor:
    """Does ``Kernels.gated_delta_rule`` by ``passes``, with a gradient where there are no ``states``."""
    if states is not None or not torch.is_grad_enabled():
        return passes.forward(q, k, v, decay, beta, bounds, states)
    return _GatedDelta.apply(q, k, v, decay, beta, bounds, passes)  # type: ignore[no-any-return]


class _GatedDelta(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, bounds: Tensor, passes: Passes
    ) -> Tensor:
        ctx.save_for_backward(q, k, v, decay, beta, bounds)
        ctx.passes = passes
        return passes.forward(q, k, v, decay, beta, bounds, None)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, k, v, decay, beta, bounds = ctx.saved_tensors
        own: Gradients = ctx.passes.backward(grad.contiguous(), q, k, v, decay, beta, bounds)
        of_q, of_k = (sum_in_order(each.view(*q.shape[:2], -1, q.shape[2]).unbind(2)) for each in (own.q, own.k))
        return of_q, of_k, own.v, own.decay, own.beta, None, None


class ReferencePasses:
    """Plain torch, in any dtype and on any device, one token after another: slow."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, bounds: Tensor, states: DeltaStates | None) -> Tensor:
        heads, out = v.shape[1], torch.empty_like(v)
        q, k = _for_value_heads(q, heads), _for_value_heads(k, heads)
        rows, fresh = (None, None) if states is None else (states.rows.tolist(), states.fresh.tolist())
        kept = [-1] * len(q) if states is None or states.kept is None else states.kept.tolist()
        for s, (start, end) in enumerate(itertools.pairwise(bounds.tolist())):
            state = v.new_zeros(heads, q.shape[2], v.shape[2])
            if states is not None and rows is not None and fresh is not None and not fresh[s]:
                state = states.matrices[rows[s]].clone()
            for t in range(start, end):
                state, out[t] = _step(state, q[t], k[t], v[t], decay[t], beta[t])
                if states is not None and kept[t] >= 0:
                    states.matrices[kept[t]] = state
            if states is not None and rows is not None:
                states.matrices[rows[s]] = state
        return out

    def backward(self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, bounds: Tensor) -> Gradients:
        heads, (q_size, v_size) = v.shape[1], (q.shape[2], v.shape[2])
        q, k = _for_value_heads(q, heads), _for_value_heads(k, heads)
        own = Gradients(*(torch.empty_like(each) for each in (q, k, v, decay, beta)))
        step = lambda state, t: _step(state, q[t], k[t], v[t], decay[t], beta[t])[0]
        for start, end in itertools.pairwise(bounds.tolist()):
            state = v.new_zeros(heads, q_size, v_size)
            kept = [state]
            for t in range(start, end):
                state = step(state, t)
                if (t + 1 - start) % CHUNK_TOKENS == 0:
                    kept.append(state)
            of_state = torch.zeros_like(kept[0])
            for first in reversed(range(start, end, CHUNK_TOKENS)):
                last = min(end, first + CHUNK_TOKENS)
                before = [kept[(first - start) // CHUNK_TOKENS]]
                for t in range(first, last):
                    before.append(step(before[-1], t))
                for t in reversed(range(first, last)):
                    of_state = _step_backward(own, of_state, grad[t], before[t - first], before[t + 1 - first], q[t], k[t], v[t], decay[t], beta[t], t)
        return own


def _for_value_heads(x: Tensor, heads: int) -> Tensor:
    """Returns queries or keys ``x[T, Hk, Dk]`` once for each value head that they serve."""
    return x.repeat_interleave(heads // x.shape[1], dim=1)


def _recalled(state: Tensor, x: Tensor) -> Tensor:
    """Computes ``x[Hv, Dk]`` times ``state[Hv, Dk, Dv]`` -> [Hv, Dv]."""
    return sum_in_order((state * x.unsqueeze(2)).unbind(1))


def _step(state: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    state = state * decay.view(-1, 1, 1)
    delta = (v - _recalled(state, k)) * beta.unsqueeze(1)
    state = state + k.unsqueeze(2) * delta.unsqueeze(1)
    return state, _recalled(state, q)


def _step_backward(
    own: Gradients, of_state: Tensor, grad: Tensor, before: Tensor, after: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, t: int
) -> Tensor:
    """Writes the gradients of token ``t`` and returns that of the state ``before`` it. ``of_state``: of the state ``after`` it, by later tokens."""
    decayed = before * decay.view(-1, 1, 1)
    error = v - _recalled(decayed, k)
    delta = error * beta.unsqueeze(1)
    of_state = of_state + q.unsqueeze(2) * grad.unsqueeze(1)
    own.q[t] = (after * grad.unsqueeze(1)).sum(2)
    of_delta = _recalled(of_state, k)
    own.beta[t] = (of_delta * error).sum(1)
    own.v[t] = of_delta * beta.unsqueeze(1)
    own.k[t] = (of_state * delta.unsqueeze(1)).sum(2) - (decayed * own.v[t].unsqueeze(1)).sum(2)
    of_state = of_state - k.unsqueeze(2) * own.v[t].unsqueeze(1)
    own.decay[t] = (of_state * before).sum((1, 2))
    return of_state * decay.view(-1, 1, 1)

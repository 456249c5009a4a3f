"""Log-probabilities of tokens, and sampling filters, in plain torch (see ``reference``)."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tandem.kernels.reference_dtype import compute_dtype, soft_cap, soft_cap_slope
from tandem.layout import lm_head as sizes

Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]


def log_softmax(logits: Tensor) -> Tensor:
    return logits.contiguous().log_softmax(-1, dtype=compute_dtype(logits.dtype))


def gather_columns(x: Tensor, columns: Tensor) -> Tensor:
    return x.gather(1, columns.unsqueeze(1)).squeeze(1)


def entropy_of(logprobs: Tensor) -> Tensor:
    """Returns the entropy [T], in nats, of distributions with ``logprobs[T, N]``."""
    # A token of probability 0 contributes 0, not 0 * -inf.
    return -(logprobs.exp() * logprobs.clamp_min(torch.finfo(logprobs.dtype).min)).sum(-1)


class TokenLogprobsFunction(torch.autograd.Function):
    """Computes logits chunk by chunk, and again in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, linear: Linear, cap: float | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(hidden, weight, targets)
        ctx.temperature, ctx.linear, ctx.cap = temperature, linear, cap
        raw = hidden.new_empty(len(hidden), dtype=compute_dtype(hidden.dtype))
        scaled, entropy = torch.empty_like(raw), torch.empty_like(raw)
        for rows in sizes.row_chunks(len(hidden), len(weight), sizes.FORWARD_LOGITS):
            logits = linear(hidden[rows], weight, None)
            logits = logits if cap is None else soft_cap(logits, cap)
            logprobs = log_softmax(logits)
            raw[rows] = gather_columns(logprobs, targets[rows])
            if temperature != 1:
                logprobs = log_softmax(logits / temperature)
                scaled[rows] = gather_columns(logprobs, targets[rows])
            entropy[rows] = entropy_of(logprobs)
        ctx.mark_non_differentiable(entropy)
        return raw, scaled, entropy

    @staticmethod
    def backward(ctx: Any, grad_raw: Tensor, grad_scaled: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        hidden, weight, targets = ctx.saved_tensors
        gradients = HeadGradients(hidden, weight, ctx.needs_input_grad[0], ctx.needs_input_grad[1])
        for rows in sizes.row_chunks(len(hidden), len(weight), sizes.BACKWARD_LOGITS):
            logits = ctx.linear(hidden[rows], weight, None)
            logits = logits if ctx.cap is None else soft_cap(logits, ctx.cap)
            grad = _logprob_grad(log_softmax(logits), targets[rows], grad_raw[rows])
            if ctx.temperature != 1:
                scaled = log_softmax(logits / ctx.temperature)
                grad += _logprob_grad(scaled, targets[rows], grad_scaled[rows] / ctx.temperature)
            gradients.add(grad if ctx.cap is None else grad * soft_cap_slope(logits, ctx.cap), rows)
        return *gradients.result(), None, None, None, None


class HeadGradients:
    """Accumulates the gradients by ``hidden[T, H]`` and ``weight[V, H]`` of logits ``hidden @ weight.T`` from gradients of chunks of rows.
    Tokens are summed in tiles of ``ROW_TILE``, so that the bits do not depend on the chunks, which must be whole tiles."""

    def __init__(self, hidden: Tensor, weight: Tensor, wants_hidden: bool, wants_weight: bool) -> None:
        self._hidden, self._weight = hidden, weight
        self._by_hidden = torch.empty_like(hidden) if wants_hidden else None
        # A 16-bit sum over tokens would lose the contribution of a tile.
        sums = compute_dtype(weight.dtype)
        self._by_weight = torch.zeros(weight.shape, dtype=sums, device=weight.device) if wants_weight else None

    def add(self, grad: Tensor, rows: slice) -> None:
        """Adds ``grad[R, V]``, the gradient of the logits of ``rows``."""
        grad = grad.to(self._hidden.dtype)
        for first in range(0, len(grad), sizes.ROW_TILE):
            tile = grad[first : first + sizes.ROW_TILE]
            places = slice(rows.start + first, rows.start + first + len(tile))
            if self._by_hidden is not None:
                torch.mm(tile, self._weight, out=self._by_hidden[places])
            if self._by_weight is None:
                continue
            if self._by_weight.dtype == tile.dtype:
                self._by_weight.addmm_(tile.t(), self._hidden[places])
            else:
                self._by_weight += tile.t() @ self._hidden[places]

    def result(self) -> tuple[Tensor | None, Tensor | None]:
        """Returns the gradients by ``hidden`` and ``weight``, in their dtypes; ``None`` for those not needed."""
        return self._by_hidden, None if self._by_weight is None else self._by_weight.to(self._weight.dtype)


def _logprob_grad(logprobs: Tensor, targets: Tensor, grad: Tensor) -> Tensor:
    """Returns the gradient of ``log_softmax(z)[target]`` by z, ``onehot - softmax(z)``, times ``grad[T]``."""
    out = logprobs.exp_().mul_(-grad.unsqueeze(1))
    return out.scatter_add_(1, targets.unsqueeze(1), grad.unsqueeze(1))


def first_argmax(x: Tensor) -> Tensor:
    """Returns the lowest index among equal maxima, which torch's argmax does not guarantee."""
    return (x == x.amax(-1, keepdim=True)).to(torch.uint8).argmax(-1)


def filter_logits(scaled: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Applies min-p, then top-k, then top-p to what is left, in vLLM's order. Filtered logits become -inf; among equal logits the lowest
    ids are kept."""
    width = scaled.shape[1]
    if bool((min_p > 0).any()):
        floor = scaled.amax(-1, keepdim=True) + min_p.double().log().unsqueeze(1)
        scaled = scaled.masked_fill(scaled < floor, -math.inf)
    if bool((top_k > 0).any()) or bool((top_p < 1).any()):
        ordered, order = scaled.sort(dim=-1, descending=True, stable=True)
        rank = torch.arange(width, device=scaled.device)
        limit = torch.where(top_k > 0, top_k, torch.full_like(top_k, width)).unsqueeze(1)
        ordered = ordered.masked_fill(rank >= limit, -math.inf)
        weights = ordered.softmax(-1)
        before = weights.cumsum(-1) - weights
        dropped = (before >= top_p.double().unsqueeze(1)) & (top_p < 1).unsqueeze(1) & (rank > 0)
        scaled = torch.full_like(scaled, -math.inf).scatter(1, order, ordered.masked_fill(dropped, -math.inf))
    return scaled

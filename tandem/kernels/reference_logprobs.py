"""Log-probabilities of tokens, and which tokens may be drawn, in plain torch (see ``reference``)."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tandem.kernels.reference_dtype import TILE_ROWS, compute_dtype

Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]

_CHUNK_ELEMENTS = 1 << 22
"""Logits that are held at a time."""


def log_softmax(logits: Tensor) -> Tensor:
    return logits.contiguous().log_softmax(-1, dtype=compute_dtype(logits.dtype))


def gather_columns(x: Tensor, columns: Tensor) -> Tensor:
    return x.gather(1, columns.unsqueeze(1)).squeeze(1)


class TokenLogprobsFunction(torch.autograd.Function):
    """Logits are computed chunk by chunk, and again in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, linear: Linear
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(hidden, weight, targets)
        ctx.temperature, ctx.linear = temperature, linear
        raw = hidden.new_empty(len(hidden), dtype=compute_dtype(hidden.dtype))
        scaled, entropy = torch.empty_like(raw), torch.empty_like(raw)
        for rows in _chunks(hidden, weight):
            logits = linear(hidden[rows], weight, None)
            logprobs = log_softmax(logits)
            raw[rows] = gather_columns(logprobs, targets[rows])
            if temperature != 1:
                logprobs = log_softmax(logits / temperature)
                scaled[rows] = gather_columns(logprobs, targets[rows])
            # A token of probability 0 has entropy 0, and not 0 * -inf.
            entropy[rows] = -(logprobs.exp() * logprobs.clamp_min(torch.finfo(logprobs.dtype).min)).sum(-1)
        ctx.mark_non_differentiable(entropy)
        return raw, scaled, entropy

    @staticmethod
    def backward(ctx: Any, grad_raw: Tensor, grad_scaled: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        hidden, weight, targets = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        for rows in _chunks(hidden, weight):
            logits = ctx.linear(hidden[rows], weight, None)
            grad = _logprob_grad(log_softmax(logits), targets[rows], grad_raw[rows])
            if ctx.temperature != 1:
                scaled = log_softmax(logits / ctx.temperature)
                grad += _logprob_grad(scaled, targets[rows], grad_scaled[rows] / ctx.temperature)
            grad = grad.to(hidden.dtype)
            if grad_hidden is not None:
                torch.mm(grad, weight, out=grad_hidden[rows])
            if grad_weight is not None:
                grad_weight.addmm_(grad.t(), hidden[rows])
        return grad_hidden, grad_weight, None, None, None


def _logprob_grad(logprobs: Tensor, targets: Tensor, grad: Tensor) -> Tensor:
    """The gradient of ``log_softmax(z)[target]`` by z, ``onehot - softmax(z)``, times ``grad[T]``."""
    out = logprobs.exp_().mul_(-grad.unsqueeze(1))
    return out.scatter_add_(1, targets.unsqueeze(1), grad.unsqueeze(1))


def _chunks(hidden: Tensor, weight: Tensor) -> list[slice]:
    size = max(1, _CHUNK_ELEMENTS // weight.shape[0] // TILE_ROWS) * TILE_ROWS
    return [slice(start, min(start + size, len(hidden))) for start in range(0, len(hidden), size)]


def first_argmax(x: Tensor) -> Tensor:
    """The lowest index among equals: torch's argmax leaves that open."""
    return (x == x.amax(-1, keepdim=True)).to(torch.uint8).argmax(-1)


def filter_logits(scaled: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """min-p, then top-k, then top-p on what is left, in vLLM's order. Filtered logits become -inf; among equal logits
    the lowest ids stay."""
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

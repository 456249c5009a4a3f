"""Log-probabilities of tokens from hidden states and the LM head, without all logits [T, V] in memory at once.

The forward pass computes the logits of a few rows at a time and keeps two numbers per row of their softmax. The backward pass computes them
again in rectangles of some rows and some columns of [T, V]. Rectangles are aligned to the blocks in which the matrix product accumulates,
so that gradients have the bits of a single rectangle of all of [T, V]. ``layout.lm_head`` has the sizes.
"""

from typing import Any

import torch
from torch import Tensor

from tandem.kernels.api import PackedWeight, TokenLogprobs
from tandem.kernels.cpu.calls import Calls, dense, shape_error
from tandem.layout import lm_head as sizes


def token_logprobs(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, calls: Calls, cap: float | None = None) -> TokenLogprobs:
    """See ``Kernels.token_logprobs``."""
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        raw, scaled, entropy = _TokenLogprobs.apply(hidden, weight, targets, temperature, calls, cap)
    else:
        raw, scaled, entropy = _forward(dense(hidden), dense(weight), _ids(targets), temperature, calls, None, None, cap)
    return TokenLogprobs(raw, raw if temperature == 1 else scaled, entropy)


class _TokenLogprobs(torch.autograd.Function):
    """Keeps all logits for the backward pass if they are few."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, calls: Calls, cap: float | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        hidden, weight, targets = dense(hidden), dense(weight), _ids(targets)
        ctx.temperature, ctx.calls, ctx.cap = temperature, calls, cap
        softmaxes = hidden.new_empty(len(hidden), 2 if temperature == 1 else 4)
        kept = hidden.new_empty(len(hidden), len(weight)) if sizes.keeps_logits(len(hidden), len(weight)) else None
        raw, scaled, entropy = _forward(hidden, weight, targets, temperature, calls, softmaxes, kept, cap)
        ctx.save_for_backward(hidden, weight, targets, softmaxes, kept)
        ctx.mark_non_differentiable(entropy)
        ctx.set_materialize_grads(False)
        return raw, raw.new_empty(0) if scaled is None else scaled, entropy

    @staticmethod
    def backward(
        ctx: Any, grad_raw: Tensor | None, grad_scaled: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        hidden, weight, targets, softmaxes, kept = ctx.saved_tensors
        calls: Calls = ctx.calls
        if ctx.temperature == 1:
            grad_scaled = None
        if grad_raw is None and grad_scaled is None:
            return None, None, None, None, None, None
        grad_raw = torch.zeros(len(hidden)) if grad_raw is None else dense(grad_raw)
        grad_scaled = None if grad_scaled is None else dense(grad_scaled)
        if not len(hidden):
            return torch.zeros_like(hidden), torch.zeros_like(weight), None, None, None, None
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        memory: Tensor | None = None
        for rows, columns in sizes.backward_rectangles(len(hidden), len(weight)):
            x, part = hidden[rows], weight[columns]
            # The first rectangle is the largest.
            memory = hidden.new_empty(len(x) * len(part)) if memory is None else memory
            grad = memory[: len(x) * len(part)].view(len(x), len(part))
            logits = _logits(calls, x, part, grad, ctx.cap) if kept is None else kept[rows, columns]
            calls.logprobs_backward(
                logits, targets[rows], columns.start, ctx.temperature, softmaxes[rows], grad_raw[rows],
                None if grad_scaled is None else grad_scaled[rows], grad, ctx.cap,
            )  # fmt: skip
            # The first product is written instead of added to 0, which keeps the bits of -0.
            if grad_hidden is not None:
                calls.linear_grad_x(grad, part, grad_hidden[rows], adds=columns.start > 0)
            if grad_weight is not None:
                calls.linear_grad_weight(grad, x, grad_weight[columns], adds=rows.start > 0)
        return grad_hidden, grad_weight, None, None, None, None


def _forward(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, calls: Calls, softmaxes: Tensor | None, kept: Tensor | None,
    cap: float | None,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Returns the fields of ``TokenLogprobs``. ``softmaxes`` and ``kept``, if given, receive what a backward pass needs, and all logits."""
    if hidden.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise shape_error("token_logprobs hidden", hidden, f"[T, {weight.shape[1]}]")
    raw, scaled, entropy = torch.empty(len(hidden)), None if temperature == 1 else torch.empty(len(hidden)), torch.empty(len(hidden))
    size = sizes.forward_rows(len(weight))
    once = calls.pack(weight) if size < len(hidden) and weight.numel() <= sizes.PACKED_FLOATS else None
    memory = hidden.new_empty(min(size, len(hidden)), len(weight)) if kept is None else kept
    for start in range(0, len(hidden), size):
        rows = slice(start, min(start + size, len(hidden)))
        at = memory[: rows.stop - start] if kept is None else memory[rows]
        logits = _logits(calls, hidden[rows], weight if once is None else once, at, cap)
        calls.logprobs(
            logits, targets[rows], temperature, raw[rows], None if scaled is None else scaled[rows], entropy[rows],
            None if softmaxes is None else softmaxes[rows],
        )  # fmt: skip
    return raw, scaled, entropy


def _logits(calls: Calls, hidden: Tensor, weight: Tensor | PackedWeight, out: Tensor, cap: float | None) -> Tensor:
    logits = calls.logits(hidden, weight, out)
    return logits if cap is None else calls.soft_cap(logits, cap, logits)


def _ids(targets: Tensor) -> Tensor:
    return targets.long().contiguous()

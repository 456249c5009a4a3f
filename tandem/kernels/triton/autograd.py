"""Gradients. The backward passes of attention, norms, the gate and rotary embedding are Triton kernels. The others are torch's; with head
norms before the rotation, those of the reference kernels' formula. Only the forward pass must keep its bits."""

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tandem.kernels.reference_dtype import soft_cap_slope
from tandem.kernels.triton import attention, attention_backward, latent_attention, rope, rows, rows_backward
from tandem.kernels.triton import logits as logit_calls
from tandem.kernels.triton.tiles import Tiles
from tandem.layout.shapes import Activation

Outputs = Tensor | tuple[Tensor, ...]


def wants_grad(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def through_reference(own: Callable[..., Outputs], reference: Callable[..., Outputs], *tensors: Tensor | None) -> Any:
    """Runs ``own(*tensors)`` with the gradients of ``reference(*tensors)``."""
    return _ThroughReference.apply(own, reference, *tensors) if wants_grad(*tensors) else own(*tensors)


class _ThroughReference(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Callable[..., Outputs], reference: Callable[..., Outputs], *tensors: Tensor | None) -> Outputs:
        ctx.reference = reference
        ctx.given = [x is not None for x in tensors]
        ctx.save_for_backward(*(x for x in tensors if x is not None))
        return own(*tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        saved, needs = iter(ctx.saved_tensors), ctx.needs_input_grad[2:]
        inputs = [
            next(saved).detach().requires_grad_(needed) if given else None for given, needed in zip(ctx.given, needs, strict=True)
        ]
        wanted = [x for x in inputs if x is not None and x.requires_grad]
        with torch.enable_grad():
            result = ctx.reference(*inputs)
        outputs = (result,) if isinstance(result, Tensor) else result
        reached = [(out, grad) for out, grad in zip(outputs, grads, strict=True) if out.requires_grad]
        got = iter(torch.autograd.grad([out for out, _ in reached], wanted, [grad for _, grad in reached], allow_unused=True))
        return None, None, *(next(got) if x is not None and x.requires_grad else None for x in inputs)


class RmsNorm(torch.autograd.Function):
    """Returns (the norm of ``x`` or of ``x + residual``, that sum); saves only the sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, centred: bool) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        out, total = rows.rms_norm(x, residual, weight, eps, centred)
        ctx.save_for_backward(total, weight)
        ctx.eps, ctx.centred = eps, centred
        ctx.x_dtype, ctx.residual_dtype = x.dtype, None if residual is None else residual.dtype
        # An input that is returned unchanged is not an output of its own.
        return out, total.view_as(total) if residual is None else total

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, grad_total: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        total, weight = ctx.saved_tensors
        if grad is None:
            grad = torch.zeros_like(total)
        by_y, by_x, by_weight = rows_backward.rms_norm(grad, grad_total, total, weight, ctx.eps, ctx.centred, ctx.x_dtype)
        by_residual = None if ctx.residual_dtype is None else by_y.to(ctx.residual_dtype)
        return by_x, by_residual, by_weight, None, None


class GateMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, activation: Activation) -> Tensor:
        ctx.save_for_backward(gate_up)
        ctx.activation = activation
        return rows.gate_mul(gate_up, activation)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (gate_up,) = ctx.saved_tensors
        return rows_backward.gate_mul(grad, gate_up, ctx.activation), None


class SoftCap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cap: float) -> Tensor:
        out = rows.soft_cap(x, cap)
        ctx.save_for_backward(out)
        ctx.cap = cap
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (capped,) = ctx.saved_tensors
        return (grad * soft_cap_slope(capped, ctx.cap)).to(grad.dtype), None


class Rope(torch.autograd.Function):
    """Rotary embedding without head norms: nothing of the projection is saved."""

    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, positions: Tensor, cos_sin: Tensor, heads: tuple[int, int, int], eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(positions, cos_sin)
        ctx.heads, ctx.dtype = heads, qkv.dtype
        return rope.rope(qkv, positions, cos_sin, heads, None, None, eps)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        positions, cos_sin = ctx.saved_tensors
        return rows_backward.rope((grads[0], grads[1], grads[2]), positions, cos_sin, ctx.heads, ctx.dtype), None, None, None, None


class Linear(torch.autograd.Function):
    """A matrix product; its gradients are two other products, whose bits need not match an engine's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, multiply: Callable[..., Tensor]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.bias_dtype = None if bias is None else bias.dtype
        return multiply(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        return (
            grad @ weight if ctx.needs_input_grad[0] else None,
            grad.t() @ x if ctx.needs_input_grad[1] else None,
            grad.sum(0, dtype=torch.float32).to(ctx.bias_dtype) if ctx.needs_input_grad[2] else None,
            None,
        )


class GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bounds: Tensor, multiply: Callable[..., Tensor]) -> Tensor:
        ctx.save_for_backward(x, weight, bounds)
        return multiply(x, weight, bounds)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight, bounds = ctx.saved_tensors
        at = bounds.tolist()
        grad_x = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        for g, (start, end) in enumerate(itertools.pairwise(at)):
            rows = slice(start, end)
            if end > start and grad_x is not None:
                grad_x[rows] = grad[rows] @ weight[g]
            if end > start and grad_weight is not None:
                grad_weight[g] = grad[rows].t() @ x[rows]
        return grad_x, grad_weight, None, None


class PackedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float, window: int | None, cap: float | None, tiles: Tiles,
        sinks: Tensor | None,
    ) -> Tensor:  # fmt: skip
        log_total = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        out = attention.packed(q, k, v, cu_seqlens, scale, window, tiles, log_total, cap, sinks)
        ctx.save_for_backward(q, k, v, out, log_total, cu_seqlens, sinks)
        ctx.settings = scale, window, cap, tiles
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        *saved, sinks = ctx.saved_tensors
        by_sinks = attention_backward.sinks(grad, saved[3], saved[4], sinks) if ctx.needs_input_grad[8] else None
        return *attention_backward.packed(grad, *saved, *ctx.settings), None, None, None, None, None, by_sinks


class LatentAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float, tiles: Tiles) -> Tensor:
        log_total = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        out = latent_attention.packed(q, k, v, cu_seqlens, scale, tiles, log_total)
        ctx.save_for_backward(q, k, v, out, log_total, cu_seqlens)
        ctx.settings = scale, tiles
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return *latent_attention.gradients(grad, *ctx.saved_tensors, *ctx.settings), None, None, None


class TokenLogprobs(torch.autograd.Function):
    """Computes logits in chunks of rows, and again in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, multiply: Callable[..., Tensor], block: int,
        chunks: list[slice], cap: float | None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        raw, scaled, entropy = (torch.empty(len(hidden), dtype=torch.float32, device=hidden.device) for _ in range(3))
        for chunk in chunks:
            logits = multiply(hidden[chunk], weight, None)
            part = logit_calls.logprobs(logits if cap is None else rows.soft_cap(logits, cap), targets[chunk], temperature, block)
            raw[chunk], scaled[chunk], entropy[chunk] = part.raw, part.scaled, part.entropy
        ctx.save_for_backward(hidden, weight, targets, raw, scaled)
        ctx.temperature, ctx.multiply, ctx.block, ctx.chunks, ctx.cap = temperature, multiply, block, chunks, cap
        ctx.mark_non_differentiable(entropy)
        return raw, scaled, entropy

    @staticmethod
    def backward(ctx: Any, grad_raw: Tensor, grad_scaled: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        hidden, weight, targets, raw, scaled = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device) if ctx.needs_input_grad[1] else None
        for chunk in ctx.chunks:
            logits, slope = ctx.multiply(hidden[chunk], weight, None), None
            if ctx.cap is not None:
                logits = rows.soft_cap(logits, ctx.cap)
                slope = soft_cap_slope(logits, ctx.cap)
            grad = logit_calls.logprobs_backward(
                logits, targets[chunk], raw[chunk], scaled[chunk], grad_raw[chunk], grad_scaled[chunk], ctx.temperature, ctx.block
            )
            grad = grad if slope is None else (grad * slope).to(grad.dtype)
            if grad_hidden is not None:
                torch.mm(grad, weight, out=grad_hidden[chunk])
            if grad_weight is not None:
                grad_weight += grad.t() @ hidden[chunk]
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None, None, None, None, None

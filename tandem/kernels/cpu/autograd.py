"""Gradients of the C++ kernels. Backward passes also sum in a fixed order, so that gradients do not depend on threads."""

import itertools
from typing import Any

import torch
from torch import Tensor

from tandem.kernels.cpu.attention_calls import AttentionCalls
from tandem.kernels.cpu.calls import Calls, dense
from tandem.layout.shapes import Activation


def _dense_or_none(x: Tensor | None) -> Tensor | None:
    return None if x is None else dense(x)


class Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, calls: Calls) -> Tensor:
        x, weight = dense(x), dense(weight)
        ctx.save_for_backward(x, weight)
        ctx.calls = calls
        return calls.linear(x, weight, _dense_or_none(bias))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        calls: Calls = ctx.calls
        grad = dense(grad)
        return (
            calls.linear_grad_x(grad, weight) if ctx.needs_input_grad[0] else None,
            calls.linear_grad_weight(grad, x) if ctx.needs_input_grad[1] else None,
            calls.linear_grad_bias(grad) if ctx.needs_input_grad[2] else None,
            None,
        )


class GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bounds: Tensor, calls: Calls) -> Tensor:
        x, weight = dense(x), dense(weight)
        ctx.save_for_backward(x, weight)
        ctx.calls, ctx.bounds = calls, bounds.tolist()
        return calls.grouped_linear(x, weight, bounds)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        calls: Calls = ctx.calls
        grad = dense(grad)
        grad_x = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        for group, (start, end) in enumerate(itertools.pairwise(ctx.bounds)):
            if end > start and grad_x is not None:
                calls.linear_grad_x(grad[start:end], weight[group], grad_x[start:end])
            if end > start and grad_weight is not None:
                calls.linear_grad_weight(grad[start:end], x[start:end], grad_weight[group])
        return grad_x, grad_weight, None, None


class Route(torch.autograd.Function):
    """Softmax over all experts; the gates are the probabilities of the chosen ones."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, each: int, normalised: bool, calls: Calls) -> tuple[Tensor, ...]:
        routing = calls.route(dense(logits), each, normalised)
        ctx.save_for_backward(logits, routing.gates, routing.experts)
        ctx.normalised = normalised
        ctx.mark_non_differentiable(*routing[1:])
        return tuple(routing)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        logits, gates, experts = ctx.saved_tensors
        probabilities = logits.softmax(-1)
        chosen = probabilities.gather(1, experts)
        if ctx.normalised:
            grad = (grad - (grad * gates).sum(1, keepdim=True)) / chosen.sum(1, keepdim=True)
        along = (grad * chosen).sum(1, keepdim=True)
        return (-along * probabilities).scatter_add_(1, experts, grad * chosen), None, None, None


class RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, centred: bool, calls: Calls) -> Tensor:
        x, weight = dense(x), dense(weight)
        rstd = torch.empty(x.shape[0], dtype=torch.float32)
        out = calls.rms_norm(x, weight, eps, centred, rstd)
        ctx.save_for_backward(x, weight, rstd)
        ctx.centred, ctx.calls = centred, calls
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight, rstd = ctx.saved_tensors
        grad_x, grad_weight = ctx.calls.rms_norm_backward(x, weight, dense(grad), None, ctx.centred, rstd)
        return grad_x, grad_weight, None, None, None


class AddRmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor, weight: Tensor, eps: float, centred: bool, calls: Calls
    ) -> tuple[Tensor, Tensor]:
        weight = dense(weight)
        rstd = torch.empty(x.shape[0], dtype=torch.float32)
        out, total = calls.add_rms_norm(dense(x), dense(residual), weight, eps, centred, rstd)
        ctx.save_for_backward(total, weight, rstd)
        ctx.centred, ctx.calls = centred, calls
        ctx.set_materialize_grads(False)
        return out, total

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, grad_total: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        total, weight, rstd = ctx.saved_tensors
        if grad is None:
            return grad_total, grad_total, None, None, None, None
        grad_x, grad_weight = ctx.calls.rms_norm_backward(total, weight, dense(grad), _dense_or_none(grad_total), ctx.centred, rstd)
        return grad_x, grad_x, grad_weight, None, None, None


class GateMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, activation: Activation, calls: Calls) -> Tensor:
        gate_up = dense(gate_up)
        ctx.save_for_backward(gate_up)
        ctx.activation, ctx.calls = activation, calls
        return calls.gate_mul(gate_up, activation)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return ctx.calls.gate_mul_backward(ctx.saved_tensors[0], dense(grad), ctx.activation), None, None


class SoftCap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cap: float, calls: Calls) -> Tensor:
        out = calls.soft_cap(dense(x), cap)
        ctx.save_for_backward(out)
        ctx.cap, ctx.calls = cap, calls
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return ctx.calls.soft_cap_backward(ctx.saved_tensors[0], dense(grad), ctx.cap), None, None


class Rope(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, positions: Tensor, cos_sin: Tensor, heads: tuple[int, int, int], q_norm: Tensor | None,
        k_norm: Tensor | None, eps: float, calls: AttentionCalls,
    ) -> tuple[Tensor, Tensor, Tensor]:
        qkv, cos_sin, positions = dense(qkv), dense(cos_sin), positions.long().contiguous()
        ctx.save_for_backward(qkv, positions, cos_sin, q_norm, k_norm)
        ctx.heads, ctx.eps, ctx.calls = heads, eps, calls
        return calls.rope(qkv, positions, cos_sin, heads, q_norm, k_norm, eps)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        qkv, positions, cos_sin, q_norm, k_norm = ctx.saved_tensors
        given = (dense(grads[0]), dense(grads[1]), dense(grads[2]))
        grad_qkv, norms = ctx.calls.rope_backward(qkv, positions, cos_sin, ctx.heads, q_norm, k_norm, ctx.eps, given)
        grad_q_norm = norms[0] if ctx.needs_input_grad[4] else None
        grad_k_norm = norms[1] if ctx.needs_input_grad[5] else None
        return grad_qkv, None, None, None, grad_q_norm, grad_k_norm, None, None


class RoundKV(torch.autograd.Function):
    """A straight-through gradient (Bengio et al., 2013)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype, calls: AttentionCalls) -> Tensor:
        return calls.round_kv(dense(x), dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return grad, None, None


class PackedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float, window: int | None, calls: AttentionCalls,
        query_start: Tensor | None, cap: float | None, sinks: Tensor | None,
    ) -> Tensor:
        q, k, v, sinks = dense(q), dense(k), dense(v), _dense_or_none(sinks)
        log_sum = torch.empty(q.shape[:2], dtype=torch.float32)
        out = calls.packed_attention(q, k, v, cu_seqlens, scale, window, log_sum, query_start, cap, sinks)
        ctx.save_for_backward(q, k, v, out, log_sum, cu_seqlens, query_start, sinks)
        ctx.scale, ctx.window, ctx.cap, ctx.calls = scale, window, cap, calls
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        *saved, cu_seqlens, query_start, sinks = ctx.saved_tensors
        calls, grad = ctx.calls, dense(grad)
        grads = calls.packed_attention_backward(grad, tuple(saved), cu_seqlens, ctx.scale, ctx.window, query_start, ctx.cap)
        by_sinks = calls.sinks_backward(grad, *saved[3:], sinks) if ctx.needs_input_grad[9] else None
        return *grads, None, None, None, None, None, None, by_sinks

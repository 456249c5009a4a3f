"""The law of products in bf16: linear layers whose operands are rounded to bf16 and whose sums are fp32, in plain torch.

The sum is that of the dot-product instruction of x86, ``VDPBF16PS``, in one order:

    out[m, n] = sum over blocks of K_BLOCK absolute k, in order, of one chain over the block's pairs (k, k + 1)
    chain: acc = flush(round(x[k + 1] w[k + 1] + acc)), then acc = flush(round(x[k] w[k] + acc)), from acc = 0

Each ``round`` is one rounding to the nearest fp32, ties to even, of the exact sum. Denormal operands are zeros, and so are results that are denormal
after rounding with an unbounded exponent (Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2, VDPBF16PS; AMD's Zen 4 does the
same). Blocks are added with plain fp32 additions; a missing last factor is 0. Kernels on a processor without the instruction compute the same bits.
"""

from typing import Any

import torch
from torch import Tensor

from tandem.kernels.api import TokenLogprobs
from tandem.kernels.reference_dtype import soft_cap
from tandem.kernels.reference_logprobs import entropy_of, gather_columns, log_softmax
from tandem.layout.lm_head import K_BLOCK

SMALLEST = torch.finfo(torch.float32).tiny
_SAFE = 2.0**-100
"""Where no product of two numbers is smaller, every sum of them is 0 or larger than ``SMALLEST``, and every product is exact in fp32."""
_LARGE = 2.0**100


def flushed(x: Tensor) -> Tensor:
    """Returns ``x`` with denormal numbers replaced by zeros of their sign."""
    return torch.where(x.abs() < SMALLEST, torch.copysign(torch.zeros_like(x), x), x)


def round_bf16(x: Tensor) -> Tensor:
    """Rounds fp32 numbers to the nearest bf16 ones, ties to even, denormal ones to zeros."""
    return flushed(x).bfloat16().to(x.dtype)


def product(x: Tensor, weight: Tensor) -> Tensor:
    """Computes ``x[M, K] @ weight[N, K].T`` of rounded operands -> [M, N] fp32."""
    a, b = round_bf16(x), round_bf16(weight)
    if a.shape[1] % 2:
        a, b = (torch.nn.functional.pad(t, (0, 1)) for t in (a, b))
    step = _plain_step if _is_plain(a, b) else _exact_step
    columns_of_a, columns_of_b = a.t().contiguous(), b.t().contiguous()
    total: Tensor | None = None
    for first in range(0, a.shape[1], K_BLOCK):
        chain = x.new_zeros(len(x), len(weight))
        for pair in range(first, min(first + K_BLOCK, a.shape[1]), 2):
            for k in (pair + 1, pair):
                chain = step(chain, columns_of_a[k], columns_of_b[k])
        total = chain if total is None else total + chain
    return x.new_zeros(len(x), len(weight)) if total is None else total


def _is_plain(a: Tensor, b: Tensor) -> bool:
    """Returns whether fp32 additions of fp32 products are the steps of a chain: nothing can overflow or be denormal."""
    if not a.numel() or not b.numel():
        return True
    sizes = [t.abs() for t in (a, b)]
    largest = float(sizes[0].max()) * float(sizes[1].max()) * a.shape[1]
    smallest = [float(torch.where(size == 0, torch.inf, size).min()) for size in sizes]
    return largest < _LARGE and smallest[0] * smallest[1] >= _SAFE


def _plain_step(chain: Tensor, a: Tensor, b: Tensor) -> Tensor:
    # The product is exact, so that a fused multiply-add has the same bits.
    return chain.addr_(a, b)


def _exact_step(chain: Tensor, a: Tensor, b: Tensor) -> Tensor:
    wide, exact = chain.double(), torch.outer(a.double(), b.double())
    total = wide + exact
    # What the addition lost (Knuth, 1969), for one rounding instead of two: the last bit becomes 1 ("round to odd", Boldo and Melquiond, 2005).
    part = total - wide
    lost = (wide - (total - part)) + (exact - part)
    is_even = total.view(torch.int64) % 2 == 0
    moves = is_even & (lost != 0) & total.isfinite() & lost.isfinite()
    towards = torch.where((lost > 0) == (total > 0), 1, -1)
    total = torch.where(moves, (total.view(torch.int64) + towards).view(torch.float64), total)
    # Rounded where no number is denormal, because the grid of denormal numbers is coarser.
    small = (total * _LARGE).float()
    is_tiny = small.abs() < SMALLEST * _LARGE
    rounded = torch.where(total.abs() < _SAFE, (small.double() / _LARGE).float(), total.float())
    return torch.where(is_tiny, torch.copysign(torch.zeros_like(rounded), rounded), rounded)


class Bf16Linear(torch.autograd.Function):
    """``product`` with a bias, and its gradients as products of the same law: that of ``x`` sums along the outputs, that of the weight along the rows.
    ``rounds``: the result and the gradient of ``x`` are rounded to bf16 numbers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, rounds: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.rounds = rounds
        out = product(x, weight)
        out = out if bias is None else out + bias
        return round_bf16(out) if rounds else out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        grad_x = product(grad, weight.t()) if ctx.needs_input_grad[0] else None
        return (
            round_bf16(grad_x) if grad_x is not None and ctx.rounds else grad_x,
            product(grad.t(), x.t()) if ctx.needs_input_grad[1] else None,
            grad.sum(0) if ctx.needs_input_grad[2] else None,
            None,
        )


def whole_logprobs(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, cap: float | None) -> TokenLogprobs:
    """Computes ``Kernels.token_logprobs`` of all logits at once, whose products and their gradients are those of this module; logits are not rounded."""
    logits = Bf16Linear.apply(hidden, weight, None, False)
    logits = logits if cap is None else soft_cap(logits, cap)
    logprobs = log_softmax(logits)
    raw = gather_columns(logprobs, targets.long())
    scaled = logprobs if temperature == 1 else log_softmax(logits / temperature)
    return TokenLogprobs(raw, raw if temperature == 1 else gather_columns(scaled, targets.long()), entropy_of(scaled.detach()))

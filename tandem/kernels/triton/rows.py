"""Launches of the programs over rows: norms, the gate of an MLP, log-probabilities, sampling."""

import torch
from torch import Tensor

from tandem.kernels.api import SampledRows, TokenLogprobs
from tandem.kernels.triton.launch import UNFUSED, check, dense, power_of_two
from tandem.kernels.triton.programs import rows as programs
from tandem.kernels.triton.programs import sampling as sampling_programs


def rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(the norm of ``x`` or of ``x + residual``, that sum). The last axis is normed."""
    width = x.shape[-1]
    check("norm weight", weight, width)
    check("norm x", x, *x.shape)
    x, weight = dense(x), dense(weight)
    other = x if residual is None else dense(residual)
    out, total = torch.empty_like(x), x if residual is None else torch.empty_like(x)
    rows = x.numel() // width
    if rows:
        block = power_of_two(width)
        programs.rms_norm[(rows,)](
            x, other, weight, out, total, width, eps, ADD=residual is not None, BLOCK=block, num_warps=_warps(block), **UNFUSED
        )
    return out, total


def silu_mul(gate_up: Tensor) -> Tensor:
    """See ``Kernels.silu_mul``."""
    rows, double = gate_up.shape
    check("silu_mul gate_up", gate_up, rows, double)
    gate_up, width = dense(gate_up), double // 2
    out = gate_up.new_empty(rows, width)
    if out.numel():
        block = min(1024, power_of_two(width))
        programs.silu_mul[(rows, -(-width // block))](gate_up, out, width, BLOCK=block, num_warps=4, **UNFUSED)
    return out


def logprobs(logits: Tensor, targets: Tensor, temperature: float | None, block: int) -> TokenLogprobs:
    """Of ``targets[R]`` under ``logits[R, V]``; without a ``temperature`` only ``raw`` is filled."""
    rows, width = logits.shape
    check("logprobs logits", logits, rows, width)
    logits, targets = dense(logits), dense(targets.long())
    raw, scaled, entropy = torch.empty(3, rows, dtype=torch.float32, device=logits.device)
    if rows:
        programs.logprobs[(rows,)](
            logits, targets, raw, scaled, entropy, width, 1.0 if temperature is None else float(temperature), SCALED=temperature is not None,
            BLOCK=block, num_warps=4, **UNFUSED,
        )  # fmt: skip
    return TokenLogprobs(raw, scaled, entropy)


def sample(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniform: Tensor, block: int
) -> SampledRows:
    """See ``Kernels.sample_rows``."""
    rows, width = logits.shape
    check("sample logits", logits, rows, width)
    logits = dense(logits)
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    sampling = torch.empty(rows, dtype=torch.float32, device=logits.device)
    settings = [x.contiguous() for x in (temperature.float(), top_k.long(), top_p.float(), min_p.float(), uniform.double())]
    if rows:
        sampling_programs.sample[(rows,)](logits, *settings, tokens, sampling, width, BLOCK=block, num_warps=4, **UNFUSED)
    return SampledRows(tokens, logprobs(logits, tokens, None, block).raw, sampling)


def _warps(block: int) -> int:
    return max(1, min(16, block // 256))

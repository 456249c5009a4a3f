"""Encoding and decoding of KV cache entries, in plain torch; the C++ kernels compute the same bits.

``int8`` codes are integers in -127..127, those of ``int4`` (stored as ``uint8``, two in a byte) in -7..7, ``float8_e4m3fn`` codes the numbers of
that format up to 448 (Micikevicius et al., 2022, "FP8 formats for deep learning"). The scale of one token and head is its largest magnitude over
the largest code, so that no code overflows, and at least the smallest normal fp32. Value = code x scale, one fp32 product. A head with a
non-finite value is decoded as NaN, so that it cannot pass for a finite one.
"""

from typing import Any

import torch
from torch import Tensor

from tandem.types.kv_cache import KVCacheDtype

LARGEST_CODE = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0, torch.uint8: 7.0}
_STORED = {"bfloat16": torch.bfloat16, "int8": torch.int8, "fp8_e4m3": torch.float8_e4m3fn, "int4": torch.uint8}
PAIRS = torch.uint8
"""The dtype of two codes of 4 bits: component d of a head in the low bits of byte d, component d + D / 2 in the high ones, each plus 8."""


def stored_dtype(name: KVCacheDtype, compute: torch.dtype) -> torch.dtype:
    """Returns the dtype of the tensors of a cache with ``kv_cache_dtype`` ``name``, for a model that computes in ``compute``."""
    return compute if name == "auto" else _STORED[name]


def is_scaled(dtype: torch.dtype) -> bool:
    """Returns whether values of ``dtype`` are codes that need a scale."""
    return dtype in LARGEST_CODE


def stored_size(size: int, dtype: torch.dtype) -> int:
    """Returns the elements of ``dtype`` that a head of ``size`` components takes."""
    return size // 2 if dtype == PAIRS else size


def encode(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Returns ``x[..., D]`` encoded as ``dtype`` ([..., D / 2] of pairs), and the fp32 scales [...] if it has any."""
    if not is_scaled(dtype):
        return x.to(dtype), None
    wide = x.to(torch.float32)
    largest = wide.abs().amax(-1)
    # Divided by a tensor: torch may replace a division by a Python number with a product with its reciprocal, which has other bits.
    scale = (largest / torch.full_like(largest, LARGEST_CODE[dtype])).clamp_min(torch.finfo(torch.float32).tiny)
    finite = wide.isfinite().all(-1)
    codes = torch.where(finite.unsqueeze(-1), wide / scale.unsqueeze(-1), 0.0)
    codes = codes if dtype == torch.float8_e4m3fn else codes.round()
    if dtype == PAIRS:
        low, high = (codes + 8).to(dtype).chunk(2, dim=-1)
        return low | high << 4, torch.where(finite, scale, torch.nan)
    return codes.to(dtype), torch.where(finite, scale, torch.nan)


def decode(codes: Tensor, scale: Tensor | None, dtype: torch.dtype, axis: int = -1) -> Tensor:
    """Returns the values of ``codes`` as ``dtype``; ``scale``, if given, has axes of length 1 to broadcast over them. ``axis``: that of a head's components."""
    if codes.dtype == PAIRS:
        codes = torch.cat((codes & 15, codes >> 4), dim=axis).to(torch.float32) - 8
    return codes.to(dtype) if scale is None else (codes.to(torch.float32) * scale).to(dtype)


class RoundKV(torch.autograd.Function):
    """Encodes and decodes; the gradient is straight-through (Bengio et al., 2013)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype) -> Tensor:
        codes, scale = encode(x, dtype)
        return decode(codes, None if scale is None else scale.unsqueeze(-1), x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad, None

"""What a KV cache makes of a number, in plain torch; the C++ kernels find the same bits.

``int8`` codes are whole numbers in -127..127, ``float8_e4m3fn`` codes the numbers of that format up to 448 (Micikevicius et
al., 2022, "FP8 formats for deep learning"). The scale of one token and head is its largest magnitude over the largest code, so
that no code overflows, and at least the least normal fp32. Number = code x scale, one fp32 product. A head with a number that is not
finite comes back as NaN: it cannot pass for a small one.
"""

from typing import Any

import torch
from torch import Tensor

from tandem.types.kv_cache import KVCacheDtype

LARGEST_CODE = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
_STORED = {"bfloat16": torch.bfloat16, "int8": torch.int8, "fp8_e4m3": torch.float8_e4m3fn}


def stored_dtype(name: KVCacheDtype, compute: torch.dtype) -> torch.dtype:
    """The dtype of the tensors of a cache that is called ``name``, for a model that computes in ``compute``."""
    return compute if name == "auto" else _STORED[name]


def is_scaled(dtype: torch.dtype) -> bool:
    """Whether numbers of ``dtype`` are codes that need a scale."""
    return dtype in LARGEST_CODE


def encode(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """``x[..., D]`` as stored numbers of ``dtype``, and their fp32 scales [...] where they have some."""
    if not is_scaled(dtype):
        return x.to(dtype), None
    wide = x.to(torch.float32)
    largest = wide.abs().amax(-1)
    # Divided by a tensor: a division by a Python number may become a product with its reciprocal, which has other bits.
    scale = (largest / torch.full_like(largest, LARGEST_CODE[dtype])).clamp_min(torch.finfo(torch.float32).tiny)
    finite = wide.isfinite().all(-1)
    codes = torch.where(finite.unsqueeze(-1), wide / scale.unsqueeze(-1), 0.0)
    codes = codes.round() if dtype == torch.int8 else codes
    return codes.to(dtype), torch.where(finite, scale, torch.nan)


def decode(codes: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The numbers of ``codes`` as ``dtype``; ``scale``, where given, has axes of length 1 to stretch over them."""
    return codes.to(dtype) if scale is None else (codes.to(torch.float32) * scale).to(dtype)


class RoundKV(torch.autograd.Function):
    """Encode and decode; the gradient goes straight through (Bengio et al., 2013)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype) -> Tensor:
        codes, scale = encode(x, dtype)
        return decode(codes, None if scale is None else scale.unsqueeze(-1), x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad, None

"""The names of what a KV cache may hold."""

from typing import Literal

from tandem.types.errors import UserError

KVCacheDtype = Literal["auto", "bfloat16", "int8", "fp8_e4m3"]
"""``auto``: the model's own dtype. ``int8`` and ``fp8_e4m3``: codes of 8 bits, with an fp32 scale for each token and head."""

KV_CACHE_DTYPES: tuple[KVCacheDtype, ...] = ("auto", "bfloat16", "int8", "fp8_e4m3")


def check_kv_cache_dtype(name: str) -> None:
    """Raise ``UserError`` where ``name`` is none of ``KV_CACHE_DTYPES``."""
    if name not in KV_CACHE_DTYPES:
        raise UserError(f"engine kv_cache_dtype is {name!r}; it must be one of {', '.join(KV_CACHE_DTYPES)}")

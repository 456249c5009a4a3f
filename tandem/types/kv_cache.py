"""The names of what a KV cache may hold, and the size of its blocks."""

from typing import Literal

KVCacheDtype = Literal["auto", "bfloat16", "int8", "fp8_e4m3", "int4"]
"""``auto``: the model's own dtype. ``int8`` and ``fp8_e4m3``: codes of 8 bits, ``int4`` of 4, with an fp32 scale for each token and head."""

KV_CACHE_DTYPES: tuple[KVCacheDtype, ...] = ("auto", "bfloat16", "int8", "fp8_e4m3", "int4")

BLOCK_TOKENS = 16
"""Tokens in a block of the KV cache; the attention kernels sum in tiles of this many absolute positions."""

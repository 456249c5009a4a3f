"""What an ``LLM`` is started with, checked and brought to the form that an engine takes."""

from pathlib import Path

import torch

from tandem.engine.kv_cache.block_table import blocks_for
from tandem.estimate.model_bytes import kv_bytes_per_token
from tandem.kernels import BLOCK_TOKENS
from tandem.layout.shapes import ModelShapes
from tandem.layout.sharding import Cut
from tandem.text.tokenizer import Tokenizer
from tandem.types import UserError
from tandem.types.kv_cache import KVCacheDtype

DEFAULT_CACHE_BYTES = 1 << 30
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}


def check_ranks(shapes: ModelShapes, size: int, deterministic: bool, deadline_s: float, device: str) -> None:
    """Raise ``UserError`` where a model of ``shapes`` cannot be cut into ``size`` ranks here."""
    if size < 1 or not deadline_s > 0:
        raise UserError(
            f"engine tensor_parallel_size is {size} and rank_deadline_s {deadline_s}; both must be above 0, the first a whole number"
        )
    if size > 1 and device != "cpu" and size > torch.cuda.device_count():
        raise UserError(f"engine tensor_parallel_size is {size}; this machine has {torch.cuda.device_count()} GPUs")
    try:
        Cut(0, size, deterministic).check(shapes)
    except ValueError as error:
        raise UserError(f"engine tensor_parallel_size: {error}; choose another size") from None


def check_device(device: str) -> None:
    """Raise ``UserError`` for a device that does not exist here."""
    try:
        kind, index = torch.device(device).type, torch.device(device).index or 0
    except RuntimeError:
        raise UserError(f"engine device is {device!r}; it must be 'cpu', 'cuda' or 'cuda:N'") from None
    if kind not in ("cpu", "cuda"):
        raise UserError(f"engine device is {device!r}; it must be 'cpu', 'cuda' or 'cuda:N'")
    if kind == "cuda" and index >= torch.cuda.device_count():
        raise UserError(f"engine device is {device!r}; this machine has {torch.cuda.device_count()} CUDA devices, use one of them or 'cpu'")


def dtype_of(dtype: str | torch.dtype) -> torch.dtype:
    """``auto`` is fp32. Raises ``UserError`` for an unknown name."""
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype == "auto":
        return torch.float32
    if dtype not in DTYPES:
        raise UserError(f"engine dtype is {dtype!r}; it must be one of {', '.join(DTYPES)}")
    return DTYPES[dtype]


def cache_blocks(
    shapes: ModelShapes, dtype: torch.dtype, kv_cache_dtype: KVCacheDtype, tokens: int, max_model_len: int, max_num_seqs: int
) -> int:
    """Blocks of the KV cache: ``tokens`` of them, or by default what all sequences fill within
    ``DEFAULT_CACHE_BYTES``."""
    if tokens:
        return blocks_for(tokens)
    per_block = kv_bytes_per_token(shapes, str(dtype).removeprefix("torch."), kv_cache_dtype) * BLOCK_TOKENS
    one = blocks_for(max_model_len)
    return max(one, min(one * max_num_seqs, DEFAULT_CACHE_BYTES // per_block))


def tokenizer_of(given: str | Path | Tokenizer | None, model: str | Path) -> Tokenizer | None:
    """The tokenizer asked for; the model's own where none is, and ``None`` where the model has none."""
    if isinstance(given, Tokenizer):
        return given
    if given is not None:
        return Tokenizer.from_folder(given)
    return Tokenizer.from_folder(model) if (Path(model) / "tokenizer.json").is_file() else None

"""A step as a call to the other ranks: its tensors are blobs by name, everything else is meta."""

import ctypes
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tandem.engine.executor.model_input import ModelInput
from tandem.engine.kv_cache.block_pool import BlockCopy
from tandem.engine.kv_cache.cache_tensors import Moves
from tandem.kernels.api import PagedBatch
from tandem.runtime.rpc.calls import Blobs, Meta
from tandem.types.wire import Buffer

_INT32 = ("query_start", "context_lens", "block_tables")
"""Tensors of 32-bit numbers; the others have 64 bits."""


@dataclass(frozen=True, slots=True)
class StepMessage:
    """The work of a rank in a step; its tensors are on the CPU.

    Args:
        moves: Block copies made before the step.
        batch: The step's tensors, without adapters.
        draws: Whether logits are computed.
        scores: Whether the hidden states are kept for log-probabilities of prompts.
        adapted: Rows [R] and bounds [S + 1] of a ``LoraBatch``; ``None``: no row has an adapter.
    """

    moves: Moves
    batch: ModelInput
    draws: bool
    scores: bool
    adapted: tuple[Tensor, Tensor] | None


def encode_step(moves: Moves, batch: ModelInput, draws: bool, scores: bool) -> tuple[dict[str, Any], Blobs]:
    """Returns meta and blobs of the call ``step``."""
    paged, lora = batch.paged, batch.lora
    tensors: dict[str, Tensor | None] = {
        "tokens": batch.tokens, "positions": batch.positions, "slots": paged.slots, "state_rows": paged.state_rows,
        "kept_states": paged.kept_states, "logit_rows": batch.logit_rows,
        "adapter_rows": None if lora is None else lora.rows, "adapter_bounds": None if lora is None else lora.bounds,
        "query_start": paged.query_start, "context_lens": paged.context_lens, "block_tables": paged.block_tables,
    }  # fmt: skip
    # A frame's payload is aligned to 16 bytes, so blobs of 8-byte numbers before those of 4 keep every tensor aligned.
    blobs = {name: _to_bytes(tensor, _dtype(name)) for name, tensor in tensors.items() if tensor is not None}
    return {"moves": moves, "width": paged.block_tables.shape[1], "draws": draws, "scores": scores}, blobs


def decode_step(meta: Meta, blobs: Blobs) -> StepMessage:
    """Decodes what ``encode_step`` returned. The tensors share the memory of ``blobs``, which must be writable."""
    tensors = {name: _from_bytes(blob, _dtype(name)) for name, blob in blobs.items()}
    tables = tensors["block_tables"].view(-1, meta["width"])
    kept = tensors["kept_states"].view(2, -1) if "kept_states" in tensors else None
    paged = PagedBatch(tensors["query_start"], tensors["context_lens"], tables, tensors["slots"], tensors.get("state_rows"), kept)
    moves = Moves(*([BlockCopy(*pair) for pair in pairs] for pairs in meta["moves"]))
    batch = ModelInput(tensors["tokens"], tensors["positions"], paged, tensors.get("logit_rows"))
    adapted = (tensors["adapter_rows"], tensors["adapter_bounds"]) if "adapter_rows" in tensors else None
    return StepMessage(moves, batch, meta["draws"], meta["scores"], adapted)


def _dtype(name: str) -> torch.dtype:
    return torch.int32 if name in _INT32 else torch.int64


def _to_bytes(tensor: Tensor, dtype: torch.dtype) -> bytes:
    tensor = tensor.to("cpu", dtype).contiguous()
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes)


def _from_bytes(blob: Buffer, dtype: torch.dtype) -> Tensor:
    # torch rejects an empty buffer.
    return torch.frombuffer(blob, dtype=dtype) if len(blob) else torch.empty(0, dtype=dtype)

"""One step as bytes, from the rank that schedules to the others: plain int64 values."""

import ctypes

import torch
from torch import Tensor

from tandem.engine.executor.model_input import ModelInput
from tandem.engine.kv_cache.block_table import BlockCopy
from tandem.engine.kv_cache.cache_tensors import Moves
from tandem.kernels.api import PagedBatch

_COUNTS = 11


def encode_step(moves: Moves, batch: ModelInput, draws: bool, scores: bool) -> bytes:
    """(tokens, sequences, width of the block tables, the three kinds of moves, rows or -1, draws, scores, rows with an adapter,
    their bounds), then what they count."""
    paged, rows, lora = batch.paged, batch.logit_rows, batch.lora
    counts = [len(batch.tokens), *paged.block_tables.shape, *map(len, moves), -1 if rows is None else len(rows)]
    counts += [int(draws), int(scores)]
    counts += [0, 0] if lora is None else [len(lora.rows), len(lora.bounds)]
    parts = [torch.tensor(counts), batch.tokens, batch.positions, paged.slots, paged.query_start, paged.context_lens]
    parts += [paged.block_tables.flatten(), *(torch.tensor(copies).flatten() for copies in moves)]
    parts += [] if rows is None else [rows]
    parts += [] if lora is None else [lora.rows, lora.bounds]
    flat = torch.cat([part.to("cpu", torch.int64) for part in parts if part.numel()])
    return ctypes.string_at(flat.data_ptr(), flat.nbytes)


def decode_step(data: bytes) -> tuple[Moves, ModelInput, bool, bool, tuple[Tensor, Tensor] | None]:
    """What ``encode_step`` was given, on CPU; the adapters' rows and bounds apart from the batch, which has none here."""
    flat = torch.frombuffer(bytearray(data), dtype=torch.int64)
    tokens, sequences, width, out, back, copied, rows, draws, scores, adapted, bounds = flat[:_COUNTS].tolist()
    sizes = [_COUNTS, tokens, tokens, tokens, sequences + 1, sequences, sequences * width, 2 * out, 2 * back, 2 * copied]
    sizes += [max(rows, 0), adapted, bounds]
    parts: tuple[Tensor, ...] = flat.split(sizes)
    paged = PagedBatch(parts[4].int(), parts[5].int(), parts[6].view(sequences, width).int(), parts[3])
    moves = Moves(*([BlockCopy(*pair) for pair in part.view(-1, 2).tolist()] for part in parts[7:10]))
    batch = ModelInput(parts[1], parts[2], paged, None if rows < 0 else parts[10])
    return moves, batch, bool(draws), bool(scores), (parts[11], parts[12]) if bounds else None

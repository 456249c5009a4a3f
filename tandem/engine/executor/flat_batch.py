"""The tensors of one step: decoding rows first, one token each, then prefill chunks."""

from typing import NamedTuple

import torch
from torch import Tensor

from tandem.engine.core.scheduler import Chunk
from tandem.engine.executor.input_batch import RowTable, padded_tables
from tandem.kernels.api import BLOCK_TOKENS, PagedBatch
from tandem.model.lora import LoraBatch


class FlatBatch(NamedTuple):
    """``tokens[T]`` and ``positions[T]`` int64. ``logit_rows``: the rows of the hidden state whose logits are wanted,
    one for each row that draws; ``None``: all, in order. ``lora``: the tokens with an adapter."""

    tokens: Tensor
    positions: Tensor
    paged: PagedBatch
    logit_rows: Tensor | None
    lora: LoraBatch | None = None


def decode_batch(table: RowTable, index: Tensor) -> FlatBatch:
    """The next token of each of the rows ``index[R]``. Block tables are cut to the longest."""
    tokens = table.last_token.index_select(0, index)
    lengths = table.length.index_select(0, index)
    width = (int(lengths.max()) - 1) // BLOCK_TOKENS + 1 if len(index) else 1
    return FlatBatch(tokens, *last_of(lengths, table.block_tables[:, :width].index_select(0, index)), None)


def last_of(lengths: Tensor, tables: Tensor) -> tuple[Tensor, PagedBatch]:
    """The positions [R] of the last tokens of R sequences, of ``lengths[R]`` tokens int64 in the blocks ``tables[R, B]``, and their batch."""
    positions = lengths - 1
    blocks = tables.gather(1, (positions // BLOCK_TOKENS).unsqueeze(1)).squeeze(1)
    slots = blocks.long() * BLOCK_TOKENS + positions % BLOCK_TOKENS
    starts = torch.arange(len(lengths) + 1, dtype=torch.int32, device=lengths.device)
    return positions, PagedBatch(starts, lengths.int(), tables, slots)


def chunk_batch(table: RowTable, chunks: tuple[Chunk, ...]) -> FlatBatch:
    """Prefill chunks and no decoding row."""
    return add_chunks(empty_batch(table), chunks)


def empty_batch(table: RowTable) -> FlatBatch:
    """No token at all."""
    return decode_batch(table, torch.empty(0, dtype=torch.int64))


def advance(last: FlatBatch, tokens: Tensor) -> FlatBatch:
    """The batch after ``last``, which is used up, for the same rows in the same blocks: everything is one token
    further."""
    last.positions.add_(1)
    last.paged.context_lens.add_(1)
    last.paged.slots.add_(1)
    return last._replace(tokens=tokens.to(last.tokens.device))


def span_batch(table: RowTable, rows: tuple[int, ...], tokens: list[list[int]], starts: list[int]) -> FlatBatch:
    """``tokens[i]`` of row ``rows[i]`` at its positions from ``starts[i]`` on. All logits are wanted."""
    counts = torch.tensor([len(span) for span in tokens])
    index, first = torch.tensor(rows), torch.tensor(starts)
    ends = counts.cumsum(0)
    owner = torch.repeat_interleave(torch.arange(len(rows)), counts)
    positions = torch.arange(len(owner)) - (ends - counts)[owner] + first[owner]
    lengths = first + counts
    width = (int(lengths.max()) - 1) // BLOCK_TOKENS + 1
    tables = table.block_tables[:, :width].index_select(0, index)
    slots = tables[owner, positions // BLOCK_TOKENS].long() * BLOCK_TOKENS + positions % BLOCK_TOKENS
    query_start = torch.cat((torch.zeros(1, dtype=torch.int64), ends)).int()
    flat = torch.tensor([token for span in tokens for token in span])
    return FlatBatch(flat, positions, PagedBatch(query_start, lengths.int(), tables, slots), None)


def add_chunks(batch: FlatBatch, chunks: tuple[Chunk, ...]) -> FlatBatch:
    """``batch`` with prefill chunks after its decoding rows. A group's sequences draw from the same row."""
    count = len(batch.tokens)
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    ends: list[int] = []
    logit_rows = list(range(count))
    for chunk in chunks:
        span = range(chunk.start, chunk.start + len(chunk.tokens))
        tokens += chunk.tokens
        positions += span
        slots += [chunk.blocks[p // BLOCK_TOKENS] * BLOCK_TOKENS + p % BLOCK_TOKENS for p in span]
        ends.append(count + len(tokens))
        logit_rows += [ends[-1] - 1] * len(chunk.rows)
    contexts = [chunk.start + len(chunk.tokens) for chunk in chunks]
    paged = PagedBatch(
        torch.cat((batch.paged.query_start, torch.tensor(ends, dtype=torch.int32))),
        torch.cat((batch.paged.context_lens, torch.tensor(contexts, dtype=torch.int32))),
        _stack_tables(batch.paged.block_tables, [chunk.blocks for chunk in chunks]),
        torch.cat((batch.paged.slots, torch.tensor(slots))),
    )
    return FlatBatch(
        torch.cat((batch.tokens, torch.tensor(tokens))),
        torch.cat((batch.positions, torch.tensor(positions))),
        paged,
        torch.tensor(logit_rows, dtype=torch.int64),
    )


def to_device(batch: FlatBatch, device: torch.device) -> FlatBatch:
    """``batch`` with every tensor on ``device``."""
    if device.type == "cpu":
        return batch
    paged = batch.paged
    moved = PagedBatch(
        paged.query_start.to(device), paged.context_lens.to(device), paged.block_tables.to(device), paged.slots.to(device)
    )
    rows = None if batch.logit_rows is None else batch.logit_rows.to(device)
    return FlatBatch(batch.tokens.to(device), batch.positions.to(device), moved, rows, batch.lora)


def _stack_tables(tables: Tensor, more: list[tuple[int, ...]]) -> Tensor:
    """``tables[S, B]`` and further ones under them, all padded with 0 to the widest."""
    width = max(tables.shape[1], max(map(len, more)))
    out = torch.zeros(len(tables) + len(more), width, dtype=torch.int32)
    out[: len(tables), : tables.shape[1]] = tables
    out[len(tables) :] = padded_tables(more, width)
    return out

"""The model input of one step: decoding rows first, then prefill chunks."""

import itertools
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from tandem.engine.core.scheduler_output import ScheduledPrefill
from tandem.engine.executor.row_tensors import RowTensors, to_device
from tandem.kernels.api import BLOCK_TOKENS, PagedBatch
from tandem.model.lora import LoraBatch


class ModelInput(NamedTuple):
    """``tokens[T]`` and ``positions[T]`` int64. ``logit_rows`` (on the CPU): the rows of the hidden states whose logits are needed, one for
    each row that draws; ``None``: all, in order. ``lora``: the tokens with an adapter."""

    tokens: Tensor
    positions: Tensor
    paged: PagedBatch
    logit_rows: Tensor | None
    lora: LoraBatch | None = None


def decode_input(rows: RowTensors, index: Tensor, width: int) -> ModelInput:
    """Returns the next token of each of the rows ``index[R]``, with block tables of ``width`` columns. Never waits for the device."""
    return ModelInput(*rows.next_tokens(index, width), None)


def empty_input(device: torch.device) -> ModelInput:
    """Returns an input without tokens."""
    empty = torch.empty(0, dtype=torch.int64, device=device)
    starts = torch.zeros(1, dtype=torch.int32, device=device)
    return ModelInput(empty, empty, PagedBatch(starts, empty.int(), empty.int().view(0, 1), empty, empty), None)


def advance(last: ModelInput, tokens: Tensor) -> ModelInput:
    """Returns the input that follows ``last`` for the same rows in the same blocks, one token further. Modifies ``last`` in place."""
    last.positions.add_(1)
    last.paged.context_lens.add_(1)
    last.paged.slots.add_(1)
    return last._replace(tokens=tokens)


def span_input(rows: RowTensors, index: Tensor, tokens: list[list[int]], starts: list[int], kept: Iterable[int] = ()) -> ModelInput:
    """Returns ``tokens[i]`` of row ``index[i]`` (on the CPU) at its positions from ``starts[i]`` on. All logits are needed. The states after all but the last
    of each are copied to the rows ``kept``, one after the other."""
    # Lists, because small operations on tensors take longer.
    lengths = [start + len(span) for start, span in zip(starts, tokens, strict=True)]
    flat = [(token, i, start + offset) for i, (start, span) in enumerate(zip(starts, tokens, strict=True)) for offset, token in enumerate(span)]
    width = (max(lengths) - 1) // BLOCK_TOKENS + 1
    query_start = list(itertools.accumulate(map(len, tokens), initial=0))
    device = rows.device
    own = to_device(index, device)
    tables = rows.block_tables[:, :width].index_select(0, own)
    fed, owner, positions = to_device(torch.tensor(flat).t().contiguous(), device).unbind(0)
    slots = tables[owner, positions // BLOCK_TOKENS].long() * BLOCK_TOKENS + positions % BLOCK_TOKENS
    ends, contexts = (to_device(torch.tensor(values, dtype=torch.int32), device) for values in (query_start, lengths))
    inner = [first + offset for first, span in zip(query_start, tokens, strict=False) for offset in range(len(span) - 1)]
    states = _kept_states(list(zip(inner, kept, strict=False)), device)
    return ModelInput(fed, positions, PagedBatch(ends, contexts, tables, slots, own, states), None)


def _kept_states(pairs: list[tuple[int, int]], device: torch.device) -> Tensor | None:
    """Returns ``PagedBatch.kept_states`` of (token, row)."""
    return to_device(torch.tensor(pairs).t().contiguous(), device) if pairs else None


def add_prefills(batch: ModelInput, chunks: tuple[ScheduledPrefill, ...]) -> ModelInput:
    """Returns ``batch`` with prefill chunks after its decoding rows. The sequences of a group draw from the same row."""
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
    paged, state_rows = batch.paged, torch.tensor([chunk.state_row for chunk in chunks])
    width = max(paged.block_tables.shape[1], max(len(chunk.blocks) for chunk in chunks))
    kept = [(first + place, row) for first, chunk in zip([count, *ends], chunks, strict=False) for place, row in chunk.kept_states]
    more = _kept_states(kept, batch.tokens.device)
    tables = padded_tables([chunk.blocks for chunk in chunks], width)
    own_tables = torch.nn.functional.pad(paged.block_tables, (0, width - paged.block_tables.shape[1]))

    def joined(own: Tensor, more: Tensor) -> Tensor:
        return torch.cat((own, to_device(more, own.device)))

    return ModelInput(
        joined(batch.tokens, torch.tensor(tokens)),
        joined(batch.positions, torch.tensor(positions)),
        PagedBatch(
            joined(paged.query_start, torch.tensor(ends, dtype=torch.int32)),
            joined(paged.context_lens, torch.tensor(contexts, dtype=torch.int32)),
            joined(own_tables, tables),
            joined(paged.slots, torch.tensor(slots)),
            None if paged.state_rows is None else joined(paged.state_rows, state_rows),
            more if paged.kept_states is None else paged.kept_states if more is None else torch.cat((paged.kept_states, more), dim=1),
        ),
        torch.tensor(logit_rows, dtype=torch.int64),
    )


def prefill_input(chunks: tuple[ScheduledPrefill, ...], device: torch.device) -> ModelInput:
    """Returns prefill chunks without decoding rows."""
    return add_prefills(empty_input(device), chunks)


def input_to_device(batch: ModelInput, device: torch.device) -> ModelInput:
    """Returns ``batch`` with every tensor that the model reads on ``device``."""
    paged = batch.paged
    query_start, context_lens, tables, slots = (to_device(x, device) for x in (paged.query_start, paged.context_lens, paged.block_tables, paged.slots))
    states = (None if each is None else to_device(each, device) for each in (paged.state_rows, paged.kept_states))
    moved = PagedBatch(query_start, context_lens, tables, slots, *states)
    return batch._replace(tokens=to_device(batch.tokens, device), positions=to_device(batch.positions, device), paged=moved)


def padded_tables(tables: list[tuple[int, ...]] | list[list[int]], width: int) -> Tensor:
    """Returns block tables as [S, width] int32, short ones padded with 0."""
    padded = [[*table, *[0] * (width - len(table))] for table in tables]
    # A null block is never read, but its number must be a valid index.
    return torch.tensor(padded, dtype=torch.int32).clamp_(min=0)

"""Sequences fed in chunks over a paged cache, as by an engine, and attention by its definition."""

import math

import torch
from torch import Tensor

from tandem.kernels import BLOCK_TOKENS, Kernels, KVLayer, PagedBatch

LENGTHS = [1, 5, 40, 130, 64, 17]


def bounds_of(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)


def exact(
    q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, scale: float, window: int | None, cap: float | None = None, sinks: Tensor | None = None
) -> Tensor:
    """Returns causal attention by its definition, in float64: a sink is a key that every query sees, with its score and the value 0."""
    parts = []
    for start, end in zip(bounds.tolist(), bounds.tolist()[1:], strict=False):
        group = q.shape[1] // k.shape[1]
        keys, values = (x[start:end].double().repeat_interleave(group, dim=1) for x in (k, v))
        scores = torch.einsum("ihd,jhd->hij", q[start:end].double(), keys) * scale
        scores = scores if cap is None else cap * torch.tanh(scores / cap)
        distance = torch.arange(end - start).unsqueeze(1) - torch.arange(end - start)
        hidden = (distance < 0) | (distance >= (window or math.inf))
        scores = scores.masked_fill(hidden, -math.inf)
        if sinks is not None:
            scores = torch.cat((scores, sinks.double().view(-1, 1, 1).expand(-1, end - start, 1)), -1)
            values = torch.cat((values, torch.zeros_like(values[:1])))
        parts.append(torch.einsum("hij,jhd->ihd", scores.softmax(-1), values))
    return torch.cat(parts)


def make(lengths: list[int], size: int, heads: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    tokens = sum(lengths)
    return torch.randn(tokens, heads, size), torch.randn(tokens, kv_heads, size), torch.randn(tokens, kv_heads, size)


class InChunks:
    """Sequences that come in chunks, with a table of shuffled blocks for each, of ``blocks`` in all."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths, self.bounds = lengths, bounds_of(lengths).tolist()
        needed = [-(-length // BLOCK_TOKENS) for length in lengths]
        self.blocks = sum(needed) + 3
        shuffled = torch.randperm(self.blocks).int()
        self.tables = torch.zeros(len(lengths), max(needed) + 1, dtype=torch.int32)
        for s, count in enumerate(needed):
            self.tables[s, :count] = shuffled[sum(needed[:s]) : sum(needed[: s + 1])]
        self.done = [0] * len(lengths)

    def batch_of(self, chunks: dict[int, int]) -> tuple[list[int], Tensor, PagedBatch]:
        """Returns the rows of the next ``chunks`` of tokens by sequence, their positions and their batch."""
        rows, positions, starts, lengths, slots = [], [], [0], [], []
        for s, count in chunks.items():
            for p in range(self.done[s], self.done[s] + count):
                rows.append(self.bounds[s] + p)
                positions.append(p)
                slots.append(int(self.tables[s, p // BLOCK_TOKENS]) * BLOCK_TOKENS + p % BLOCK_TOKENS)
            self.done[s] += count
            starts.append(len(rows))
            lengths.append(self.done[s])
        batch = PagedBatch(
            torch.tensor(starts, dtype=torch.int32), torch.tensor(lengths, dtype=torch.int32),
            self.tables[list(chunks)].contiguous(), torch.tensor(slots),
        )  # fmt: skip
        return rows, torch.tensor(positions), batch

    def left(self, s: int) -> int:
        return self.lengths[s] - self.done[s]


class Paged(InChunks):
    """Feeds sequences in chunks to a cache. Unused slots are NaN."""

    def __init__(self, kernels: Kernels, lengths: list[int], size: int, kv_heads: int) -> None:
        super().__init__(lengths)
        self.kernels = kernels
        self.cache = KVLayer(
            torch.full((self.blocks, kv_heads, size, BLOCK_TOKENS), math.nan),
            torch.full((self.blocks, kv_heads, BLOCK_TOKENS, size), math.nan),
        )
        self.table = torch.cat([torch.ones(max(lengths), size // 2), torch.zeros(max(lengths), size // 2)], 1)

    def step(
        self, chunks: dict[int, int], qkv: tuple[Tensor, Tensor, Tensor], scale: float, window: int | None, out: Tensor, cap: float | None = None,
        sinks: Tensor | None = None,
    ) -> None:  # fmt: skip
        rows, positions, batch = self.batch_of(chunks)
        (_, heads, size), kv_heads = qkv[0].shape, qkv[1].shape[1]
        fused = torch.cat([x[rows].flatten(1) for x in qkv], 1)
        q = self.kernels.rope_to_cache(
            fused, positions, self.table, (heads, kv_heads, size), None, None, 1e-6, self.cache, batch.slots
        )
        out[rows] = self.kernels.paged_attention(q, self.cache, batch, scale, window, cap, sinks)

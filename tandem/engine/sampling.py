"""Random numbers that depend on nothing but their key, and what is done to logits before a token is drawn."""

from typing import NamedTuple

import torch
from torch import Tensor

# SplitMix64 (Steele, Lea and Flood, 2014), as signed 64-bit integers: torch multiplies modulo 2^64.
_GAMMA = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)


def uniforms(keys: Tensor, positions: Tensor) -> Tensor:
    """``keys[R]`` and ``positions[R]`` int64 -> float64 [R] in [0, 1): number ``positions[r]`` of the SplitMix64
    stream that starts from ``keys[r]``, whatever stands in the other rows."""
    z = keys + (positions + 1) * _GAMMA
    z = (z ^ _shift(z, 30)) * _MIX_1
    z = (z ^ _shift(z, 27)) * _MIX_2
    z = z ^ _shift(z, 31)
    return _shift(z, 11).double() * 2.0**-53


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical shift to the right; torch's keeps the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


class Adjustment(NamedTuple):
    """What is done to row ``row`` of the logits: ``values`` are added at ``token_ids``."""

    row: int
    token_ids: list[int]
    values: list[float]


def adjust(logits: Tensor, adjustments: list[Adjustment]) -> Tensor:
    """A copy of ``logits[R, V]`` with every adjustment made. A row's bits depend on its own adjustment alone."""
    logits = logits.clone()
    for row, token_ids, values in adjustments:
        logits[row, token_ids] += torch.tensor(values, dtype=logits.dtype, device=logits.device)
    return logits


def top_logprobs(
    logits: Tensor, tokens: Tensor, raw: Tensor, counts: list[int]
) -> list[list[tuple[int, float, int]]]:
    """For row r of ``logits[R, V]`` the ``counts[r]`` most likely tokens, and the drawn one of ``tokens[R]``, whose raw
    log-probability is ``raw[R]``, where it is not among them: as (token id, raw log-probability, rank from 1)."""
    logprobs = logits.contiguous().log_softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
    values, ids = logprobs.sort(dim=-1, descending=True, stable=True)
    ranks = ((logprobs > logprobs.gather(1, tokens.unsqueeze(1))).sum(1) + 1).tolist()
    found = []
    for row, count in enumerate(counts):
        top = zip(ids[row, :count].tolist(), values[row, :count].tolist(), strict=True)
        token, own = int(tokens[row]), float(raw[row])
        # The kernels' own bits for the drawn token: torch's differ in the last place.
        entries = [(t, own if t == token else value, rank) for rank, (t, value) in enumerate(top, start=1)]
        if all(t != token for t, _, _ in entries):
            entries.append((token, own, ranks[row]))
        found.append(entries)
    return found

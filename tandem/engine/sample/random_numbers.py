"""Random numbers that depend on nothing but their key, and the most likely tokens of a row."""

import math

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


def top_logprobs(
    logits: Tensor, tokens: Tensor, raw: Tensor, counts: list[int]
) -> list[list[tuple[int, float, int]]]:
    """For row r of ``logits[R, V]`` the ``counts[r]`` most likely tokens (-1: all), and the given one of ``tokens[R]``,
    whose raw log-probability is ``raw[R]``, where it is not among them: as (token id, raw log-probability, rank from 1).
    Equals rank by id, however many are asked for in the rows beside."""
    logprobs = logits.contiguous().log_softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
    width = logits.shape[1]
    wanted = [width if count < 0 else min(count, width) for count in counts]
    own = logprobs.gather(1, tokens.unsqueeze(1))
    ranks = ((logprobs > own).sum(1) + 1).tolist()
    likely = _most_likely(logprobs, wanted)
    found = []
    # The kernels' own bits for the given token: torch's differ in the last place.
    for top, token, value, rank in zip(likely, tokens.tolist(), raw.tolist(), ranks, strict=True):
        entries = [(t, value if t == token else other, place) for place, (t, other) in enumerate(top, start=1)]
        if all(t != token for t, _, _ in entries):
            entries.append((token, value, rank))
        found.append(entries)
    return found


def _most_likely(logprobs: Tensor, counts: list[int]) -> list[list[tuple[int, float]]]:
    """The ``counts[r]`` largest entries of each row, the largest first and equals by id, as (id, value)."""
    largest = max(counts, default=0)
    if not largest:
        return [[] for _ in counts]
    # topk leaves open which of equal values it names, so only its values are used.
    values = logprobs.topk(largest).values
    place = torch.tensor(counts, device=logprobs.device).unsqueeze(1)
    least = values.gather(1, (place - 1).clamp_min(0)).masked_fill(place == 0, math.inf)
    rows, ids = (logprobs >= least).nonzero(as_tuple=True)
    found: list[list[tuple[int, float]]] = [[] for _ in counts]
    for row, token, value in zip(rows.tolist(), ids.tolist(), logprobs[rows, ids].tolist(), strict=True):
        found[row].append((token, value))
    return [sorted(entries, key=lambda e: (-e[1], e[0]))[:count] for entries, count in zip(found, counts, strict=True)]

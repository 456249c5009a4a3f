"""Assigns sequences to ranks and packs them into micro-batches without padding.

A global batch is split into minibatches in order. The sequences of each are sorted by length and spread over the data-parallel ranks; each
rank packs its share with Best-Fit, and all ranks make as many passes as the one with the most micro-batches if they communicate within a
pass (DeepSeek-R1; Guo et al., 2025, supplement on the training framework). The result depends on the lengths alone: a repeated step packs
in the same way, and every rank knows the shares of the others without communication.

Best-Fit-Decreasing needs at most 11/9 of the optimal number of bins, plus a constant (Johnson et al., 1974)."""

import heapq
import itertools
from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import TypeVar

from tandem.trainer.micro_batch import Bin, forward_tokens
from tandem.trainer.prefix_tree import PrefixTree
from tandem.types import TrainSequence

Item = TypeVar("Item")


def best_fit(lengths: Sequence[int], capacity: int) -> list[Bin]:
    """Returns the indices of ``lengths`` (tokens) in bins of at most ``capacity`` tokens each; a longer sequence has a bin of its own.

    Longest first, each into the fullest bin with room for it; ties go to the bin opened first. Indices ascend within a bin; bins are in the
    order in which they were opened, so the largest memory need comes early.
    """
    bins: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (tokens left, bin), ascending
    for index in longest_first(lengths):
        place = bisect_left(room, (lengths[index], -1))
        if place == len(room):
            bins.append([index])
            insort(room, (max(0, capacity - lengths[index]), len(bins) - 1))
            continue
        left, chosen = room.pop(place)
        bins[chosen].append(index)
        insort(room, (left - lengths[index], chosen))
    return [tuple(sorted(b)) for b in bins]


def spread(lengths: Sequence[int], ranks: int) -> list[Bin]:
    """Returns the indices of ``lengths`` (tokens) that each of ``ranks`` takes, ascending.

    Longest first, each to the rank that has the fewest tokens so far, ties to the lowest rank: the longest share is at most 4/3 of the
    optimal one (Graham, 1969)."""
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [(0, rank) for rank in range(ranks)]
    for index in longest_first(lengths):
        tokens, rank = loads[0]
        shares[rank].append(index)
        heapq.heapreplace(loads, (tokens + lengths[index], rank))
    return [tuple(sorted(share)) for share in shares]


def pack(sequences: Sequence[TrainSequence], micro_batch_tokens: int) -> list[Bin]:
    """Returns the micro-batches of ``sequences`` by index, packed by the tokens that go through the network."""
    return best_fit([forward_tokens(s) for s in sequences], micro_batch_tokens)


def pack_shares(
    sequences: Sequence[TrainSequence], ranks: int, micro_batch_tokens: int, share_prompts: bool = False, keep_groups: bool = False
) -> list[list[Bin]]:
    """Returns the micro-batches of each of ``ranks`` data-parallel ranks, as indices of ``sequences``. ``share_prompts`` or ``keep_groups``: sequences with
    equal prompts are packed together, as far as they fit; with ``share_prompts`` the prompt counts once."""
    lengths = [forward_tokens(s) for s in sequences]
    if not (share_prompts or keep_groups) or (ranks == 1 and sum(lengths) <= micro_batch_tokens):
        return _shares(lengths, ranks, micro_batch_tokens)
    units = prompt_units(sequences, ranks, micro_batch_tokens, share_prompts)
    packed = _shares([_counted_tokens([sequences[i] for i in unit], share_prompts) for unit in units], ranks, micro_batch_tokens)
    return [[tuple(sorted(i for unit in chosen for i in units[unit])) for chosen in bins] for bins in packed]


def prompt_units(sequences: Sequence[TrainSequence], ranks: int, micro_batch_tokens: int, share_prompts: bool) -> list[Bin]:
    """Returns the sequences with equal prompts, by index, in units that are packed as one: each of at most ``micro_batch_tokens`` (``share_prompts``: with
    the prompt once), and of at most half of a rank's share, so that the ranks' shares stay even."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for index, sequence in enumerate(sequences):
        groups.setdefault(_prompt(sequence), []).append(index)
    most = micro_batch_tokens if ranks == 1 else min(micro_batch_tokens, -(-_counted_tokens(sequences, share_prompts) // (2 * ranks)))
    units: list[Bin] = []
    for prompt, group in groups.items():
        if not prompt:
            units += [(index,) for index in group]
            continue
        once = len(prompt) if share_prompts else 0
        bins = best_fit([forward_tokens(sequences[i]) - once for i in group], max(most - once, 0))
        units += [tuple(group[i] for i in chosen) for chosen in bins]
    return units


def packed_tokens(sequences: Sequence[TrainSequence], share_prompts: bool) -> int:
    """Returns the tokens of one micro-batch of ``sequences`` that go through the network."""
    if not share_prompts:
        return sum(map(forward_tokens, sequences))
    tree = PrefixTree()
    for sequence in sequences:
        tree.add(sequence.token_ids[: forward_tokens(sequence)])
    return len(tree)


def _counted_tokens(sequences: Sequence[TrainSequence], share_prompts: bool) -> int:
    """Returns the tokens of ``sequences``, with ``share_prompts`` each prompt once, but all of every completion: they bound the tokens that the heads see and
    attention gathers, which completions that begin alike do not lower."""
    prompts = [_prompt(sequence) for sequence in sequences] if share_prompts else []
    return sum(map(forward_tokens, sequences)) - sum(map(len, prompts)) + sum(map(len, set(prompts)))


def _prompt(sequence: TrainSequence) -> tuple[int, ...]:
    """Returns the prompt of ``sequence``, if all of it goes through the network."""
    return sequence.token_ids[: sequence.prompt_length] if forward_tokens(sequence) >= sequence.prompt_length else ()


def _shares(lengths: Sequence[int], ranks: int, micro_batch_tokens: int) -> list[list[Bin]]:
    if ranks == 1:
        return [best_fit(lengths, micro_batch_tokens)]
    shares = spread(lengths, ranks)
    packed = [best_fit([lengths[i] for i in share], micro_batch_tokens) for share in shares]
    return [[tuple(share[i] for i in chosen) for chosen in bins] for share, bins in zip(shares, packed, strict=True)]


def pack_pairs(sequences: Sequence[TrainSequence], micro_batch_tokens: int, share_prompts: bool = False) -> list[Bin]:
    """Returns the micro-batches of ``sequences`` by index, packed so that sequences 2i and 2i + 1, a preference pair, are side by side in one.
    ``share_prompts``: what a pair begins with in common counts once."""
    return pack_pair_shares(sequences, 1, micro_batch_tokens, share_prompts)[0]


def pack_pair_shares(sequences: Sequence[TrainSequence], ranks: int, micro_batch_tokens: int, share_prompts: bool = False) -> list[list[Bin]]:
    """Returns the micro-batches of ``pack_pairs`` of each of ``ranks`` data-parallel ranks."""
    lengths = [packed_tokens(pair, share_prompts) for pair in zip(sequences[::2], sequences[1::2], strict=True)]
    shares = _shares(lengths, ranks, micro_batch_tokens)
    return [[tuple(index for pair in pairs for index in (2 * pair, 2 * pair + 1)) for pairs in bins] for bins in shares]


def split(items: Sequence[Item], parts: int) -> list[Sequence[Item]]:
    """Returns ``items`` in at most ``parts`` runs of nearly equal count, in their order; at least one run, which may be empty."""
    parts = max(1, min(parts, len(items)))
    bounds = [len(items) * part // parts for part in range(parts + 1)]
    return [items[start:stop] for start, stop in itertools.pairwise(bounds)]


def longest_first(lengths: Sequence[int]) -> list[int]:
    """Returns the indices of ``lengths``, the longest first, ties in order."""
    return sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))

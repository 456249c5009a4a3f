"""Best-Fit packing: sequences of different lengths into micro-batches without padding.

Best-Fit-Decreasing needs at most 11/9 of the optimal number of bins, plus a constant (Johnson et al., 1974). The order
is a function of the lengths alone, so a step that is repeated packs the same."""

from bisect import bisect_left, insort
from collections.abc import Sequence

Bin = tuple[int, ...]


def best_fit(lengths: Sequence[int], capacity: int) -> list[Bin]:
    """Indices of ``lengths`` (tokens) in bins of at most ``capacity`` tokens each; a longer one has a bin of its own.

    Longest first, each into the fullest bin that still holds it, ties to the bin that was opened first. Indices ascend
    inside a bin; bins stand in the order they were opened, so the largest need for memory comes early.
    """
    bins: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (tokens left, bin), ascending
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        place = bisect_left(room, (lengths[index], -1))
        if place == len(room):
            bins.append([index])
            insort(room, (max(0, capacity - lengths[index]), len(bins) - 1))
            continue
        left, chosen = room.pop(place)
        bins[chosen].append(index)
        insort(room, (left - lengths[index], chosen))
    return [tuple(sorted(b)) for b in bins]


def pack_for_ranks(lengths: Sequence[int], capacity: int, ranks: int) -> list[list[Bin]]:
    """For each of ``ranks`` data-parallel ranks its bins, the same number on every rank.

    Sequences are dealt longest first, each to the rank with the fewest tokens so far, and packed there by
    ``best_fit``. A rank with fewer bins than another splits its fullest one that holds several sequences; a rank with
    nothing to split takes part with empty bins, because collectives must be met by all."""
    dealt: list[list[int]] = [[] for _ in range(ranks)]
    tokens = [0] * ranks
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        rank = min(range(ranks), key=lambda r: (tokens[r], r))
        dealt[rank].append(index)
        tokens[rank] += lengths[index]
    packed = []
    for mine in dealt:
        mine.sort()
        packed.append([tuple(mine[i] for i in b) for b in best_fit([lengths[i] for i in mine], capacity)])
    most = max(len(bins) for bins in packed)
    return [_grow(bins, most, lengths) for bins in packed]


def _grow(bins: list[Bin], count: int, lengths: Sequence[int]) -> list[Bin]:
    bins = list(bins)
    while len(bins) < count:
        splittable = [b for b in range(len(bins)) if len(bins[b]) > 1]
        if not splittable:
            return bins + [()] * (count - len(bins))
        fullest = max(splittable, key=lambda b: (sum(lengths[i] for i in bins[b]), -b))
        members = bins[fullest]
        halves = best_fit([lengths[i] for i in members], -(-sum(lengths[i] for i in members) // 2))
        bins[fullest] = tuple(members[i] for i in halves[0])
        bins.append(tuple(sorted(members[i] for half in halves[1:] for i in half)))
    return bins

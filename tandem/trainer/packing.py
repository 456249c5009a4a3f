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

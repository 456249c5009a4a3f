"""The time that a pipeline's ranks wait for one another. Imports no torch.

Closed form of the schedules in ``layout.schedules`` (tests compare it with their simulation). Of a step, a micro-batch is computed by all ranks in turn,
the others by the slowest rank one after the other: it waits for the forward passes before its first and the backward passes after its last. With v
interleaved stages on each rank a micro-batch returns v times, and a wait is that of one stage (Narayanan et al., 2021, section 2.2).
"""

from collections.abc import Sequence


def bubble_seconds(rank_seconds: Sequence[float], slowest: int, virtual_stages: int) -> float:
    """Returns the seconds of a step in which the ``slowest`` rank waits. ``rank_seconds``: the forward and backward pass of one micro-batch through all
    layers of each rank. For ranks of equal cost this is (p - 1) / (v m) of the time of the work: equation 1 of Narayanan et al. (2021)."""
    return (sum(rank_seconds) - rank_seconds[slowest]) / virtual_stages

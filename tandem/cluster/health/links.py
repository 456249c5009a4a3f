"""The pairwise all-reduce of the preflight: every node reduces with every other one, two and two at the same time, over what the run's ranks use."""

import logging
import time
from collections.abc import Callable, Sequence

from tandem.runtime.coordination.store import Store, WatchTimeout
from tandem.types import RunError

logger = logging.getLogger(__name__)

MOST_ROUNDS = 8
"""In a larger fleet each node is measured with so many others."""
PAIRS = "preflight/pairs/"
_ELEMENTS = 1 << 22
_REPETITIONS = 4
_PAIR_S = 30.0


def rounds(nodes: Sequence[str]) -> list[list[tuple[str, str]]]:
    """Returns the pairs of each round, in which each node is once at most, by the circle method of tournaments: all pairs in the fewest rounds."""
    circle: list[str | None] = [*nodes, *([None] if len(nodes) % 2 else [])]
    made = []
    for _ in range(min(MOST_ROUNDS, len(circle) - 1)):
        half = len(circle) // 2
        made.append([(a, b) for a, b in zip(circle[:half], reversed(circle[half:]), strict=True) if a is not None and b is not None])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return made


def measure_links(store: Store, node: str, nodes: Sequence[str], host: str, device: str, left_s: Callable[[], float]) -> dict[str, float]:
    """Returns the bytes that ``node`` reduces in a second with each of the other ``nodes``, 0 where it failed. ``host``: the address of this machine for
    others. ``device``: ``cpu`` or ``cuda``. ``left_s``: returns the seconds that are left."""
    found: dict[str, float] = {}
    for number, pairs in enumerate(rounds(nodes)):
        mine = next((pair for pair in pairs if node in pair), None)
        if mine is None:
            continue
        other = mine[1 - mine.index(node)]
        try:
            # The other one may be late by what its pairs before have taken.
            meet_s = min(_PAIR_S * (number + 1), max(1.0, left_s()))
            found[other] = _reduce(store, f"{PAIRS}{number}/{mine[0]}/{mine[1]}/", mine.index(node), host, device, meet_s)
        except (RuntimeError, OSError, RunError, WatchTimeout) as error:
            logger.warning("the all-reduce of %s with %s failed: %s", node, other, error)
            found[other] = 0.0
    return found


def _reduce(store: Store, place: str, rank: int, host: str, device: str, meet_s: float) -> float:
    """Returns the bytes of a tensor that two processes reduce in a second, the best of several times. They meet at keys under ``place`` within ``meet_s``."""
    from datetime import timedelta

    import torch
    from torch.distributed import TCPStore

    from tandem.runtime.collectives.communicator import connect

    limit = timedelta(seconds=_PAIR_S)
    if rank == 0:
        meeting = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=limit)
        store.put(f"{place}0", f"{host} {meeting.port}".encode())
        store.watch(f"{place}1", 0, meet_s)
    else:
        address, port = store.watch(f"{place}0", 0, meet_s).value.decode().split()
        store.put(f"{place}1", b"")
        meeting = TCPStore(address, int(port), is_master=False, timeout=limit)
    pair = connect("data", rank, 2, meeting, torch.device(device), _PAIR_S, hostname=host)
    try:
        values = torch.full((_ELEMENTS,), float(rank + 1), device=device)
        best = float("inf")
        for _ in range(_REPETITIONS):
            began = time.perf_counter()
            total = pair.all_reduce(values, "preflight")
            if total[-1].item() != 3.0 or total[0].item() != 3.0:
                raise RunError(f"the sum is {total[0].item()} and not 3")
            best = min(best, time.perf_counter() - began)
        return values.nbytes / best
    finally:
        pair.close()

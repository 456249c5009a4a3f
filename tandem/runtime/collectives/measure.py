"""Measures what a collective between two ranks of this machine costs: ``python -m tandem.runtime.collectives.measure`` writes it as JSON to standard output."""

import json
import os
import sys
import time
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from tandem.runtime.collectives.communicator import Communicator, connect
from tandem.runtime.process.temporary import temporary_folder

SMALL_BYTES, LARGE_BYTES = 1 << 19, 1 << 22
"""Of an all-reduce: of two sizes, so that the cost of a call and of a byte can be told apart."""
TIMES, ROUNDS = 10, 3
DEADLINE_S = 60.0


class Exchanges(NamedTuple):
    """CPU-seconds of a rank, all of its threads and the kernel's work included: of a collective, and of each byte that it sends in one, with the sum of
    those that it receives."""

    call_cpu_s: float
    sent_byte_cpu_s: float


def measure() -> Exchanges:
    """Returns the costs, from all-reduces of this process with one that it forks: of two ranks each sends all of its tensor, in two collectives."""
    torch.set_num_threads(1)
    with temporary_folder() as folder:
        child = os.fork()
        if child == 0:
            try:
                _reduce(_joined(folder, 1))
            finally:
                os._exit(0)
        small, large = _reduce(_joined(folder, 0))
        os.waitpid(child, 0)
    byte = max(0.0, large - small) / (LARGE_BYTES - SMALL_BYTES)
    return Exchanges(max(0.0, small - SMALL_BYTES * byte) / 2, byte)


def _joined(folder: Path, rank: int) -> Communicator:
    return connect("measured", rank, 2, dist.FileStore(str(folder / "store"), 2), torch.device("cpu"), DEADLINE_S)


def _reduce(ranks: Communicator) -> tuple[float, float]:
    """Returns the CPU-seconds of an all-reduce of both sizes: the least of several rounds, which other programs disturbed least."""
    took = []
    for size in (SMALL_BYTES, LARGE_BYTES):
        tensor, rounds = torch.ones(size // 4), list[float]()
        # The first round connects.
        for _ in range(1 + ROUNDS):
            began = time.process_time()
            for _ in range(TIMES):
                ranks.all_reduce(tensor, "a measurement")
            rounds.append((time.process_time() - began) / TIMES)
        took.append(min(rounds[1:]))
    return took[0], took[1]


def main() -> None:
    json.dump(measure()._asdict(), sys.stdout)
    sys.stdout.flush()
    # Threads of the process group may still wait for the other rank.
    os._exit(0)


if __name__ == "__main__":
    main()

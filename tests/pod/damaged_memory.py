"""Runs ``tandem`` and flips a bit of the published weights between ``register`` and ``update_weight``, or after the engine has read them, or a bit of what
the engine has read, in its own memory: ``python damaged_memory.py STEP TIMES [--after-update | --inside-engine] ARGUMENTS``.

Only the controller is changed, which holds no tensors: it writes to the memory of others as a stray process or a failing memory module would. The
trainer, the engine and their shims are unchanged.
"""

import contextlib
import os
import sys
from collections.abc import Callable
from pathlib import Path

from tandem.cli.main import main
from tandem.pod.pod import Pod
from tandem.runtime.coordination.embedded import EmbeddedStore
from tandem.types import WeightVersion
from tandem.weight_transfer.publication import current
from tandem.weight_transfer.shared_memory import Segment


def flip_a_bit(directory: Path) -> None:
    """Flips one bit in the middle of the last published tensor of the run in ``directory``."""
    store = EmbeddedStore(directory / "pod" / "store.sqlite")
    published = current(store)
    store.close()
    assert published is not None
    tensor = published[0].tensors[-1]
    with Segment.open(tensor.segment, writable=True) as segment:
        segment.memory[tensor.offset_bytes + tensor.size_bytes // 2] ^= 1


def flip_inside_engine(directory: Path) -> None:
    """Flips one bit of the embedding, wherever a rollout worker of the run in ``directory`` has it in memory of its own."""
    store = EmbeddedStore(directory / "pod" / "store.sqlite")
    published = current(store)
    store.close()
    assert published is not None
    tensor = next(entry for entry in published[0].tensors if "embed_tokens" in entry.name)
    with Segment.open(tensor.segment) as segment:
        half = tensor.offset_bytes + tensor.size_bytes // 2
        pattern = bytes(segment.memory[half : half + 96])
    flipped, started = 0, children("self")
    # The fork server that both sidecars share is this process's.
    for worker in [*started, *(worker for shim in started for worker in children(shim))]:
        if b"rollout_worker" in Path(f"/proc/{worker}/cmdline").read_bytes():
            flipped += flip_pattern(worker, pattern)
    assert flipped, "no rollout worker holds the embedding"


def children(pid: str) -> list[str]:
    """Returns the processes that the threads of ``pid`` have started, and those that its fork server has."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # The thread has ended meanwhile.
            found += (task / "children").read_text().split()
    servers = [child for child in found if b"fork_server" in Path(f"/proc/{child}/cmdline").read_bytes()]
    return [child for child in found if child not in servers] + [child for server in servers for child in children(server)]


def flip_pattern(pid: str, pattern: bytes, place: int = 0, bit: int = 0) -> int:
    """Flips ``bit`` of byte ``place`` of each ``pattern`` in private memory of the process ``pid`` that it may write. Returns how many there were."""
    count = 0
    with open(f"/proc/{pid}/mem", "r+b", buffering=0) as memory:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            span, rights, *_ = line.split()
            start, stop = (int(end, 16) for end in span.split("-"))
            if not rights.startswith("rw") or rights[3] != "p" or "[v" in line:
                continue
            memory.seek(start)
            try:
                held = memory.read(stop - start)
            except OSError:
                continue
            at = held.find(pattern)
            while at >= 0:
                os.pwrite(memory.fileno(), bytes([held[at + place] ^ (1 << bit)]), start + at + place)
                count, at = count + 1, held.find(pattern, at + 1)
    return count


def damage(step: int, times: int, after: str, flip: Callable[[Path], None] = flip_a_bit) -> None:
    """Flips a bit ``after`` each of the first ``times`` calls of this method of the pod for the weights of ``step``."""
    method, left = getattr(Pod, after), [times]

    def call_and_flip(pod: Pod, version: WeightVersion, **options: bool) -> None:
        method(pod, version, **options)
        if version.step == step and left[0]:
            left[0] -= 1
            flip(pod.journal.path.parent)

    setattr(Pod, after, call_and_flip)


if __name__ == "__main__":
    how = sys.argv[3] if sys.argv[3] in ("--after-update", "--inside-engine") else ""
    flip = flip_inside_engine if how == "--inside-engine" else flip_a_bit
    damage(int(sys.argv[1]), int(sys.argv[2]), "_update_weight" if how else "_register", flip)
    sys.argv[1 : 4 if how else 3] = []
    sys.exit(main())

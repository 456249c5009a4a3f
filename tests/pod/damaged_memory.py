"""Runs ``tandem`` and flips a bit of the published weights between ``register`` and ``update_weight``: ``python damaged_memory.py STEP TIMES
ARGUMENTS``.

Only the controller is changed, which holds no tensors: it writes to the shared memory as a stray process or a failing memory module would. The
trainer, the engine and their shims are unchanged.
"""

import sys
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


def damage(step: int, times: int) -> None:
    """Flips a bit after each of the first ``times`` registrations of the weights of ``step``."""
    register = Pod._register
    left = [times]

    def register_and_flip(pod: Pod, version: WeightVersion) -> None:
        register(pod, version)
        if version.step == step and left[0]:
            left[0] -= 1
            flip_a_bit(pod.journal.path.parent)

    Pod._register = register_and_flip  # type: ignore[method-assign]


if __name__ == "__main__":
    damage(int(sys.argv[1]), int(sys.argv[2]))
    sys.argv[1:3] = []
    sys.exit(main())

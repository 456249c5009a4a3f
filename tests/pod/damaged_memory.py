"""Runs ``tandem`` and flips a bit of the published weights between ``register`` and ``update_weight``, or after the engine has read them: ``python
damaged_memory.py STEP TIMES [--after-update] ARGUMENTS``.

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


def damage(step: int, times: int, after: str) -> None:
    """Flips a bit ``after`` each of the first ``times`` calls of this method of the pod for the weights of ``step``."""
    method, left = getattr(Pod, after), [times]

    def call_and_flip(pod: Pod, version: WeightVersion, **options: bool) -> None:
        method(pod, version, **options)
        if version.step == step and left[0]:
            left[0] -= 1
            flip_a_bit(pod.journal.path.parent)

    setattr(Pod, after, call_and_flip)


if __name__ == "__main__":
    is_late = sys.argv[3:4] == ["--after-update"]
    damage(int(sys.argv[1]), int(sys.argv[2]), "_update_weight" if is_late else "_register")
    sys.argv[1 : 4 if is_late else 3] = []
    sys.exit(main())

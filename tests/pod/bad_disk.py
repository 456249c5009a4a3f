"""Runs ``tandem`` with a disk that fails under the trainer's residents: ``python bad_disk.py damage|full STEP ARGUMENTS``.

``damage`` flips a bit of what the trainer offloaded for the rollout after STEP updates, through the file's descriptor in /proc, as a failing disk would.
``full`` fills the folder of the offload file before that. Only the controller is changed; trainer, engine and their shims are not.
"""

import os
import sys
from pathlib import Path
from typing import Any

from tandem.cli.main import main
from tandem.config.load import read_yaml
from tandem.pod.pod import Pod
from tandem.pod.sidecars import TrainerSidecar
from tandem.types import WeightVersion


def folder_of(pod: Pod) -> Path:
    run = pod.journal.path.parent
    return Path(read_yaml(run / "config.yaml")["trainer"]["offload_folder"] or run / "offload")


def flip_a_bit(folder: Path) -> None:
    """Flips one bit in the last byte of every unnamed file in ``folder``."""
    flipped = 0
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            is_ours = str(link.readlink()).startswith(f"{folder.resolve()}/") and link.stat().st_size > 0
        except OSError:
            continue
        if is_ours:
            with open(link, "r+b", buffering=0) as file:
                # The actor's first storage: byte 0 of the last group is found by its page.
                content = file.read()
                at = max(place for place in range(len(content)) if content[place])
                os.pwrite(file.fileno(), bytes([content[at] ^ 1]), at)
            flipped += 1
    assert flipped, folder


def fill(folder: Path) -> None:
    with open(folder / "filler", "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            pass


def fail(mode: str, step: int) -> None:
    register, offload, done = Pod._register, TrainerSidecar.offload, []

    def register_and_damage(pod: Pod, version: WeightVersion) -> None:
        pods[:] = [pod]
        register(pod, version)
        if mode == "damage" and version.step == step and not done:
            done.append(step)
            flip_a_bit(folder_of(pod))

    def fill_and_offload(sidecar: TrainerSidecar, at: int, release: bool) -> dict[str, Any]:
        if mode == "full" and at == step:
            fill(folder_of(pods[0]))
        return offload(sidecar, at, release)

    pods: list[Pod] = []
    Pod._register = register_and_damage  # type: ignore[method-assign]
    TrainerSidecar.offload = fill_and_offload  # type: ignore[method-assign]


if __name__ == "__main__":
    fail(sys.argv[1], int(sys.argv[2]))
    sys.argv[1:3] = []
    sys.exit(main())

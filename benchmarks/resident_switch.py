"""The switch rollout -> train -> rollout of a pod's trainer with everything offloaded to disk, against ``dd`` with fsync for the same bytes.

    python benchmarks/resident_switch.py [--mib 400] [--rounds 7]

The residents are those of plan ``figure``: actor, two moments and a reference, moved by the code of a run (``TrainerResidents``), with a digest of every
storage. After the update the moments and the actor are written and freed; before inference the reference is read; before training it is given up for
its saved copy, and the actor and the moments are read, and every digest is compared. *Flushed* ends the writes with fsync, as ``dd`` does; a run does
not, because the file is worthless once its process has ended, and the system writes behind. ``dd`` writes and reads as many bytes. In every round the
sides take turns in a random order, after a sync. To memory nothing moves on a CPU.
"""

import datetime
import os
import random
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import torch
from machine import machine, write_ratios, write_report
from options import parser as shared_parser

from tandem.layout.residents import Phase, Residency, State
from tandem.pod.residents.trainer import HeldTensors, TrainerResidents
from tandem.trainer.offload.offloader import Offloader
from tandem.trainer.offload.places import FilePlace, make_place

TARGET = 1.3
LAYERS = 24
UNITS = {"actor": 1, "optimizer": 2, "reference": 1}
"""Copies of the weights that each resident has."""


def state_of(mib: int) -> dict[str, list[torch.Tensor]]:
    """``mib`` MiB of random numbers in all, of every resident a matrix a layer."""
    numbers = mib * 2**20 // 4 // sum(UNITS.values()) // LAYERS
    return {name: [torch.randn(numbers) for _ in range(units * LAYERS)] for name, units in UNITS.items()}


def sums_of(tensors: list[torch.Tensor]) -> list[float]:
    return [float(tensor.double().sum()) for tensor in tensors]


def residents_of(state: dict[str, list[torch.Tensor]], to: str, folder: Path) -> tuple[TrainerResidents, FilePlace | None]:
    place = make_place(to, torch.device("cpu"), folder)
    assert place is None or isinstance(place, FilePlace)
    held = {name: HeldTensors(lambda tensors=tensors: tensors) for name, tensors in state.items()}  # type: ignore[misc]
    return TrainerResidents(Residency("figure", "disk" if to == "disk" else "memory"), held, Offloader(place) if place else None), place


def switch(residents: TrainerResidents, place: FilePlace | None, is_flushed: bool) -> dict[str, float]:
    """One switch in seconds, from a state of training to one of training."""
    began = time.perf_counter()
    residents.leave(Phase.ROLLOUT, 0)
    residents.settle()
    if is_flushed and place is not None:
        os.fsync(place.descriptor)
    written = time.perf_counter()
    residents.enter(Phase.INFERENCE, 0)
    residents.enter(Phase.TRAIN, 0)
    ended = time.perf_counter()
    return {"write": written - began, "read": ended - written, "switch": ended - began}


def dd(source: Path, target: Path, again: int) -> dict[str, float]:
    """Writes ``source`` with fsync; reads what was written and, of it, ``again`` bytes a second time."""
    target.unlink(missing_ok=True)
    began = time.perf_counter()
    subprocess.run(["dd", f"if={source}", f"of={target}", "bs=4M", "conv=fsync"], check=True, capture_output=True)
    written = time.perf_counter()
    for count in ([], [f"count={again >> 22}"]):
        subprocess.run(["dd", f"if={target}", "of=/dev/null", "bs=4M", *count], check=True, capture_output=True)
    ended = time.perf_counter()
    return {"write": written - began, "read": ended - written, "switch": ended - began}


def main() -> None:
    parser = shared_parser(__doc__ or "", work="the files are")
    parser.add_argument("--mib", type=int, default=400, help="MiB of all residents")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    described, work = machine(), options.work / "resident-switch"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    state = state_of(options.mib)
    sizes = {name: sum(tensor.nbytes for tensor in tensors) for name, tensors in state.items()}
    written, read = sizes["actor"] + sizes["optimizer"], sum(sizes.values())
    sums = {name: sums_of(tensors) for name, tensors in state.items()}
    on_disk, place = residents_of(state, "disk", work)
    # The reference is saved in the first switch of a run, and its copy lasts.
    switch(on_disk, place, is_flushed=False)
    in_memory, _ = residents_of(state_of(4), "memory", work)
    source = Path("/dev/shm") / f"resident-switch-{os.getpid()}"
    source.write_bytes(os.urandom(written))
    sides: dict[str, Callable[[], dict[str, float]]] = {
        "to disk, flushed": lambda: switch(on_disk, place, True),
        "to disk, as in a run": lambda: switch(on_disk, place, False),
        "dd with fsync": lambda: dd(source, work / "dd", read - written),
        "to memory": lambda: switch(in_memory, None, False),
    }
    measured: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    draw = random.Random(0)
    try:
        for _ in range(options.rounds + 1):
            for name in draw.sample(list(sides), len(sides)):
                os.sync()
                measured[name].append(sides[name]())
    finally:
        source.unlink()
        shutil.rmtree(work, ignore_errors=True)
    assert not in_memory.take_moves(), "on a CPU nothing moves to memory"
    for phase in (Phase.TRAIN, Phase.INFERENCE):
        on_disk.enter(phase, 0)
        sums |= {f"{name} now": sums_of(state[name]) for name, where in on_disk.states.items() if where is State.DEVICE}
    assert all(sums[f"{name} now"] == sums[name] for name in state), "the residents came back with other numbers"

    def of(name: str, what: str) -> tuple[float, float]:
        values = [one[what] for one in measured[name][1:]]
        return statistics.median(values), min(values)

    def line(name: str) -> str:
        if name == "to memory":
            return f"| {name} | nothing moves on a CPU | | {of(name, 'switch')[0]:.4f} |"
        return f"| {name} | " + " | ".join("{:.3f} ({:.3f})".format(*of(name, what)) for what in ("write", "read", "switch")) + " |"

    ratios = [
        {"what": f"{what}, switch / dd with fsync, {which}", "ratio": of(side, "switch")[place] / of("dd with fsync", "switch")[place], "target": target}
        for side, what, target in (("to disk, flushed", "flushed", f"at most {TARGET}"), ("to disk, as in a run", "as in a run", ""))
        for place, which in enumerate(("medians", "best rounds"))
    ]
    text = "\n".join([
        "# The switch between rollout and training", "", f"{datetime.date.today()}. {described}", "",
        f"{written / 2**20:.0f} MiB written and {read / 2**20:.0f} MiB read a switch; seconds, median of {options.rounds} rounds, the best in brackets.", "",
        "| side | write | read | switch |", "|---|---|---|---|", *map(line, sides), "", "| ratio | | target |", "|---|---|---|",
        *(f"| {one['what']} | {one['ratio']:.2f} | {one['target']} |" for one in ratios),
    ])  # fmt: skip
    print(text)
    write_ratios("resident-switch", ratios, options.work)
    print(f"wrote {write_report('resident-switch', text, options.out)}")


if __name__ == "__main__":
    main()

"""Flips single bits in weights on their way from a trainer to the engines of two pods, and writes what found and repaired each.

    python benchmarks/weight_flips.py [--flips 40] [--seed 0] [--work runs/bench]

The pods are those of tests/pod/flipped_bits.py: a trainer and an engine in one pod, an engine in another, every sidecar in its processes. A bit flips in the
shared memory of the trainer's pod, before its engine or the other pod reads it; in that of the other pod, after it has received the weights; in the bytes
between the pods; and in the memory of an engine's process (``/proc/PID/mem``), after the update. Each must be found, with the name of the tensor, and after
the repair both engines must hold the right weights. ``--flips``: of each place. ``--work`` keeps each flip (``weight-flips.jsonl``), so that the command can be
stopped and started again; the report has all that are there. Ends with exit code 1 where that was not so.
"""

import json
import random
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

from machine import ROOT, machine, write_report
from options import parser as shared_parser

for room in (".", "pod", "weight_transfer"):
    sys.path.insert(0, str(ROOT / "tests" / room))

from flipped_bits import PLACES, Flipping, WeightFlip, faults_of  # noqa: E402 - found by the lines above

FOUND = {
    "trainer": "the engine, by the digest of its copy",
    "served": "the receiver, by the digest of each part, which it reads twice",
    "receiver": "the other pod's engine, by the digest of its copy",
    "wire": "the receiver, by the digest of each part",
    "engine": "the engine, by the digests of what it held after the update (`rollout.verify_weights_every_steps`)",
}
REPAIR = {
    "trainer": "the trainer registers the weights again",
    "served": "the trainer registers the weights again",
    "receiver": "the trainer registers the weights again, and the pod receives them again",
    "wire": "the part is read again",
    "engine": "the engine is replaced and reads the weights again, and the rollout is drawn again",
}


def read(path: Path, seed: int) -> dict[str, list[tuple[WeightFlip, float]]]:
    """Returns the recorded flips of ``seed`` and the seconds of each, by place."""
    found = dict[str, list[tuple[WeightFlip, float]]]()
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        row = json.loads(line)
        if row["seed"] == seed:
            found.setdefault(row["key"], []).append((WeightFlip(**row["flip"]), row["seconds"]))
    return found


def main() -> int:
    parser = shared_parser(__doc__ or "", work="the flips are")
    parser.add_argument("--flips", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    described, path = machine(), options.work / "weight-flips.jsonl"
    done = {place: len(flips) for place, flips in read(path, options.seed).items()}
    if any(done.get(place, 0) < options.flips for place in PLACES):
        with tempfile.TemporaryDirectory() as folder:
            flipping = Flipping(Path(folder))
            try:
                for place, flip in PLACES.items():
                    for number in range(done.get(place, 0), options.flips):
                        began = time.monotonic()
                        made = flip(flipping, random.Random(f"{options.seed} {place} {number}"))
                        row = {"seed": options.seed, "key": place, "flip": asdict(made), "seconds": time.monotonic() - began}
                        with path.open("a", encoding="utf-8") as file:
                            file.write(json.dumps(row) + "\n")
                        print(place, number, faults_of(made), flush=True)
            finally:
                flipping.close()
    recorded = read(path, options.seed)
    flips = {place: [flip for flip, _ in recorded[place]] for place in PLACES if place in recorded}
    seconds = {place: sum(took for _, took in recorded[place]) for place in flips}
    wrong = [(each, faults) for found in flips.values() for each in found if (faults := faults_of(each))]
    lines = ["# Bits that flip in weights", "", described, "", f"Seed {options.seed}. A repair is right if both engines hold every tensor as before.", ""]
    lines += ["| place | flips | tensors | found and named | by | repair | right again | seconds each |", "|---|---|---|---|---|---|---|---|"]
    for place, found in flips.items():
        named = sum(not [fault for fault in faults_of(each) if fault.startswith("not")] for each in found)
        right, tensors = sum(not each.wrong for each in found), len({each.tensor for each in found})
        lines.append(
            f"| {found[0].place} | {len(found)} | {tensors} | {named} | {FOUND[place]} | {REPAIR[place]} | {right} | {seconds[place] / len(found):.1f} |"
        )
    lines += ["", *(f"Wrong: {each}: {faults}" for each, faults in wrong)]
    text = "\n".join(lines)
    print(text)
    print(f"wrote {write_report('weight-flips', text, options.out)}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

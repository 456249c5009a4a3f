"""Flips single bits in weights on their way from a trainer to the engines of two pods, and writes what found and repaired each.

    python benchmarks/weight_flips.py [--flips 40] [--seed 0]

The pods are those of tests/pod/flipped_bits.py: a trainer and an engine in one pod, an engine in another, every sidecar in its processes. A bit flips in the
shared memory of the trainer's pod, before its engine or the other pod reads it; in that of the other pod, after it has received the weights; in the bytes
between the pods; and in the memory of an engine's process (``/proc/PID/mem``), after the update. Each must be found, with the name of the tensor, and after
the repair both engines must hold the right weights. ``--flips``: of each place. Ends with exit code 1 where that was not so.
"""

import random
import sys
import tempfile
import time
from collections import Counter
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


def main() -> int:
    parser = shared_parser(__doc__ or "")
    parser.add_argument("--flips", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    described, flips, seconds = machine(), dict[str, list[WeightFlip]](), Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        flipping = Flipping(Path(folder))
        try:
            for place, flip in PLACES.items():
                began = time.monotonic()
                flips[place] = [flip(flipping, random.Random(f"{options.seed} {place} {number}")) for number in range(options.flips)]
                seconds[place] = time.monotonic() - began
                print(place, [faults for each in flips[place] if (faults := faults_of(each))], flush=True)
        finally:
            flipping.close()
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

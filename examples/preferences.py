"""Writes preference pairs for the task `sort` as JSON lines: to `3142=` the answer `1234` is preferred to one with a mistake.

    python examples/preferences.py runs/preferences/pairs.jsonl
"""

import json
import random
import sys
from pathlib import Path

PAIRS = 4096


def mistaken(digits: list[int], draw: random.Random) -> list[int]:
    """Returns `digits` with two unequal ones exchanged, or one misread."""
    wrong = list(digits)
    unequal = [(i, j) for i in range(len(wrong)) for j in range(i) if wrong[i] != wrong[j]]
    if unequal and draw.random() < 0.5:
        i, j = draw.choice(unequal)
        wrong[i], wrong[j] = wrong[j], wrong[i]
    else:
        i = draw.randrange(len(wrong))
        wrong[i] = (wrong[i] + draw.randint(1, 9)) % 10
    return wrong


def main(path: Path) -> None:
    draw = random.Random(0)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        for _ in range(PAIRS):
            digits = [draw.randrange(10) for _ in range(draw.randint(3, 6))]
            right = sorted(digits)
            texts = ["".join(map(str, each)) for each in (digits, right, mistaken(right, draw))]
            file.write(json.dumps(dict(zip(("prompt", "chosen", "rejected"), (f"{texts[0]}=", *texts[1:]), strict=True))) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""Wall seconds of ``import tandem`` and ``tandem --help``, beside an empty Python and ``import torch``, in turn.

    python benchmarks/startup.py [--rounds 20]
"""

import subprocess
import sys
from time import perf_counter

from machine import ROOT, best_and_median, machine, write_report
from options import parser as shared_parser

GATE_S = 0.3
COMMANDS = {
    "python -c pass": ["-c", "pass"],
    "import tandem": ["-c", "import tandem"],
    "tandem --help": ["-m", "tandem.cli.main", "--help"],
    "import torch": ["-c", "import torch"],
}


def seconds(arguments: list[str]) -> float:
    began = perf_counter()
    subprocess.run([sys.executable, *arguments], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return perf_counter() - began


def main() -> None:
    parser = shared_parser(__doc__ or "")
    parser.add_argument("--rounds", type=int, default=20, help="runs of each command, after one that is not counted")
    options = parser.parse_args()
    described = machine()
    found: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for turn in range(options.rounds + 1):
        for name, arguments in COMMANDS.items():
            took = seconds(arguments)
            if turn:
                found[name].append(took)
    lines = ["| command | best s | median s |", "|---|---|---|"]
    lines += ["| `{}` | {:.3f} | {:.3f} |".format(name, *best_and_median(values)) for name, values in found.items()]
    verdicts = [
        f"`{name}`: {best_and_median(found[name])[1]:.2f} s (median), under {GATE_S} s: {'met' if best_and_median(found[name])[1] < GATE_S else 'MISSED'}."
        for name in ("import tandem", "tandem --help")
    ]
    text = "\n".join(["# Start of the command", "", described, "", f"{options.rounds} runs of each, taken in turn.", "", *lines, "", *verdicts])
    print(text)
    print(f"wrote {write_report('startup', text, options.out)}")


if __name__ == "__main__":
    main()

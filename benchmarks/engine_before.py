"""The engine of this checkout and of another one in turn: time a step, the share of the matrix rate, and whether greedy tokens agree.

Random weights; sequences of 32 prompt and 128 new tokens at temperature 1. The share of the matrix rate is that of the products' operations in torch's own rate
for large matrices, measured between the rounds. CPU time at one thread, wall time at several. On shared cores the best of many short rounds at one thread
says most, and wall times say little.

    python benchmarks/engine_before.py --before CHECKOUT [--models sort 3.7M] [--sequences 1 8 64] [--threads 1] [--rounds 6]
"""

import sys
from contextlib import ExitStack
from itertools import count
from pathlib import Path

from engine_models import MODELS, flops, folder_of
from machine import HERE, Driven, best_and_median, machine, write_report
from options import parser

PROMPT, NEW = 32, 128


def main() -> None:
    made = parser(__doc__ or "", threads=1, work="models and logs are")
    made.add_argument("--before", type=Path, required=True, help="the checkout of another commit")
    made.add_argument("--models", nargs="+", choices=MODELS, default=["sort", "3.7M"])
    made.add_argument("--sequences", type=int, nargs="+", default=[1, 8, 64])
    made.add_argument("--rounds", type=int, default=6)
    options = made.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    kind, threads = "cpu_s" if options.threads == 1 else "wall_s", str(options.threads)
    seconds_of = "CPU" if options.threads == 1 else "wall"
    lines = ["# The engine before and after", "", machine(), "", f"Threads: {threads}. Best / median of a step, prefill included.", ""]
    lines += [f"| model | sequences | before, {seconds_of} ms | after | before / after | share of the matrix rate, before | after | greedy |", "|" + "---|" * 8]
    calls = count(1)
    for model in options.models:
        folder = folder_of(model, options.work)
        with ExitStack() as stack:
            # Each with the modules of its own checkout.
            sides = {
                name: stack.enter_context(
                    Driven(
                        name, [sys.executable, tree / "benchmarks/peers/tandem_engine.py", folder, threads, '{"max_model_len": 512}'], options.threads,
                        options.work / f"engine-before-{name}.log", {"PYTHONPATH": str(tree)},
                    )
                )
                for name, tree in (("before", options.before.resolve()), ("after", HERE.parent))
            }  # fmt: skip
            for sequences in options.sequences:
                took: dict[str, list[float]] = {name: [] for name in sides}
                rates = []
                for number in range(options.rounds + 1):
                    call = next(calls)
                    for name, side in sides.items():
                        answer = side.ask(f"generate {call} {sequences} {PROMPT} {NEW} 1.0")
                        took[name] += [answer[kind]] if number else []
                    rates.append(sides["after"].ask("rate")[kind])
                greedy = [side.ask(f"generate {call} {sequences} {PROMPT} 16 0")["token_ids"] for side in sides.values()]
                (best, median), (own, own_median) = (best_and_median(took[name]) for name in ("before", "after"))
                shares = [flops(model, sequences, PROMPT, NEW) / seconds / max(rates) for seconds in (best, own)]
                cells = [model, str(sequences), *(f"{1e3 * a / NEW:.3f} / {1e3 * b / NEW:.3f}" for a, b in ((best, median), (own, own_median)))]
                cells += [f"{best / own:.2f} / {median / own_median:.2f}", *(f"{share:.2f}" for share in shares), str(greedy[0] == greedy[1])]
                lines.append(f"| {' | '.join(cells)} |")
                print(lines[-1], flush=True)
    print(f"wrote {write_report('engine-before', chr(10).join(lines), options.out)}")


if __name__ == "__main__":
    main()

"""Tokens per CPU second of our engine beside transformers' ``generate``: 256 sequences and one, 32 new tokens each.

    python benchmarks/rollout.py [--peer-python .venv-peer/bin/python] [--rounds 8] [--threads 1 2]

Sampled at temperature 1 from the same warm model, every prompt another one. ``fixed``: end tokens ignored, so that both sides
make exactly the same number of tokens. ``natural``: each completion ends where the model ends it, as in a rollout. Ours also
gives text and raw and processed log-probabilities of every token, which ``generate`` is not asked for. Both sides are processes
of their own that take turns; the first round is not counted.
"""

import json
import sys
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

from machine import HERE, Driven, best_and_median, machine, peer_python, write_ratios, write_report
from options import parser as shared_parser
from start_model import recipe_with, warm_model

from tandem.pod.prompts import prompt_source

TOKENS = 32
WORKLOADS = {("fixed", 256): 4.0, ("natural", 256): 4.0, ("fixed", 1): 1.0}
"""Lengths, how many at once, and the ratio of tokens a CPU second that is promised."""
CALLS = {256: 1, 1: 5}
"""Calls in one round: a single sequence takes so little that several make one measurement."""
Workload = tuple[str, int]


def measure(model: Path, work: Path, peer: str, threads: int, rounds: int) -> dict[Workload, dict[str, list[dict[str, Any]]]]:
    """By workload and side: the counted rounds."""
    recipe = recipe_with()
    with tempfile.TemporaryDirectory(dir=work) as folder:
        prompts = Path(folder) / "prompts.json"
        with closing(prompt_source(recipe, model)) as source:
            chosen = [list(prompt.token_ids) for step in range(8) for prompt in source.for_step(step)]
        prompts.write_text(json.dumps(chosen), encoding="utf-8")
        ours = [sys.executable, HERE / "peers" / "tandem_generate.py", model, prompts, str(TOKENS), str(threads)]
        theirs = [peer, HERE / "peers" / "transformers_generate.py", model, prompts, str(TOKENS), str(threads)]
        with Driven("tandem", ours, threads, work / "a.log") as a, Driven("transformers", theirs, threads, work / "b.log") as b:
            found: dict[Workload, dict[str, list[dict[str, Any]]]] = {w: {"tandem": [], "transformers": []} for w in WORKLOADS}
            for number in range(rounds + 1):
                for lengths, sequences in WORKLOADS:
                    for name, side in (("tandem", a), ("transformers", b)):
                        parts = [side.ask(f"{lengths} {sequences}") for _ in range(CALLS[sequences])]
                        took = {key: sum(part[key] for part in parts) for key in ("tokens", "cpu_s", "wall_s")}
                        assert lengths == "natural" or took["tokens"] == sequences * TOKENS * CALLS[sequences], took
                        if number:
                            found[lengths, sequences][name].append(took)
    return found


def main() -> None:
    parser = shared_parser(__doc__ or "", threads=(1, 2), peer=True, work="the start model is")
    parser.add_argument("--rounds", type=int, default=8)
    options = parser.parse_args()
    peer, described = peer_python(options.peer_python), machine()
    options.work.mkdir(parents=True, exist_ok=True)
    model = warm_model(options.work)
    lines, promises = [], []
    for threads in options.threads:
        for (lengths, sequences), sides in measure(model, options.work, peer, threads, options.rounds).items():
            tokens = [sum(p["tokens"] for p in sides[name]) / len(sides[name]) for name in ("tandem", "transformers")]
            cells = [f"{threads}", f"{sequences}", lengths, f"{tokens[0]:,.0f} / {tokens[1]:,.0f}"]
            for kind in ("cpu_s", "wall_s"):
                a, b = (
                    best_and_median([part[kind] / part["tokens"] for part in sides[name]]) for name in ("tandem", "transformers")
                )
                cells += [*(f"{1 / best:,.0f} / {1 / median:,.0f}" for best, median in (a, b)), f"**{b[0] / a[0]:.2f}** / {b[1] / a[1]:.2f}"]
                if kind == "cpu_s" and threads == 1:
                    what = f"rollout, tokens a CPU second, {sequences} sequence{'s' if sequences > 1 else ''}, {lengths} lengths"
                    promises.append({"what": what, "ratio": b[0] / a[0], "median": b[1] / a[1], "target": WORKLOADS[lengths, sequences]})
            lines.append("| " + " | ".join(cells) + " |")
            print(lines[-1], file=sys.stderr, flush=True)
    about = (
        f"Best / median of {options.rounds} interleaved rounds; {TOKENS} new tokens a sequence at most, sampled at temperature 1; fixed "
        "lengths: end tokens ignored, natural: each ends where the model ends it; every prompt another one; the sort recipe's warm "
        "model. Ours also returns log-probabilities and text."
    )
    sides = "tandem | transformers | ratio"
    header = f"| threads | sequences | lengths | tokens a round, tandem / transformers | tokens / CPU s, {sides} | tokens / wall s, {sides} |"
    text = "\n".join(["# Rollout beside transformers' generate", "", f"{described}\n\n{about}", "", header, "|---" * 10 + "|", *lines])
    print(text)
    print(f"wrote {write_report('rollout', text, options.out)}")
    write_ratios("rollout", promises, options.work)


if __name__ == "__main__":
    main()

"""Tokens per CPU second of our engine beside transformers' ``generate``: 256 sequences and one, 32 new tokens each.

    python benchmarks/rollout.py [--peer-python .venv-peer/bin/python] [--rounds 8] [--threads 1 2]

The bound of a ratio is what it would be if ours took the matrix products of the layers alone, at the rate of torch's product measured in the same rounds.

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

from bounds import forward_flops, least_s
from machine import HERE, Driven, best_and_median, machine, peer_python, write_ratios, write_report
from options import parser as shared_parser
from start_model import recipe_with, warm_model

from tandem.model.huggingface.model_config import read_shapes
from tandem.pod.prompts import prompt_source

TOKENS = 32
WORKLOADS = {("fixed", 256): 3.0, ("natural", 256): 3.0, ("fixed", 1): 1.0}
"""Lengths, how many at once, and the ratio of tokens a CPU second that is promised."""
CALLS = {256: 1, 1: 5}
"""Calls in one round: a single sequence takes so little that several make one measurement."""
Workload = tuple[str, int]


def measure(
    model: Path, work: Path, peer: str, threads: int, rounds: int
) -> tuple[dict[Workload, dict[str, list[dict[str, Any]]]], list[dict[str, float]], list[int]]:
    """By workload and side: the counted rounds. Then the rates of torch's matrix product in each round, and the lengths of the prompts."""
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
            rates = []
            for number in range(rounds + 1):
                rates.append(a.ask("rate"))
                for lengths, sequences in WORKLOADS:
                    for name, side in (("tandem", a), ("transformers", b)):
                        parts = [side.ask(f"{lengths} {sequences}") for _ in range(CALLS[sequences])]
                        took = {key: sum(part[key] for part in parts) for key in ("tokens", "cpu_s", "wall_s")}
                        assert lengths == "natural" or took["tokens"] == sequences * TOKENS * CALLS[sequences], took
                        if number:
                            found[lengths, sequences][name].append(took)
    return found, rates, [len(prompt) for prompt in chosen]


def main() -> None:
    parser = shared_parser(__doc__ or "", threads=(1, 2), peer=True, work="the start model is")
    parser.add_argument("--rounds", type=int, default=8)
    options = parser.parse_args()
    peer, described = peer_python(options.peer_python), machine()
    options.work.mkdir(parents=True, exist_ok=True)
    model = warm_model(options.work)
    lines, promises, shapes = [], [], read_shapes(model)
    for threads in options.threads:
        measured, rates, prompt_tokens = measure(model, options.work, peer, threads, options.rounds)
        for (lengths, sequences), sides in measured.items():
            tokens = [sum(p["tokens"] for p in sides[name]) / len(sides[name]) for name in ("tandem", "transformers")]
            cells = [f"{threads}", f"{sequences}", lengths, f"{tokens[0]:,.0f} / {tokens[1]:,.0f}"]
            for kind in ("cpu_s", "wall_s"):
                a, b = (
                    best_and_median([part[kind] / part["tokens"] for part in sides[name]]) for name in ("tandem", "transformers")
                )
                cells += [*(f"{1 / best:,.0f} / {1 / median:,.0f}" for best, median in (a, b)), f"**{b[0] / a[0]:.2f}** / {b[1] / a[1]:.2f}"]
                drawn = tokens[0] / CALLS[sequences]
                # The last token of a sequence is never fed.
                flops = forward_flops(shapes, sum(prompt_tokens[:sequences]) + drawn - sequences, drawn)
                # A single row is limited by the weights' way from memory, not by arithmetic.
                bound = b[0] / (least_s(flops, rates, kind) / drawn) if sequences > 1 else None
                cells.append("" if bound is None else f"{bound:.2f}")
                if kind == "cpu_s" and threads == 1:
                    what = f"rollout, tokens a CPU second, {sequences} sequence{'s' if sequences > 1 else ''}, {lengths} lengths"
                    target = WORKLOADS[lengths, sequences]
                    promises.append({"what": what, "ratio": b[0] / a[0], "median": b[1] / a[1], "target": target, "bound": bound})
            lines.append("| " + " | ".join(cells) + " |")
            print(lines[-1], file=sys.stderr, flush=True)
    about = (
        f"Best / median of {options.rounds} interleaved rounds; {TOKENS} new tokens a sequence at most, sampled at temperature 1; fixed "
        "lengths: end tokens ignored, natural: each ends where the model ends it; every prompt another one; the sort recipe's warm "
        "model. Ours also returns log-probabilities and text. Bound: the ratio if ours took its matrix products alone, at the rate of torch's "
        "product in the same rounds."
    )
    sides = "tandem | transformers | ratio | bound"
    header = f"| threads | sequences | lengths | tokens a round, tandem / transformers | tokens / CPU s, {sides} | tokens / wall s, {sides} |"
    text = "\n".join(["# Rollout beside transformers' generate", "", f"{described}\n\n{about}", "", header, "|---" * 12 + "|", *lines])
    print(text)
    print(f"wrote {write_report('rollout', text, options.out)}")
    write_ratios("rollout", promises, options.work)


if __name__ == "__main__":
    main()

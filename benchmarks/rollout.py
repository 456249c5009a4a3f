"""Tokens per CPU second of our engine beside transformers' ``generate``: 256 sequences and one, 32 new tokens each.

    python benchmarks/rollout.py [--peer-python .venv-peer/bin/python] [--rounds 8] [--threads 1 2]

Sampled at temperature 1 from the same warm model, every prompt another one, end tokens ignored, so that both sides make
exactly the same number of tokens. Ours also gives text and raw and processed log-probabilities of every token, which
``generate`` is not asked for. Both sides are processes of their own that take turns; the first round is not counted.
"""

import argparse
import json
import sys
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

from machine import HERE, Driven, best_and_median, machine, peer_python, write_ratios, write_report
from start_model import recipe_with, warm_model

from tandem.pod.prompts import prompt_source

TOKENS = 32
SEQUENCES = {256: 4.0, 1: 1.0}
"""How many at once, and the ratio that is promised."""
CALLS = {256: 1, 1: 5}
"""Calls in one round: a single sequence takes so little that several make one measurement."""


def measure(model: Path, work: Path, peer: str, threads: int, rounds: int) -> dict[int, dict[str, list[dict[str, Any]]]]:
    """By number of sequences and side: the counted rounds."""
    recipe = recipe_with()
    with tempfile.TemporaryDirectory(dir=work) as folder:
        prompts = Path(folder) / "prompts.json"
        with closing(prompt_source(recipe, model)) as source:
            chosen = [list(prompt.token_ids) for step in range(8) for prompt in source.for_step(step)]
        prompts.write_text(json.dumps(chosen), encoding="utf-8")
        ours = [sys.executable, HERE / "peers" / "tandem_generate.py", model, prompts, str(TOKENS), str(threads)]
        theirs = [peer, HERE / "peers" / "transformers_generate.py", model, prompts, str(TOKENS), str(threads)]
        with Driven("tandem", ours, threads, work / "a.log") as a, Driven("transformers", theirs, threads, work / "b.log") as b:
            found: dict[int, dict[str, list[dict[str, Any]]]] = {n: {"tandem": [], "transformers": []} for n in SEQUENCES}
            for number in range(rounds + 1):
                for sequences in SEQUENCES:
                    for name, side in (("tandem", a), ("transformers", b)):
                        parts = [side.ask(f"generate {sequences}") for _ in range(CALLS[sequences])]
                        took = {key: sum(part[key] for part in parts) for key in ("tokens", "cpu_s", "wall_s")}
                        assert took["tokens"] == sequences * TOKENS * CALLS[sequences], took
                        if number:
                            found[sequences][name].append(took)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-python", default=".venv-peer/bin/python")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--work", type=Path, default=Path("runs/bench"), help="where the start model is kept")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    options = parser.parse_args()
    peer, described = peer_python(options.peer_python), machine()
    options.work.mkdir(parents=True, exist_ok=True)
    model = warm_model(options.work)
    lines, promises = [], []
    for threads in options.threads:
        for sequences, sides in measure(model, options.work, peer, threads, options.rounds).items():
            cells, tokens = [f"{threads}", f"{sequences}"], sequences * TOKENS * CALLS[sequences]
            for kind in ("cpu_s", "wall_s"):
                (a, am), (b, bm) = (best_and_median([part[kind] for part in sides[name]]) for name in ("tandem", "transformers"))
                cells += [f"{tokens / a:,.0f} / {tokens / am:,.0f}", f"{tokens / b:,.0f} / {tokens / bm:,.0f}", f"**{b / a:.2f}** / {bm / am:.2f}"]
                if kind == "cpu_s" and threads == 1:
                    what = f"rollout, tokens a CPU second, {sequences} sequence{'s' if sequences > 1 else ''}"
                    promises.append({"what": what, "ratio": b / a, "median": bm / am, "target": SEQUENCES[sequences]})
            lines.append("| " + " | ".join(cells) + " |")
            print(lines[-1], file=sys.stderr, flush=True)
    text = "\n".join([
        "# Rollout beside transformers' generate", "",
        f"{described}\n\nBest / median of {options.rounds} interleaved rounds; {TOKENS} new tokens a sequence, sampled at temperature 1, end tokens "
        "ignored, every prompt another one; the sort recipe's warm model. Ours also returns log-probabilities and text.", "",
        "| threads | sequences | tokens / CPU s, tandem | transformers | ratio | tokens / wall s, tandem | transformers | ratio |",
        "|---|---|---|---|---|---|---|---|", *lines,
    ])
    print(text)
    print(f"wrote {write_report('rollout', text, options.out)}")
    write_ratios("rollout", promises, options.work)


if __name__ == "__main__":
    main()

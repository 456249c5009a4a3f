"""Our engine beside vLLM, transformers' generate and llama.cpp: the same random weights, the same prompts, in turns.

    python benchmarks/engine.py [--sections throughput start llama prefix first chunked] [--models 3.7M 84M 0.5B] [--threads 1 2]
                                [--vllm-python .venv-vllm/bin/python] [--llama-python .venv-llama/bin/python]
                                [--peer-python .venv-peer/bin/python] [--without vLLM llama.cpp] [--quick] [--estimate]

throughput  64 sequences of 32 prompt and 128 new tokens at temperature 1: tokens a second, time to first token, memory,
            whether greedy tokens agree (84M takes about 10 minutes for both thread counts, 0.5B an hour)
start       from the start of the process to the first token
llama       batch 1 and 16 beside llama.cpp on F32, Q8_0 and Q4_K_M
prefix      16 samples of a 512-token prompt over one prefill
first       64 prompts of 512 tokens sent at once: mean and 99th percentile of the times to their first tokens
chunked     a 4k prompt beside 16 decoding sequences, for several budgets of tokens a step

Each part (a section of a model at a thread count) goes to WORK/engine.json as it ends, and is not measured again there: a run
that was cut off goes on where it stopped, and --again measures the chosen parts anew. The report holds every part of the
file that was measured at the same workload. The peers live in environments of their own, which
`python benchmarks/peers/setup.py vllm` and `... llama` make (9 and 10 minutes), and `make bench` for transformers; one that is not
there must be named with --without, and the report names it.
"""

import argparse
import dataclasses
import datetime
import json
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

import engine_parts
from bounds import with_bound
from engine_models import MODELS, flops
from engine_parts import FIRST, Sides, Workload
from engine_report import REPORTS
from machine import SideFailed, machine, peer_python, write_ratios, write_report
from options import parser

SECTIONS = {
    "throughput": ("3.7M", "84M", "0.5B"), "start": ("0.5B",), "llama": ("84M", "0.5B"), "prefix": ("84M",), "first": ("3.7M", "84M"),
    "chunked": ("84M",),
}  # fmt: skip
"""By section the models it is measured on unless --models says others."""
NEEDS = {"llama": ("llama.cpp",)}
"""Sections that have nothing to say without a peer."""
PEERS = {
    "vLLM": ("--vllm-python", "`python benchmarks/peers/setup.py vllm`"),
    "llama.cpp": ("--llama-python", "`python benchmarks/peers/setup.py llama`"),
    "transformers": ("--peer-python", "`make bench`"),
}
GUESSED_RATE = 45e9
"""Operations a second and thread that a side reaches, for the estimate."""


def options_of() -> argparse.Namespace:
    made = parser(__doc__ or "", threads=(1, 2), peer=True, work="models, state and logs are")
    made.add_argument("--vllm-python", default=".venv-vllm/bin/python")
    made.add_argument("--llama-python", default=".venv-llama/bin/python")
    made.add_argument("--without", nargs="+", choices=PEERS, default=[], help="peers that are left out on purpose")
    made.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    made.add_argument("--models", nargs="+", choices=MODELS, help="the models of the chosen sections")
    made.add_argument("--sequences", type=int, default=64)
    made.add_argument("--new", type=int, default=128, help="new tokens of a sequence")
    made.add_argument("--rounds", type=int, default=3, help="counted rounds, of which the best counts")
    made.add_argument("--budgets", type=int, nargs="+", default=[32, 64, 128, 256, 512], help="tokens a step in the section chunked")
    made.add_argument("--quantization", nargs="+", default=[], metavar="NAME", help="measure ours with these quantizations too, beside fp32")
    made.add_argument("--vllm-compile", action="store_true", help="let vLLM compile (start 70-100 s)")
    made.add_argument("--quick", action="store_true", help="16 new tokens and one round: to see that everything runs")
    made.add_argument("--again", action="store_true", help="measure the chosen parts anew")
    made.add_argument("--estimate", action="store_true", help="say how long it would take, and end")
    chosen = made.parse_args()
    if chosen.quick:
        chosen.new, chosen.rounds = min(chosen.new, 16), 1
    return chosen


def sides_of(chosen: argparse.Namespace) -> Sides:
    """Every peer that is there. Exits where one is missing and was not left out."""
    given = {"vLLM": chosen.vllm_python, "llama.cpp": chosen.llama_python, "transformers": chosen.peer_python}
    used = [name for name in PEERS if name not in chosen.without and (name != "llama.cpp" or "llama" in chosen.sections)]
    pythons = {name: peer_python(given[name], *PEERS[name]) for name in used}
    ours: dict[str, dict[str, Any]] = {"tandem": {}}
    if chosen.quantization:
        ours |= {f"tandem {name}": {"quantization": name} for name in chosen.quantization}
    return Sides(chosen.work, pythons, {"enforce_eager": not chosen.vllm_compile}, ours)


def parts_of(chosen: argparse.Namespace) -> Iterator[tuple[str, str, int]]:
    """(section, model, threads) of everything that was asked for."""
    for section in chosen.sections:
        if any(peer in chosen.without for peer in NEEDS.get(section, ())):
            continue
        for model in chosen.models or SECTIONS[section]:
            for threads in chosen.threads:
                yield section, model, threads


def guess_s(section: str, model: str, threads: int, load: Workload, sides: int, budgets: int) -> float:
    """About how long a part takes, in seconds."""
    work, begin = flops(model, load.sequences, load.prompt, load.new), {"sort": 20, "3.7M": 20, "84M": 25, "0.5B": 45}[model]
    rate = GUESSED_RATE * threads
    if section == "throughput":
        return sides * begin + load.rounds * sides * work * 1.3 / rate
    if section == "start":
        return load.rounds * sides * begin
    if section == "llama":
        return 3 * begin + load.rounds * 3 * flops(model, 32, load.prompt, load.new) / rate
    if section == "prefix":
        return 2 * begin + (load.rounds + 1) * 5 * flops(model, 1, 512, 1) / rate
    if section == "first":
        return 2 * begin + load.rounds * 2 * flops(model, FIRST["sequences"], FIRST["prompt"], FIRST["new"]) * 1.5 / rate
    return 2 * (budgets + 1) * (begin + load.rounds * flops(model, 1, 4096, 1) * 3 / rate)


def main() -> int:
    chosen = options_of()
    chosen.work.mkdir(parents=True, exist_ok=True)
    sides = sides_of(chosen)
    load = Workload(chosen.sequences, 32, chosen.new, chosen.rounds)
    state = chosen.work / "engine.json"
    known: list[dict[str, Any]] = json.loads(state.read_text(encoding="utf-8")) if state.exists() else []
    setting = {**dataclasses.asdict(load), "vllm_compile": chosen.vllm_compile, "without": sorted(chosen.without)}
    setting |= {"quantization": chosen.quantization}
    done = {tuple(entry["part"]): entry for entry in known if entry["setting"] == setting}
    wanted = [part for part in parts_of(chosen) if chosen.again or part not in done]
    peers = len(sides.pythons) - ("llama.cpp" in sides.pythons) + len(sides.ours)
    guesses = [guess_s(*part, load, peers, len(chosen.budgets)) for part in wanted]
    print(f"{len(wanted)} parts to measure, about {sum(guesses) / 60:.0f} minutes on quiet cores", file=sys.stderr, flush=True)
    if chosen.estimate:
        return 0
    failed = []
    for number, part in enumerate(wanted, start=1):
        section, model, threads = part
        print(f"--- {number} of {len(wanted)}: {section}, {model}, {threads} threads, about {guesses[number - 1]:.0f} s", file=sys.stderr, flush=True)
        began, before = time.perf_counter(), os.getloadavg()[0]
        measure = getattr(engine_parts, section)
        try:
            found = measure(sides, model, threads, load, *([chosen.budgets] if section == "chunked" else []))
        except SideFailed as error:
            print(error, file=sys.stderr, flush=True)
            failed.append(f"FAILED: {section}, {model}, {threads} threads: {str(error).splitlines()[0]}")
            continue
        entry = {"part": part, "setting": setting, "load": before, "machine": machine(), "found": found}
        entry |= {"date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")}
        known = [e for e in known if (tuple(e["part"]), e["setting"]) != (part, setting)] + [entry]
        done[part] = entry
        partial = state.with_suffix(".part")
        partial.write_text(json.dumps(known), encoding="utf-8")
        partial.rename(state)
        print(f"took {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
    report(chosen, load, done, failed)
    return 1 if failed else 0


def report(chosen: argparse.Namespace, load: Workload, done: dict[tuple[Any, ...], dict[str, Any]], failed: list[str]) -> None:
    """Print and write the tables of every part that is there, with the ratios beside the targets."""
    lines, promises = [], []
    for section, write in REPORTS.items():
        parts = {(part[1], part[2]): entry["found"] for part, entry in sorted(done.items()) if part[0] == section}
        if parts:
            text, found = write(parts)
            lines += text
            promises += found
    loads = [entry["load"] for entry in done.values()]
    about = (
        f"Best of {load.rounds} interleaved rounds; {load.sequences} sequences of {load.prompt} prompt and {load.new} new tokens, sampled at "
        f"temperature 1, fp32 everywhere but where a row says otherwise; vLLM {'compiled' if chosen.vllm_compile else 'eager'}. The load average "
        f"before the parts was {min(loads, default=0):.1f} to {max(loads, default=0):.1f}: above about 0.5 wall times and anything on 2 threads "
        "say little, and CPU seconds on 1 thread are what counts."
    )
    head = ["# Engine beside vLLM, transformers and llama.cpp", "", machine(), "", about, ""]
    head += [f"Left out: {name}." for name in chosen.without] + failed
    head += ["", "## Ratios beside the targets", "", "| what | measured | bound | share of it | target | |", "|---|---|---|---|---|---|"]
    for row in promises:
        met = row["ratio"] <= row["target"] if row["at_most"] else row["ratio"] >= row["target"]
        head.append(f"| {row['what']} | {row['ratio']:.2f} | {with_bound(row)} | {row['target']:g} | {'met' if met else 'MISSED'} |")
    text = "\n".join([*head, "", *lines])
    print(text)
    path = write_report("engine", text, chosen.out)
    for entry in done.values():
        for answer in _answers(entry["found"]):
            answer.pop("token_ids", None)
    path.with_suffix(".json").write_text(json.dumps(list(done.values())) + "\n", encoding="utf-8")
    print(f"wrote {path}")
    write_ratios("engine", promises, chosen.work)


def _answers(found: Any) -> Iterator[dict[str, Any]]:
    """Every mapping in ``found``."""
    if isinstance(found, dict):
        yield found
    for value in found.values() if isinstance(found, dict) else found if isinstance(found, list) else ():
        yield from _answers(value)


if __name__ == "__main__":
    sys.exit(main())

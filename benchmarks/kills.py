"""Kills pods, data-parallel ranks and servers at random milliseconds from their start on, and writes how each ended.

    python benchmarks/kills.py [--pods 40] [--ranks 40] [--servers 20] [--seed 1] [--work runs/kills]

A run is killed (one random process, or all at once), resumed until it ends, and compared with an undisturbed one: every byte of the model and
of the checkpoints, the rows of metrics.jsonl but for times, memory and traffic, and the evaluations. A server is asked for the same completion
before and after. Each has a temporary folder of its own, which must be empty in the end, as must be its part of /dev/shm. These are the kills of
tests/kills. ``--work`` keeps each kill (``kills.jsonl``) and the folders of those with something wrong, so that the command can be stopped and
started again; the report has all kills that are there. Ends with exit code 1 where something was wrong.
"""

import json
import random
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from machine import ROOT, machine, write_report
from options import parser as shared_parser

for room in ("", "kills", "pod", "jobs", "serving"):
    sys.path.insert(0, str(ROOT / "tests" / room))

from kill_targets import pod_job, ranks_job, server_model  # noqa: E402 - found by the lines above
from random_kills import Kill, kill_job, kill_one, kill_server, table  # noqa: E402

KINDS = {"pods": 40, "ranks": 40, "servers": 20}


def killer(kind: str, folder: Path) -> Callable[[Path, random.Random], Kill]:
    """Returns what kills one ``kind``, after an undisturbed one in ``folder``."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if kind == "servers":
        model, text, seconds = server_model(folder)
        return lambda place, rng: kill_server(model, place, text, seconds, rng)
    job = (pod_job if kind == "pods" else ranks_job)(folder)
    return lambda place, rng: kill_job(job, place, rng)


def read(path: Path) -> dict[tuple[str, int, int], Kill]:
    """Returns the recorded kills by kind, seed and number."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
    return {(row["kind"], row["seed"], row["number"]): Kill(**{**row["kill"], "wrong": tuple(row["kill"]["wrong"])}) for row in rows}


def report(kills: dict[tuple[str, int, int], Kill]) -> str:
    every = list(kills.values())
    tree, missed = (sum(kill.victim.startswith(what) for kill in every) for what in ("all processes", "nothing"))
    fine = sum(not kill.wrong for kill in every)
    lines = ["# Kills at random milliseconds", "", machine(), ""]
    lines += [f"{len(every)} kills, {tree} of them of all processes at once; {missed} came after the end of the run. {fine} with nothing wrong.", ""]
    for kind in KINDS:
        found = [kill for (of, _, _), kill in kills.items() if of == kind]
        if found:
            first, last = min(kill.at_s for kill in found), max(kill.at_s for kill in found)
            lines += [f"## {kind}: {len(found)} kills, {first:.3f} to {last:.3f} s after the start of the command", "", *table(found), ""]
    return "\n".join(lines)


def main() -> int:
    parser = shared_parser(__doc__ or "", work="the kills are")
    for kind, count in KINDS.items():
        parser.add_argument(f"--{kind}", type=int, default=count, help="the number of kills")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    work = options.work.resolve() / "kills"
    work.mkdir(parents=True, exist_ok=True)
    path = work / "kills.jsonl"
    for kind in KINDS:
        missing = [number for number in range(getattr(options, kind)) if (kind, options.seed, number) not in read(path)]
        one = killer(kind, work / f"{kind}-{options.seed}") if missing else None
        for number in missing:
            assert one is not None
            kill = kill_one(one, work / f"{kind}-{options.seed}", options.seed, number)
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"kind": kind, "seed": options.seed, "number": number, "kill": asdict(kill)}) + "\n")
    kills = read(path)
    text = report(kills)
    print(text)
    print(f"wrote {write_report('kills', text, options.out)}")
    return 1 if any(kill.wrong for kill in kills.values()) else 0


if __name__ == "__main__":
    sys.exit(main())

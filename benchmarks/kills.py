"""Kills pods, data-parallel ranks and servers at random milliseconds from their start on, and writes how each ended.

    python benchmarks/kills.py [--pods 40] [--ranks 40] [--servers 20] [--seed 1]

A run is killed (one random process, or all at once), resumed until it ends, and compared with an undisturbed one: every byte of the model and
of the checkpoints, the rows of metrics.jsonl but for times, memory and traffic, and the evaluations. A server is asked for the same completion
before and after. Each has a temporary folder of its own, which must be empty in the end, as must be its part of /dev/shm. These are the kills of
tests/kills. Ends with exit code 1 where something was wrong.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

from machine import ROOT, machine, write_report
from options import RESULTS

for room in ("kills", "pod", "jobs", "serving"):
    sys.path.insert(0, str(ROOT / "tests" / room))

from kill_targets import pod_job, ranks_job, server_model  # noqa: E402 - found by the lines above
from random_kills import Kill, kill_job, kill_many, kill_server, table  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the report goes")
    for name, count in (("pods", 40), ("ranks", 40), ("servers", 20)):
        parser.add_argument(f"--{name}", type=int, default=count, help="the number of kills")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    began, lines, every = time.monotonic(), ["# Kills at random milliseconds", "", machine(), ""], list[Kill]()
    with tempfile.TemporaryDirectory(prefix="kills-") as name:
        work = Path(name)
        for kind, count in (("pods", options.pods), ("ranks", options.ranks), ("servers", options.servers)):
            if not count:
                continue
            folder = work / kind
            folder.mkdir()
            if kind == "servers":
                model, text, seconds = server_model(folder)
                kills = kill_many(lambda at, rng: kill_server(model, at, text, seconds, rng), folder, options.seed, count)  # noqa: B023
            else:
                job = (pod_job if kind == "pods" else ranks_job)(folder)
                seconds = job.seconds
                kills = kill_many(lambda at, rng: kill_job(job, at, rng), folder, options.seed, count)  # noqa: B023
            wrong = sum(bool(kill.wrong) for kill in kills)
            lines += [f"## {kind}: {count} kills from 0 to {seconds:.1f} s, {count - wrong} with nothing wrong", "", *table(kills), ""]
            every += kills
    wrong = [kill for kill in every if kill.wrong]
    struck = sum(kill.victim == "all processes" for kill in every)
    lines.insert(3, f"\n{len(every)} kills, {struck} of them of all processes at once; {len(every) - len(wrong)} with nothing wrong.")
    lines.append(f"Seed {options.seed}, {(time.monotonic() - began) / 60:.0f} minutes.")
    print("\n".join(lines))
    print(f"wrote {write_report('kills', chr(10).join(lines), options.out)}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

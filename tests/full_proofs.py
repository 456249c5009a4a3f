"""Run the tests marked ``full``, the one proved longest ago first, and say by name what was not run.

    python tests/full_proofs.py --minutes 40      as many as fit
    python tests/full_proofs.py --record          all, and write down the day of each that passed

The record is tests/full_proofs.csv (test, day last proved). A proof older than seven days is named as overdue.
"""

import argparse
import csv
import datetime
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RECORD = Path(__file__).with_suffix(".csv")
NEVER = "1970-01-01"


def collect() -> list[str]:
    """The node ids of all full proofs, a function with its parameters as one. Exits where pytest cannot collect them."""
    command = [sys.executable, "-m", "pytest", "-m", "full", "--collect-only", "-q", "--no-header"]
    listing = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if listing.returncode not in (0, 5):
        sys.exit(f"the full proofs cannot be collected:\n{listing.stdout}{listing.stderr}")
    cases = [line.partition("[")[0] for line in listing.stdout.splitlines() if "::" in line]
    return list(dict.fromkeys(cases))


def read_record() -> dict[str, str]:
    if not RECORD.exists():
        return {}
    with RECORD.open(newline="") as file:
        return {row["test"]: row["proved"] for row in csv.DictReader(file)}


def write_record(record: dict[str, str], known: list[str]) -> None:
    with RECORD.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["test", "proved"])
        writer.writerows((test, record[test]) for test in sorted(known) if test in record)


def run(test: str, limit_s: float) -> str:
    """"passed", "failed" or "out of time"."""
    try:
        done = subprocess.run([sys.executable, "-m", "pytest", "-q", "--no-header", "-m", "full", test], cwd=ROOT, timeout=limit_s)
    except subprocess.TimeoutExpired:
        return "out of time"
    return "passed" if done.returncode == 0 else "failed"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no proof after this time; stop the one that runs")
    parser.add_argument("--record", action="store_true", help="write the day of each passed proof to full_proofs.csv")
    options = parser.parse_args()
    tests, record, today = collect(), read_record(), datetime.date.today().isoformat()
    tests.sort(key=lambda test: (record.get(test, NEVER), test))
    end = time.monotonic() + options.minutes * 60
    outcome: dict[str, str] = {}
    for test in tests:
        left = end - time.monotonic()
        if left <= 0:
            break
        outcome[test] = run(test, left if left != float("inf") else 7200)
        if outcome[test] == "passed":
            record[test] = today
            if options.record:
                write_record(record, tests)
    week_ago = (datetime.date.today() - datetime.timedelta(days=7)).isoformat()
    for test in tests:
        state = outcome.get(test, "NOT RUN (no time left)")
        overdue = "  OVERDUE: proved last on " + record.get(test, "no day") if record.get(test, NEVER) < week_ago else ""
        print(f"full proof {state}: {test}{overdue}")
    passed, failed = (sum(state == wanted for state in outcome.values()) for wanted in ("passed", "failed"))
    print(f"{passed} passed, {failed} failed, {len(tests) - passed - failed} skipped")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

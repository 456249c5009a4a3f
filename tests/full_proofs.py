"""Runs the tests marked ``full``, those that passed longest ago first, and lists those that were not run.

    python tests/full_proofs.py --minutes 40      as many as fit
    python tests/full_proofs.py --record          all; record the date of each that passes
    python tests/full_proofs.py --sidecars        make the environment of a sidecar whose proofs are due first; the time for it counts

The record is tests/full_proofs.csv (test, date of the last pass). A test whose last pass is more than seven days old is listed as overdue.
"""

import argparse
import csv
import datetime
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RECORD = Path(__file__).with_suffix(".csv")
NEVER = "1970-01-01"
SIDECARS = {
    "vllm": (
        (
            "tests/backends/test_backends_vllm.py", "tests/backends/test_backends_vllm_experts.py", "tests/pod/test_pod_vllm.py",
            "tests/pod/test_pod_vllm_experts.py", "tests/pod/test_pod_vllm_episodes.py", "tests/pod/test_pod_vllm_partial.py",
            "tests/backends/test_backends_vllm_ranks.py", "tests/pod/test_pod_vllm_ranks.py",
            "tests/pod/test_pod_vllm_pods.py", "tests/pod/test_pod_vllm_followed.py",
            "tests/jobs/test_jobs_draft.py",
        ),
        ("tandem/backends/vllm", "tandem/backends/requirements.py", "tandem/pod/vllm_worker.py", "tandem/pod/rollout_groups.py"),
    ),
    "megatron": (
        (
            "tests/backends/test_backends_megatron.py", "tests/backends/test_backends_megatron_checkpoints.py",
            "tests/backends/test_backends_megatron_dist.py", "tests/pod/test_pod_megatron.py",
        ),
        ("tandem/backends/megatron", "tandem/backends/requirements.py"),
    ),
    "deepspeed": (
        ("tests/backends/test_backends_deepspeed_training.py", "tests/pod/test_pod_deepspeed.py"),
        ("tandem/backends/deepspeed", "tandem/backends/requirements.py"),
    ),
}
"""The proofs that need the environment of a sidecar, and the code that they prove: the environment takes gigabytes and minutes, so it is made only where a
proof is overdue or was not made since the code changed."""


def collect() -> list[str]:
    """Returns the node ids of all full tests, one for each function whatever its parameters. Exits if pytest cannot collect them."""
    command = [sys.executable, "-m", "pytest", "-m", "full", "--collect-only", "-q", "--no-header"]
    listing = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if listing.returncode not in (0, 5):
        sys.exit(f"the full tests cannot be collected:\n{listing.stdout}{listing.stderr}")
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


def due_sidecars(tests: list[str], record: dict[str, str], week_ago: str) -> list[str]:
    """Returns the sidecars of which a proof is overdue, or older than the last change of its code."""
    due = []
    for name, (files, code) in SIDECARS.items():
        oldest = min((record.get(test, NEVER) for test in tests if test.partition("::")[0] in files), default=NEVER)
        changed = subprocess.run(["git", "log", "-1", "--format=%cs", "--", *files, *code], cwd=ROOT, capture_output=True, text=True).stdout.strip()
        if oldest < week_ago or changed > oldest:
            due.append(name)
    return due


def make_sidecars(names: list[str], limit_s: float) -> None:
    """Makes the environments of ``names`` in ``limit_s`` together; where one cannot be made its proofs skip, and say so."""
    end = time.monotonic() + limit_s
    for name in names:
        left = max(0.0, end - time.monotonic())
        print(f"making the environment of the {name} sidecar, whose proofs are due", flush=True)
        try:
            subprocess.run([sys.executable, "-m", "tandem", "sidecar", "install", name], cwd=ROOT, timeout=left)
        except subprocess.TimeoutExpired:
            print(f"it was not made in {left:.0f} s: the {name} sidecar is NOT tested", flush=True)


def run(test: str, limit_s: float) -> str:
    """Runs one test. Returns ``passed``, ``failed``, ``skipped`` if none of its cases ran, or ``out of time``."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [sys.executable, "-m", "pytest", "-q", "--no-header", "-m", "full", f"--junit-xml={report}", test]
        try:
            done = subprocess.run(command, cwd=ROOT, timeout=limit_s)
        except subprocess.TimeoutExpired:
            return "out of time"
        if done.returncode != 0:
            return "failed"
        cases = list(xml.etree.ElementTree.parse(report).iter("testcase"))
    return "skipped" if all(case.find("skipped") is not None for case in cases) else "passed"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop after this time, including the test that is running")
    parser.add_argument("--record", action="store_true", help="write the date of each test that passes to full_proofs.csv")
    parser.add_argument("--sidecars", action="store_true", help="make the environments of sidecars whose proofs are due first")
    options = parser.parse_args()
    tests, record, today = collect(), read_record(), datetime.date.today().isoformat()
    tests.sort(key=lambda test: (record.get(test, NEVER), test))
    end = time.monotonic() + options.minutes * 60
    week_ago = (datetime.date.today() - datetime.timedelta(days=7)).isoformat()
    if options.sidecars:
        make_sidecars(due_sidecars(tests, record, week_ago), min(options.minutes * 60, 1800) / 2)
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
    for test in tests:
        state = outcome.get(test, "NOT RUN (no time left)")
        overdue = "  OVERDUE: last passed " + record.get(test, "never") if record.get(test, NEVER) < week_ago else ""
        print(f"full test {state}: {test}{overdue}")
    passed, failed = (sum(state == wanted for state in outcome.values()) for wanted in ("passed", "failed"))
    print(f"{passed} passed, {failed} failed, {len(tests) - passed - failed} skipped")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

"""The table of hostile programs: runs those of tests/rewards/test_rewards_hostile_programs.py in each sandbox, as root and as an ordinary user.

    python benchmarks/hostile_programs.py [--report REPORT.xml ...]

A cell counts the cases that passed. A cell that cannot be run on this machine says why: without root there is one account, and a sandbox may not be installed.
``--report`` reads JUnit reports of earlier runs of these tests instead; a later one replaces the tests of an earlier one.
"""

import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree
from collections import defaultdict
from pathlib import Path

from machine import machine, write_report
from options import parser as shared_parser

ROOT = Path(__file__).resolve().parent.parent
TESTS = "tests/rewards/test_rewards_hostile_programs.py"
CELLS = ("bubblewrap", "bubblewrap-user", "gvisor", "gvisor-user")
CASE = re.compile(r"(\w+)\[(?:(.*?)-)??(bubblewrap|gvisor)(-user)?(?:-(.*))?\]$")


def outcomes(report: Path) -> dict[str, dict[str, list[str]]]:
    """Returns, by test and cell, how each case ended: ``passed``, ``failed``, or the reason why it was not run."""
    ended: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for case in xml.etree.ElementTree.parse(report).iter("testcase"):
        name = CASE.match(case.get("name", ""))
        if name is None:
            continue
        skipped = case.find("skipped")
        how = "failed" if case.find("failure") is not None or case.find("error") is not None else "passed"
        ended[name[1]][name[3] + (name[4] or "")].append(how if skipped is None else skipped.get("message", "skipped"))
    return ended


def cell(cases: list[str]) -> str:
    """Returns a cell of the table."""
    failed, passed = cases.count("failed"), cases.count("passed")
    if failed:
        return f"**{failed} of {len(cases)} failed**"
    return f"held ({passed})" if passed else f"not run: {next(iter(cases), 'no such test')}"


def main() -> None:
    parser = shared_parser(__doc__ or "", threads=1)
    parser.add_argument("--report", type=Path, nargs="+", default=[])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        reports = options.report or [Path(folder, "report.xml")]
        if not options.report:
            subprocess.run([sys.executable, "-m", "pytest", "-q", "-m", "full or not full", f"--junit-xml={reports[0]}", TESTS], cwd=ROOT, check=False)
        ended = {test: cells for report in reports for test, cells in outcomes(report).items()}
    versions = [subprocess.run([name, "--version"], capture_output=True, text=True, check=False).stdout.split("\n")[0] for name in ("bwrap", "runsc")]
    account = "root" if os.geteuid() == 0 else "an ordinary user"
    lines = ["# Hostile programs in the sandboxes of the code executor", "", machine(), "", f"{', '.join(versions)}. Run by {account}; `user` is `nobody`."]
    if len(options.report) > 1:
        lines[-1] += f" From the reports of {len(options.report)} runs; a program that is in several counts as in the last."
    lines += ["", "Memory is limited by RLIMIT_AS of each process, not by a cgroup.", ""]
    lines += ["| program | bubblewrap | bubblewrap, user | gVisor | gVisor, user |", "| --- | --- | --- | --- | --- |"]
    for test, cells in ended.items():
        lines.append(f"| {test.removeprefix('test_').replace('_', ' ')} | {' | '.join(cell(cells[name]) for name in CELLS)} |")
    print("\n".join(lines))
    print(f"wrote {write_report('hostile-programs', chr(10).join(lines), options.out)}")


if __name__ == "__main__":
    main()

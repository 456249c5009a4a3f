"""Write the page of a run as it is now, the dashboard's own in one file, or one page that compares several runs.

examples:
  tandem report runs/sort
  tandem report runs/sort runs/sort-2 -o compare.html
"""

import argparse
from pathlib import Path

from tandem.types import UserError

COMPARISON = "compare.html"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_directory", nargs="+", help="the folder of a run, for example runs/sort; several are compared")
    parser.add_argument("-o", "--output", metavar="FILE", help=f"the page (default: RUN/report.html; of several runs {COMPARISON})")


def run(options: argparse.Namespace) -> int:
    from tandem.dashboard.report import write_report
    from tandem.report.run_facts import REPORT

    directories = [Path(directory) for directory in options.run_directory]
    output = None if options.output is None else Path(options.output)
    if output is not None and output.exists() and not output.is_file():
        # It would be replaced by the page: as root even a device.
        raise UserError(f"--output is '{output}', which is no regular file; name a file to write")
    if output is not None and not output.parent.is_dir():
        raise UserError(f"--output is '{output}', and '{output.parent}' is not a folder; make it, or name another file")
    print(write_report(directories, output or (directories[0] / REPORT if len(directories) == 1 else Path(COMPARISON))))
    return 0

"""Write a run's report.html again from its journal and metrics.

example:
  tandem report runs/sort
"""

import argparse
from pathlib import Path


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_directory", help="the folder of the run, for example runs/sort")


def run(options: argparse.Namespace) -> int:
    from tandem.report.run_report import report_run

    print(report_run(Path(options.run_directory)))
    return 0

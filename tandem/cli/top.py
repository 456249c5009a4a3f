"""Show a run in the terminal while it trains: figures, curves, phases, memory, faults.

Of a folder of runs it shows the one that is training, or the newest. Ctrl-C ends it; the run is only read.

examples:
  tandem top                      the run that trains in runs/
  tandem top runs/sort
  tandem top runs/sort --once     print it once
"""

import argparse
import contextlib
from pathlib import Path


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", nargs="?", default="runs", help="a run, or the folder with the runs (default: runs)")
    parser.add_argument("--once", action="store_true", help="print it once and stop, as where the output is no terminal")


def run(options: argparse.Namespace) -> int:
    from rich.console import Console

    from tandem.dashboard.top import chosen_run, watch

    shown = chosen_run(Path(options.run))
    with contextlib.suppress(KeyboardInterrupt):
        watch(shown, Console(), once=options.once)
    return 0

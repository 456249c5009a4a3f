"""Verify every byte that the results of a run depend on.

Compares the recipe, the journal, the metrics, the model that the run starts from, every checkpoint, the exported model and the
tokenized data with the digests that were written with them. For everything that is damaged it says what depends on it and what to do.
The exit status is 0 if all is as it was written, and 1 if not. 'tandem resume' verifies a run's records, and what it loads, by itself.

examples:
  tandem verify runs/sort
  tandem verify runs/sort --json
"""

import argparse
import json
import sys
from pathlib import Path


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_directory", help="the folder of the run, for example runs/sort")
    parser.add_argument("--json", action="store_true", help="print one JSON object for each part")


def run(options: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.progress import Progress

    from tandem.jobs.verify.verify_run import parts_of

    parts, damaged = parts_of(Path(options.run_directory)), 0
    with Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("verify", total=sum(part.size for part in parts))
        for part in parts:
            progress.update(task, description=part.name)
            findings = part.verify()
            damaged += len(findings)
            if options.json:
                print(json.dumps({"part": part.name, "bytes": part.size, "findings": [finding.to_json() for finding in findings]}), flush=True)
            else:
                print("\n".join([f"{'DAMAGED' if findings else 'ok':7}  {part.name}", *(f"         {finding.line()}" for finding in findings)]), flush=True)
            progress.advance(task, part.size)
    if not options.json:
        parts_text = f"{len(parts)} parts, {sum(part.size for part in parts) / 2**20:,.1f} MiB"
        print(f"{parts_text}: " + (f"{damaged} damaged" if damaged else "everything is as it was written"))
    return 1 if damaged else 0

"""Show where a run is, and how far, on any launcher.

The state is queued, running, finished, stopped or failed; 'tandem resume' continues the last two. Nodes of a run on several are in use, spare, cordoned
(with the reason) or gone.

examples:
  tandem status runs/sort
  tandem status runs/sort --json
  tandem status runs/sweep-*            the runs of an array; with --json a line each
"""

import argparse
import json
from dataclasses import asdict
from pathlib import Path


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_directory", nargs="+", help="the folder of the run, for example runs/sort, or those of several")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(options: argparse.Namespace) -> int:
    for each in options.run_directory:
        _show(Path(each), options.json)
    return 0


def _show(directory: Path, as_json: bool) -> None:
    from tandem.cluster.launch.choose import launcher_of
    from tandem.cluster.launch.progress import read_progress
    from tandem.cluster.nodes import read_nodes
    from tandem.jobs.start import read_recipe

    chosen = launcher_of(directory)
    status, progress = chosen.status(directory), read_progress(read_recipe(directory), directory)
    nodes = read_nodes(directory)
    if as_json:
        told = {"run": str(directory), "launcher": chosen.name, **asdict(status), **asdict(progress), "nodes": [asdict(node) for node in nodes]}
        print(json.dumps(told))
        return
    about = ": ".join(text for text in (status.where, status.reason) if text)
    print(f"{directory}: {status.state}" + (f", {about}" if about else ""))
    step = "in its stage of supervised fine-tuning" if progress.is_in_sft else f"{progress.steps} of at most {progress.max_steps} steps"
    saved = "no checkpoint yet" if progress.checkpoint is None else f"newest checkpoint after step {progress.checkpoint}"
    print(", ".join(text for text in (step, progress.score, saved) if text))
    for node in nodes:
        print(f"node {node.node}: {node.state}" + (f", {node.reason}" if node.reason else ""))

"""Show where a run is, and how far, on any launcher.

The state is queued, running, finished, stopped or failed; 'tandem resume' continues the last two. Nodes of a run on several are in use, spare, cordoned
(with the reason) or gone. Of each tier of checkpoints (memory of nodes, local disk, the run's folder, object store) it has the newest whole copy, its age and
rate, and the nodes that keep it.

examples:
  tandem status runs/sort
  tandem status runs/sort --json
  tandem status runs/sweep-*            the runs of an array; with --json a line each
"""

import argparse
import json
import time
from dataclasses import asdict
from pathlib import Path

from tandem.cli.several_runs import for_each_run


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_directory", nargs="+", help="the folder of the run, for example runs/sort, or those of several")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(options: argparse.Namespace) -> int:
    return for_each_run(options.run_directory, lambda directory: _show(directory, options.json))


def _show(directory: Path, as_json: bool) -> None:
    from tandem.cluster.launch.choose import launcher_of
    from tandem.cluster.launch.progress import read_progress
    from tandem.cluster.nodes import read_nodes
    from tandem.jobs.prepare import read_recipe
    from tandem.runtime.records.checkpoint_tiers import describe_tier, tiers_of

    chosen = launcher_of(directory)
    status, progress = chosen.status(directory), read_progress(read_recipe(directory), directory)
    nodes, tiers, now_s = read_nodes(directory), tiers_of(directory), time.time()
    if as_json:
        told = {"run": str(directory), "launcher": chosen.name, **asdict(status), **asdict(progress), "nodes": [asdict(node) for node in nodes]}
        told["checkpoint_tiers"] = [{**asdict(tier), "age_s": tier.age_s(now_s), "megabytes_per_s": tier.megabytes_per_s} for tier in tiers]
        print(json.dumps(told))
        return
    about = ": ".join(text for text in (status.where, status.reason) if text)
    print(f"{directory}: {status.state}" + (f", {about}" if about else ""))
    step = "in its stage of supervised fine-tuning" if progress.is_in_sft else f"{progress.steps} of at most {progress.max_steps} steps"
    saved = "no checkpoint yet" if progress.checkpoint is None else f"newest checkpoint after step {progress.checkpoint}"
    print(", ".join(text for text in (step, progress.score, saved) if text))
    for tier in tiers:
        print(f"checkpoints in tier {tier.tier}: {describe_tier(tier, now_s)}")
    for node in nodes:
        print(f"node {node.node}: {node.state}" + (f", {node.reason}" if node.reason else ""))

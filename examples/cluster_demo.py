"""Trains a recipe over three Ray nodes on this machine, kills one of them, and shows it on the dashboard: ``make cluster-demo``.

The run goes on without the node, which is started again and joins. The dashboard stays until Ctrl-C, which ends everything; ``--exit`` ends it with the run.

  make cluster-demo
  make cluster-demo ARGS="--kill controller"            the node of the controller and the trainer: the run goes on elsewhere, from its newest checkpoint
  make cluster-demo ARGS="--exit -- --run.max_steps=10"
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tandem.cluster.launch.ray.own_cluster import node_processes
from tandem.runtime.records.journal import Journal

TANDEM = (sys.executable, "-m", "tandem.cli.main")
NODES = 3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="sort", help="a recipe of reinforcement learning (default: sort)")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="the folder of the run (default: runs)")
    parser.add_argument("--kill", choices=("pod", "controller", "none"), default="pod", help="whose node is killed (default: pod)")
    parser.add_argument("--after", type=int, default=3, metavar="STEPS", help="the steps after which it is killed (default: 3)")
    parser.add_argument("--port", type=int, default=0, help="port of the dashboard (default: any free one)")
    parser.add_argument("--exit", action="store_true", help="end with the run, instead of showing it until Ctrl-C")
    parser.add_argument("overrides", nargs="*", metavar="-- --KEY=VALUE", help="keys of the recipe")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with contextlib.ExitStack() as stack:
        try:
            directory = _start(options, stack)
            status = _watch(options, directory)
            if not options.exit:
                print("the dashboard stays until Ctrl-C", flush=True)
                while True:
                    time.sleep(1)
            return status
        except KeyboardInterrupt:
            print("ends", flush=True)
            return 130
        except subprocess.CalledProcessError as error:
            return int(error.returncode)


def _start(options: argparse.Namespace, stack: contextlib.ExitStack) -> Path:
    """Returns the folder of the run, which is ended with ``stack``, as is the dashboard."""
    name = next(name for number in range(1, 1000) if not (options.runs / (name := f"cluster-demo-{number}")).exists())
    settings = [f"--run.directory={options.runs}", f"--run.name={name}", f"--ray.nodes={NODES}", "--checkpoint.every_steps=5", *options.overrides]
    print(f"starts a Ray of {NODES} nodes on this machine", flush=True)
    stack.callback(_end, options.runs / name)
    subprocess.run([*TANDEM, "train", options.recipe, "--on", "ray", *settings], check=True)
    dashboard = subprocess.Popen([*TANDEM, "dashboard", str(options.runs), f"--port={options.port}"], start_new_session=True)
    stack.callback(_stop, dashboard)
    return Path(options.runs / name)


def _watch(options: argparse.Namespace, directory: Path) -> int:
    """Tells how the run goes, kills a node of it, and returns the run's exit status."""
    told, is_killed = 0, options.kill == "none"
    while (status := _status(directory))["state"] in ("queued", "running"):
        told = _tell(directory, told)
        if not is_killed and status["steps"] >= options.after and (node := _node_of(status["where"], options.kill)):
            process = node_processes(directory)[node]
            print(f"after step {status['steps']}: kills {node} (process {process}), the node of the {options.kill}", flush=True)
            os.kill(process, signal.SIGKILL)
            is_killed = True
        time.sleep(1)
    _tell(directory, told)
    subprocess.run([*TANDEM, "status", str(directory)], check=True)
    return 0 if status["state"] == "finished" else 1


def _status(directory: Path) -> dict[str, object]:
    done = subprocess.run([*TANDEM, "status", str(directory), "--json"], check=True, capture_output=True, text=True)
    return dict(json.loads(done.stdout))


def _node_of(where: object, kill: str) -> str:
    """Returns the node of the controller or of the first pod in the text of the status; empty while it has none."""
    role = "controller" if kill == "controller" else "ray-1"
    parts = (part.strip().partition(" on ") for part in str(where).split(","))
    return next((node for name, _, node in parts if name == role), "")


def _tell(directory: Path, told: int) -> int:
    """Prints which pods have joined and left and where the run was resumed, of the journal's events from ``told`` on."""
    if not (directory / "journal.sqlite").is_file():
        return told
    with Journal(directory / "journal.sqlite", read_only=True) as journal:
        events = journal.events()
    for event in events[told:]:
        if event.kind in ("membership", "resume"):
            print(f"{event.kind}: {', '.join(f'{name} {value}' for name, value in event.detail.items())}", flush=True)
    return len(events)


def _end(directory: Path) -> None:
    if (directory / "config.yaml").is_file() and _status(directory)["state"] in ("queued", "running"):
        subprocess.run([*TANDEM, "cancel", str(directory), "--now"], check=False)


def _stop(process: "subprocess.Popen[bytes]") -> None:
    process.send_signal(signal.SIGINT)
    process.wait(30)


if __name__ == "__main__":
    sys.exit(main())

"""Trains a recipe over three Ray nodes on this machine, kills one of them, and shows it on the dashboard: ``make cluster-demo``.

The run goes on without the node, which is started again and joins. The dashboard stays until Ctrl-C, which ends everything; ``--exit`` ends it with the run.
What the run says is printed as it comes. With the default recipe it takes about four minutes on two idle cores: 20 s until Ray's nodes are there, 1 min of
supervised fine-tuning, then about 60 steps.

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

from tandem.cluster.launch.ended import read_end
from tandem.cluster.launch.ray.own_cluster import node_processes, own_address_of
from tandem.cluster.launch.record import read_record
from tandem.runtime.process.processes import Threads, spawn

TANDEM = (sys.executable, "-m", "tandem.cli.main")
NODES = 3
_LOOK_S, _ASK_S, _ENDS_S = 0.5, 30.0, 60.0


def main() -> int:
    if sys.argv[1:2] == ["--guard"]:
        return _guard(Path(sys.argv[2]))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="sort", help="a recipe of reinforcement learning (default: sort)")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="the folder of the run (default: runs)")
    parser.add_argument("--kill", choices=("pod", "controller", "none"), default="pod", help="whose node is killed (default: pod)")
    parser.add_argument("--after", type=int, default=3, metavar="STEPS", help="the steps after which it is killed (default: 3)")
    parser.add_argument("--port", type=int, default=0, help="port of the dashboard (default: any free one)")
    parser.add_argument("--exit", action="store_true", help="end with the run, instead of showing it until Ctrl-C")
    parser.add_argument("overrides", nargs="*", metavar="-- --KEY=VALUE", help="keys of the recipe")
    options = parser.parse_args()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.default_int_handler)
    with contextlib.ExitStack() as stack:
        try:
            directory = _start(options, stack)
            status = _watch(options, directory)
            if not options.exit:
                print("the dashboard stays until Ctrl-C; a run's part 'Faults and recoveries' has the killed node", flush=True)
                while True:
                    time.sleep(1)
            return status
        except KeyboardInterrupt:
            # A second one would leave what the first one ends.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            print("ends", flush=True)
            return 130
        except subprocess.CalledProcessError as error:
            return int(error.returncode)


def _start(options: argparse.Namespace, stack: contextlib.ExitStack) -> Path:
    """Returns the folder of the run, which is ended with ``stack``, as is the dashboard."""
    # Of this process: several may be started at the same time.
    names = (f"cluster-demo-{os.getpid()}{more}" for more in ("", *(f"-{number}" for number in range(2, 1000))))
    directory = Path(options.runs) / next(name for name in names if not (options.runs / name).exists())
    settings = [f"--run.directory={options.runs}", f"--run.name={directory.name}", f"--ray.nodes={NODES}", "--checkpoint.every_steps=5"]
    print(f"starts a Ray of {NODES} nodes on this machine", flush=True)
    # Lives a little longer than this process, even if that is killed.
    guard = subprocess.Popen([sys.executable, __file__, "--guard", str(directory)], stdin=subprocess.PIPE, start_new_session=True)
    stack.callback(_end, guard)
    train = _tandem("train", options.recipe, "--on", "ray", *settings, *options.overrides)
    stack.callback(_interrupt, train)
    if train.wait():
        raise subprocess.CalledProcessError(train.returncode, "train")
    stack.callback(_interrupt, _tandem("dashboard", str(options.runs), f"--port={options.port}"))
    return directory


def _tandem(*arguments: str) -> "subprocess.Popen[bytes]":
    """Starts the command, which a terminal's Ctrl-C does not reach; the kernel ends it with this process."""
    return spawn("tandem.cli.main", arguments, threads=Threads(1), new_session=True)


def _watch(options: argparse.Namespace, directory: Path) -> int:
    """Prints what the run says, kills a node of it, and returns the run's exit status."""
    record = read_record(directory)
    assert record is not None
    told, is_killed, asked_s = 0, options.kill == "none", time.monotonic()
    while read_end(directory, record.job) is None:
        told = _tell(directory, told)
        if not is_killed and _steps(directory) >= options.after and (node := _node_of(directory, options.kill)):
            process = node_processes(directory)[node]
            print(f"after step {_steps(directory)}: kills {node} (process {process}), the node of the {options.kill}", flush=True)
            os.kill(process, signal.SIGKILL)
            is_killed = True
        # To ask Ray costs more than a step of the run; it need not be asked more often whether the cluster is still there.
        if time.monotonic() - asked_s > _ASK_S:
            asked_s = time.monotonic()
            if _status(directory)["state"] not in ("queued", "running"):
                break
        time.sleep(_LOOK_S)
    _tell(directory, told)
    subprocess.run([*TANDEM, "status", str(directory)], check=True)
    if not is_killed:
        print(f"the run ended before a node of it was killed (--after {options.after})", flush=True)
        return 1
    return 0 if _status(directory)["state"] == "finished" else 1


def _status(directory: Path) -> dict[str, object]:
    done = subprocess.run([*TANDEM, "status", str(directory), "--json"], check=True, capture_output=True, text=True)
    return dict(json.loads(done.stdout))


def _steps(directory: Path) -> int:
    """Returns how many steps the run has taken."""
    with contextlib.suppress(FileNotFoundError):
        return (directory / "metrics.jsonl").read_bytes().count(b"\n")
    return 0


def _node_of(directory: Path, kill: str) -> str:
    """Returns the node of the controller or of the first pod; empty while it has none."""
    role = "controller" if kill == "controller" else "ray-1"
    parts = (part.strip().partition(" on ") for part in str(_status(directory)["where"]).split(","))
    return next((node for name, _, node in parts if name == role), "")


def _tell(directory: Path, told: int) -> int:
    """Prints the whole lines that the run has said from byte ``told`` on; returns where they end."""
    with contextlib.suppress(FileNotFoundError):
        said = (directory / "logs" / "ray-1.out").read_bytes()[told:]
        lines = said[: said.rfind(b"\n") + 1]
        print(lines.decode(errors="replace"), end="", flush=True)
        return told + len(lines)
    return told


def _guard(directory: Path) -> int:
    """Ends the run when the process that started this one has ended, however it has, and waits until its cluster is gone."""
    sys.stdin.read()
    if (directory / "config.yaml").is_file() and _status(directory)["state"] in ("queued", "running"):
        subprocess.run([*TANDEM, "cancel", str(directory), "--now"], check=False)
    ends = time.monotonic() + _ENDS_S
    while own_address_of(directory) and time.monotonic() < ends:
        time.sleep(_LOOK_S)
    return 0


def _end(guard: "subprocess.Popen[bytes]") -> None:
    assert guard.stdin is not None
    guard.stdin.close()
    guard.wait()


def _interrupt(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
    process.wait()


if __name__ == "__main__":
    sys.exit(main())

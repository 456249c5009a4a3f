"""Runs ``tandem`` and writes what every process of the run holds after each switch: ``python watched_memory.py OUT ARGUMENTS``.

It reads the kernel's own tables alone (/proc/PID/status, fd and smaps) and the run's folder from outside of the processes that it looks at. Only the
controller is changed, which stops for it at four moments, a line of JSON each in the file OUT:

``trainer_started`` and ``engine_started``: a process has imported everything and holds no model;
``waits``: the trainer has moved away what a rollout does not need, and the engine holds the weights;
``trains``: the engine has ended or sleeps, and the trainer holds what its phase needs.
"""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tandem.cli.main import main
from tandem.layout.residents import Phase
from tandem.pod.pod import Pod
from tandem.pod.sidecars import RolloutSidecar, TrainerSidecar

SHARED = "/dev/shm/"
ROLES = {"tandem.pod.trainer_worker": "trainer", "tandem.pod.rollout_worker": "engine"}


def descendants(pid: int) -> Iterator[int]:
    """The processes that ``pid`` has started, and theirs."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            children = (task / "children").read_text().split()
        except OSError:
            continue
        for child in map(int, children):
            yield child
            yield from descendants(child)


def role_of(pid: int) -> str:
    command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    return next((role for target, role in ROLES.items() if target in command), "shim" if "tandem.pod.shim" in command else "other")


def held_by(pid: int, run: Path) -> dict[str, Any]:
    """The private memory of a process, the files of /dev/shm and of the run's folder that it has open, and the bytes of /dev/shm that it has mapped."""
    files = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target, status = str(link.readlink()), link.stat()
        except OSError:
            continue
        if target.startswith((SHARED, f"{run}/")):
            files.append({"file": target, "inode": status.st_ino, "bytes": status.st_size, "allocated": 512 * status.st_blocks})
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    mapped, inode = dict[str, int](), ""
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        first = line.split()[0]
        if not first.endswith(":"):
            inode = line.split()[4] if SHARED in line else ""
        elif inode and first == "Rss:":
            mapped[inode] = mapped.get(inode, 0) + 1024 * int(line.split()[1])
    return {"role": role_of(pid), "private": 1024 * int(status["RssAnon"].split()[0]), "files": files, "mapped": mapped}


def watch(out: Path) -> None:
    def note(moment: str, step: int, run: Path) -> None:
        processes = {pid: held_by(pid, run.resolve()) for pid in descendants(os.getpid())}
        files = {str(path.relative_to(run)): path.stat().st_size for path in run.rglob("*") if path.is_file()}
        row = {"moment": moment, "step": step, "processes": processes, "files": files}
        with out.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def folder_of(pod: Pod) -> Path:
        return pod.journal.path.parent

    load, start_engine, serve, hand_over, begin = TrainerSidecar.load, RolloutSidecar.start_engine, Pod.serve_weights, Pod.hand_over, Pod.__post_init__
    pods = list[Pod]()

    def began(pod: Pod) -> None:
        pods.append(pod)
        begin(pod)

    def load_and_note(sidecar: TrainerSidecar, *given: Any, **options: Any) -> Any:
        note("trainer_started", 0, folder_of(pods[-1]))
        return load(sidecar, *given, **options)

    def start_and_note(sidecar: RolloutSidecar, *given: Any, **options: Any) -> Any:
        note("engine_started", 0, folder_of(pods[-1]))
        return start_engine(sidecar, *given, **options)

    def serve_and_note(pod: Pod, step: int) -> None:
        was_online = pod.online
        serve(pod, step)
        if was_online and not pod.online:
            note("waits", step, folder_of(pod))

    def hand_over_and_note(pod: Pod, step: int, phase: Phase) -> None:
        was_online = pod.online
        hand_over(pod, step, phase)
        if not was_online:
            note("trains", step, folder_of(pod))

    Pod.__post_init__ = began  # type: ignore[method-assign]
    TrainerSidecar.load = load_and_note  # type: ignore[method-assign]
    RolloutSidecar.start_engine = start_and_note  # type: ignore[method-assign]
    Pod.serve_weights = serve_and_note  # type: ignore[method-assign]
    Pod.hand_over = hand_over_and_note  # type: ignore[method-assign]


if __name__ == "__main__":
    watch(Path(sys.argv[1]))
    sys.argv[1:2] = []
    sys.exit(main())

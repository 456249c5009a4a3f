"""The processes of a run on this machine, by the names and ranks that its records have of them. Imports no torch."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tandem.runtime.machine.usage import ProcessUsage, processes_below
from tandem.runtime.process.heartbeat_table import newest_ranks
from tandem.runtime.process.stacks import UNNAMED, process_name


def run_processes(root: int, folder: Path | None, own: str) -> list[ProcessUsage]:
    """Returns the process ``root`` and all that it has started. One that writes to a log below ``folder``, that of the run here, has the name of that log;
    this process is ``own``, and others have the name of their program."""
    processes = []
    for each in processes_below(root):
        name = own if each.pid == os.getpid() else UNNAMED if folder is None else process_name(each.pid, folder, own)
        processes.append(each if name == UNNAMED else replace(each, name=name))
    return processes


def ranks_by_pid(folder: Path | None) -> dict[int, int]:
    """Returns the trainer rank of each process of the run in ``folder`` that is one."""
    return {} if folder is None else {state.pid: state.rank for state in newest_ranks(folder)}


def named(process: ProcessUsage) -> str:
    """Returns the name of a process with its id, by which it is told from others of the same name."""
    return f"{process.name} ({process.pid})"


def process_labels(name: str, rank: int | None) -> dict[str, str]:
    """Returns the labels of the series of a process that ``named`` has named; ``rank`` is empty where it is no rank of the trainer."""
    process, _, pid = name.removesuffix(")").rpartition(" (")
    return {"process": process, "pid": pid, "rank": "" if rank is None else str(rank)}


PROCESS_LABELS: Sequence[str] = ("process", "pid", "rank")

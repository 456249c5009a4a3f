"""What this machine and the processes below one use, from ``/proc`` (proc(5)): processor, memory, disks, network. Imports no torch."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_SECTOR = 512
"""Bytes of a sector in ``/proc/diskstats``, whatever the disk has."""
_MODES = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")


@dataclass(frozen=True, slots=True)
class NodeUsage:
    """Counters since the machine was started, and memory now. ``cpu_s``: seconds of all cores by mode."""

    cpu_s: Mapping[str, float]
    cores: int
    memory_bytes: int
    memory_available_bytes: int
    disk_read_bytes: int
    disk_written_bytes: int
    received_bytes: int
    sent_bytes: int


@dataclass(frozen=True, slots=True)
class ProcessUsage:
    """``name``: of the program or the Python module that it runs. ``threads``: how many it has."""

    pid: int
    name: str
    cpu_s: float
    resident_bytes: int
    threads: int


def node_usage(proc: Path = Path("/proc"), block: Path = Path("/sys/block")) -> NodeUsage:
    """Returns what this machine uses. ``block``: the folder that names its whole disks."""
    memory = dict(line.split(":", 1) for line in (proc / "meminfo").read_text("ascii").splitlines())
    in_bytes = lambda name: int(memory[name].split()[0]) * 1024
    lines = (proc / "stat").read_text("ascii").splitlines()
    cpu = {mode: int(ticks) / _TICKS for mode, ticks in zip(_MODES, lines[0].split()[1:], strict=False)}
    read, written = _disks(proc, block)
    received, sent = _network(proc)
    cores = sum(1 for line in lines if line[:3] == "cpu" and line[3:4].isdigit())
    return NodeUsage(cpu, cores, in_bytes("MemTotal"), in_bytes("MemAvailable"), read, written, received, sent)


def _disks(proc: Path, block: Path) -> tuple[int, int]:
    """Returns the bytes that were read from the machine's disks and written to them; those of partitions and of devices without hardware are not added."""
    try:
        whole = {each.name for each in block.iterdir() if not each.name.startswith(("loop", "ram", "zram", "dm-", "md", "sr"))}
        lines = [line.split() for line in (proc / "diskstats").read_text("ascii").splitlines()]
    except OSError:
        return 0, 0
    found = [(int(parts[5]), int(parts[9])) for parts in lines if parts[2] in whole]
    return _SECTOR * sum(read for read, _ in found), _SECTOR * sum(written for _, written in found)


def _network(proc: Path) -> tuple[int, int]:
    """Returns the bytes that all interfaces but the loopback have received and sent."""
    try:
        lines = (proc / "net" / "dev").read_text("ascii").splitlines()[2:]
    except OSError:
        return 0, 0
    parts = [(name.strip(), values.split()) for name, _, values in (line.partition(":") for line in lines)]
    counted = [values for name, values in parts if name != "lo"]
    return sum(int(values[0]) for values in counted), sum(int(values[8]) for values in counted)


def processes_below(pid: int, proc: Path = Path("/proc")) -> list[ProcessUsage]:
    """Returns the process ``pid`` and all that it has started, directly or not, that still run."""
    found, waiting = [], [pid]
    while waiting:
        now = waiting.pop()
        usage = _usage(now, proc)
        if usage is not None:
            found.append(usage)
            waiting.extend(_children(now, proc))
    return sorted(found, key=lambda each: each.pid)


def _children(pid: int, proc: Path) -> Iterator[int]:
    try:
        tasks = list((proc / str(pid) / "task").iterdir())
    except OSError:
        return
    for task in tasks:
        try:
            yield from map(int, (task / "children").read_text("ascii").split())
        except (OSError, ValueError):
            continue


def _usage(pid: int, proc: Path) -> ProcessUsage | None:
    """Returns ``None`` where the process has ended."""
    folder = proc / str(pid)
    try:
        # The name of the program, in parentheses, may have any letter.
        stat = (folder / "stat").read_text("ascii", "replace").rpartition(")")[2].split()
        command = (folder / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return None
    if not any(command):
        return None
    return ProcessUsage(pid, _name([part.decode("utf-8", "replace") for part in command if part]), (int(stat[11]) + int(stat[12])) / _TICKS,
                        int(stat[21]) * _PAGE, int(stat[17]))  # fmt: skip


def _name(command: list[str]) -> str:
    """Returns the module of ``tandem`` that a command runs, or its program. A child is started as ``... child PARENT KIND MODULE``."""
    modules = [part for part in command[1:] if part.startswith("tandem.") and part != "tandem.runtime.process.child"]
    if modules:
        return modules[0]
    return "tandem" if any(Path(part).name == "tandem" for part in command[:2]) or command[1:3] == ["-m", "tandem"] else Path(command[0]).name

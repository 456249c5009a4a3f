"""The Python stacks of other processes, including those that are stuck in C.

Every process that ``spawn`` starts answers a signal with the stacks of all its threads, in a file of the folder that ``STACKS_VARIABLE`` in its environment
names; the processes that it starts inherit it. So one who looks for a stuck party finds all of a run, whoever started them.
"""

import contextlib
import faulthandler
import os
import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

SIGNAL = signal.SIGUSR2
STACKS_VARIABLE = "TANDEM_STACKS"
"""The folder for the stacks of this process and its children."""


def answer_with_stacks(folder: Path) -> None:
    """Makes this process append the stacks of all its threads to a file of ``folder`` when ``stacks_of`` asks for them."""
    folder.mkdir(parents=True, exist_ok=True)
    # The file stays open: the handler writes to its descriptor.
    faulthandler.register(SIGNAL, file=_path(folder, os.getpid()).open("w", encoding="utf-8"), all_threads=True)


@contextlib.contextmanager
def stacks_in(folder: Path) -> Iterator[None]:
    """Inside, processes that are started answer with their stacks in ``folder``, and so does this one."""
    before = os.environ.get(STACKS_VARIABLE)
    os.environ[STACKS_VARIABLE] = str(folder)
    answer_with_stacks(folder)
    try:
        yield
    finally:
        faulthandler.unregister(SIGNAL)
        if before is None:
            del os.environ[STACKS_VARIABLE]
        else:
            os.environ[STACKS_VARIABLE] = before


def answering(folder: Path) -> list[int]:
    """Returns the ids of the living processes that answer in ``folder``."""
    numbers = [int(path.name) for path in folder.iterdir() if path.name.isdigit()] if folder.is_dir() else []
    return sorted(pid for pid in numbers if _answers(folder, pid))


def stacks_of(folder: Path, pids: Iterable[int], wait_s: float = 1.0) -> dict[int, str]:
    """Returns the stacks of the processes ``pids``; empty for one that is stopped, has ended or does not answer in ``folder``."""
    before, stacks = dict[int, int](), dict.fromkeys(pids, "")
    for pid in stacks:
        # A process that does not have its file open would be killed by the signal: it has not called ``answer_with_stacks`` yet, or has the id of a dead one.
        if _answers(folder, pid):
            before[pid] = _path(folder, pid).stat().st_size
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, SIGNAL)
    ends = time.monotonic() + wait_s
    while time.monotonic() < ends and not all(_is_whole(stacks[pid]) for pid in before):
        time.sleep(0.05)
        for pid, size in before.items():
            stacks[pid] = _path(folder, pid).read_text(encoding="utf-8", errors="replace")[size:]
    return stacks


def named_stacks(folder: Path, logs_of: Path, own: str) -> dict[str, str]:
    """Returns the stacks of all processes that answer in ``folder``, by their names: that of their log file below the folder ``logs_of``, and ``own`` for this
    process. Of one that does not answer, why."""
    pids = answering(folder)
    return {f"{process_name(pid, logs_of, own)} (process {pid})": text or _why_silent(pid) for pid, text in stacks_of(folder, pids).items()}


UNNAMED = "a process"
"""The name of a process that writes to no log of the run."""


def process_name(pid: int, logs_of: Path, own: str) -> str:
    """Returns the name of a process: that of its log file below the folder ``logs_of``, ``own`` for this one, ``UNNAMED`` where there is none."""
    if pid == os.getpid():
        return own
    try:
        output = Path(f"/proc/{pid}/fd/2").readlink()
        return str(output.relative_to(logs_of.resolve()).with_suffix("")).replace("logs/", "")
    except (OSError, ValueError):
        return UNNAMED


def _why_silent(pid: int) -> str:
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "has ended"
    return "is stopped (SIGSTOP)" if state == "T" else "does not answer"


def remove_ended(folder: Path) -> None:
    """Removes what processes that have ended leave in ``folder``."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.name.isdigit() and not Path("/proc", path.name).exists():
            path.unlink(missing_ok=True)


def innermost(stack: str, frames: int = 3) -> str:
    """Returns the innermost frames of the running thread, on one line."""
    lines = stack.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith("Current thread")), None)
    if start is None:
        return " ".join(stack.split())
    calls = []
    for line in lines[start + 1 : start + 1 + frames]:
        if not line.startswith("  File "):
            break
        path, _, rest = line.strip().removeprefix("File ").partition(", ")
        number, _, function = rest.removeprefix("line ").partition(" in ")
        calls.append(f"{function} ({Path(path.strip(chr(34))).name}:{number})")
    return " < ".join(calls)


def _path(folder: Path, pid: int) -> Path:
    return folder / str(pid)


def _answers(folder: Path, pid: int) -> bool:
    """Returns whether the process has its file in ``folder`` open."""
    try:
        own = _path(folder, pid).stat()
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                found = link.stat()
                if (found.st_dev, found.st_ino) == (own.st_dev, own.st_ino):
                    return True
    except OSError:
        return False
    return False


def _is_whole(text: str) -> bool:
    """Returns whether the text has the running thread, which is written last."""
    return "Current thread" in text and text.endswith("\n")

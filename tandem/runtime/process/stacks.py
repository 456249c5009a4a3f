"""The Python stacks of other processes, also of those that are stuck in C."""

import faulthandler
import os
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

SIGNAL = signal.SIGUSR2


def answer_with_stacks(path: Path) -> None:
    """From now on, this process appends the stacks of all its threads to ``path`` when it is asked."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Open for as long as the process lives: the handler writes to the descriptor.
    faulthandler.register(SIGNAL, file=path.open("w", encoding="utf-8"), all_threads=True)


def stacks_of(processes: Mapping[int, tuple[int, Path]], wait_s: float = 1.0) -> dict[int, str]:
    """The stacks of processes that ``answer_with_stacks``, by their numbers, from (pid, path); empty for one that is stopped or does not
    listen yet."""
    before = {}
    for name, (pid, path) in processes.items():
        before[name] = path.stat().st_size if path.exists() else -1
        with suppress(ProcessLookupError, PermissionError):
            # Before it has opened its file, the signal would end it.
            if before[name] >= 0:
                os.kill(pid, SIGNAL)
    ends, found = time.monotonic() + wait_s, dict.fromkeys(processes, "")
    while time.monotonic() < ends and not all(_is_whole(text) for text in found.values()):
        time.sleep(0.05)
        for name, (_, path) in processes.items():
            if before[name] >= 0:
                found[name] = path.read_text(encoding="utf-8", errors="replace")[before[name] :]
    return found


def innermost(stack: str, frames: int = 3) -> str:
    """The innermost frames of the thread that was running, on one line."""
    lines = stack.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith("Current thread")), None)
    if start is None:
        return " ".join(stack.split())
    found = []
    for line in lines[start + 1 : start + 1 + frames]:
        if not line.startswith("  File "):
            break
        path, _, rest = line.strip().removeprefix("File ").partition(", ")
        number, _, function = rest.removeprefix("line ").partition(" in ")
        found.append(f"{function} ({Path(path.strip(chr(34))).name}:{number})")
    return " < ".join(found)


def _is_whole(text: str) -> bool:
    """Whether the thread that was running, which comes last, is there."""
    return "Current thread" in text and text.endswith("\n")

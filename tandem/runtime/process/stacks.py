"""The Python stacks of other processes, including those that are stuck in C."""

import faulthandler
import os
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

SIGNAL = signal.SIGUSR2


def answer_with_stacks(path: Path) -> None:
    """Makes this process append the stacks of all its threads to ``path`` when ``stacks_of`` asks for them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # The file stays open: the handler writes to its descriptor.
    faulthandler.register(SIGNAL, file=path.open("w", encoding="utf-8"), all_threads=True)


def stacks_of(processes: Mapping[int, tuple[int, Path]], wait_s: float = 1.0) -> dict[int, str]:
    """Returns the stacks of ``processes``, each a (pid, path) that called ``answer_with_stacks(path)``; empty for one that is stopped or has not
    called it yet."""
    before = {}
    for name, (pid, path) in processes.items():
        before[name] = path.stat().st_size if path.exists() else -1
        with suppress(ProcessLookupError, PermissionError):
            # Before the process has opened its file, the signal would kill it.
            if before[name] >= 0:
                os.kill(pid, SIGNAL)
    ends, stacks = time.monotonic() + wait_s, dict.fromkeys(processes, "")
    while time.monotonic() < ends and not all(_is_whole(text) for text in stacks.values()):
        time.sleep(0.05)
        for name, (_, path) in processes.items():
            if before[name] >= 0:
                stacks[name] = path.read_text(encoding="utf-8", errors="replace")[before[name] :]
    return stacks


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


def _is_whole(text: str) -> bool:
    """Returns whether the text has the running thread, which is written last."""
    return "Current thread" in text and text.endswith("\n")

"""Drives pods that are processes of their own (``pod_process``)."""

import json
import select
import subprocess
import sys
from pathlib import Path
from typing import Any

PROGRAM = Path(__file__).parent / "pod_process.py"


class PodProcess:
    """``role``: ``serve`` or ``receive``, with the stores in ``folder``."""

    def __init__(self, role: str, folder: Path, protocols: str = "tcp", port: int = 0) -> None:
        command = [sys.executable, str(PROGRAM), role, str(folder), protocols, str(port)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        if role == "receive":
            assert self.answer() == {"ready": True}

    def tell(self, incarnation: int, step: int, rows: int) -> None:
        """Asks for a version without waiting for the answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{incarnation} {step} {rows}\n")
        self.process.stdin.flush()

    def ask(self, incarnation: int, step: int, rows: int) -> dict[str, Any]:
        self.tell(incarnation, step, rows)
        return self.answer()

    def ask_early(self, incarnation: int, step: int) -> dict[str, Any]:
        """Asks a receiver to read a version before it is published."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"early {incarnation} {step} 0\n")
        self.process.stdin.flush()
        return self.answer()

    def answer(self, limit_s: float = 120.0) -> dict[str, Any]:
        assert self.process.stdout is not None
        assert select.select([self.process.stdout], [], [], limit_s)[0], "the process does not answer"
        line = self.process.stdout.readline()
        assert line, f"the process ended with status {self.process.wait()}"
        found: dict[str, Any] = json.loads(line)
        return found

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

"""A program that runs in a sandbox, and the exchange with it: bounded in time and bytes, whatever it does."""

import contextlib
import json
import os
import select
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from tandem.rl.rewards.code.sandbox import VARIABLES, Sandbox
from tandem.rl.rewards.judgement import one_line

END_S = 0.3
"""Seconds that a container has to end by itself."""


class ProgramEnded(Exception):
    """Raised when no answer comes any more; the message says why. ``started``: whether the sandbox had started, so that the program is at fault."""

    def __init__(self, text: str, started: bool) -> None:
        super().__init__(text)
        self.started = started


class ProgramBroken(ProgramEnded):
    """Raised when the program cannot be loaded: it does not compile, or raises before a function can be called."""


class Program:
    """A process that runs ``runner.py`` in ``sandbox``. Leaving the context ends it with everything that it started."""

    def __init__(self, sandbox: Sandbox, request: dict[str, Any], limit_s: float, most_bytes: int) -> None:
        """Starts it and sends ``request``. Raises ``ProgramEnded`` if the sandbox does not start, or the program cannot be loaded.

        Args:
            limit_s: seconds from now until it is ended.
            most_bytes: of one answer.
        """
        self._ends, self._limit_s, self._most_bytes = time.monotonic() + limit_s, limit_s, most_bytes
        self._received = b""
        self.is_started = False
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # Closed with the process.
        self._sandbox, self._is_alone = sandbox, sandbox.name == "none"
        self._folder = tempfile.TemporaryDirectory() if self._is_alone or sandbox.bundle else None
        try:
            self._process = subprocess.Popen(
                [*sandbox.command, *self._container(sandbox, self._folder)], bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors,
                env=VARIABLES, cwd=self._folder.name if self._folder is not None else "/", start_new_session=self._is_alone,
                user=sandbox.user, group=sandbox.user, extra_groups=None if sandbox.user is None else [],
            )  # fmt: skip
        except BaseException:
            self._errors.close()
            raise
        assert self._process.stdin is not None and self._process.stdout is not None
        os.set_blocking(self._process.stdin.fileno(), False)
        os.set_blocking(self._process.stdout.fileno(), False)
        try:
            self.send(request)
            self._receive()
            self.is_started = True
            if "broken" in (loaded := self.answer()):
                raise ProgramBroken(str(loaded["broken"]), True)
        except BaseException:
            self.close()
            raise

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Returns the answer to ``request``. Raises ``ProgramEnded``."""
        self.send(request)
        return self.answer()

    def answer(self) -> dict[str, Any]:
        """Returns the next answer."""
        line = self._receive()
        try:
            answer = json.loads(line)
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict):
            raise ProgramEnded("it wrote an answer of its own", True)
        return answer

    def send(self, request: dict[str, Any]) -> None:
        """Sends ``request``. Raises ``ProgramEnded``."""
        assert self._process.stdin is not None
        data = memoryview(ascii(request).encode() + b"\n")
        while data:
            self._wait(self._process.stdin.fileno(), select.POLLOUT)
            try:
                data = data[os.write(self._process.stdin.fileno(), data) :]
            except BlockingIOError:
                continue
            except BrokenPipeError:
                raise self._ended() from None

    def _receive(self) -> bytes:
        assert self._process.stdout is not None
        while (end := self._received.find(b"\n")) < 0:
            if len(self._received) > self._most_bytes:
                raise ProgramEnded(f"its answer has more than {self._most_bytes} bytes", self.is_started)
            self._wait(self._process.stdout.fileno(), select.POLLIN)
            try:
                received = os.read(self._process.stdout.fileno(), 2**16)
            except BlockingIOError:
                continue
            if not received:
                raise self._ended()
            self._received += received
        line, self._received = self._received[:end], self._received[end + 1 :]
        return line

    def _wait(self, descriptor: int, event: int) -> None:
        left = self._ends - time.monotonic()
        poll = select.poll()
        poll.register(descriptor, event)
        if left <= 0 or not poll.poll(left * 1000):
            raise ProgramEnded(f"it ran longer than {self._limit_s:g} s", self.is_started)

    def _ended(self) -> ProgramEnded:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(0.5)
        status = self._process.poll()
        if self.is_started:
            return ProgramEnded("its process ended", True)
        self._errors.seek(0)
        said = one_line(self._errors.read(4096).decode("utf-8", "replace"))
        return ProgramEnded(f"it did not start (exit status {status}){': ' + said if said else ''}", False)

    def close(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()  # At its end, the runner ends and its container with it.
        if self._folder is not None and self._sandbox.bundle:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(END_S)
            if self._process.returncode is None:
                remove = [*self._sandbox.command, "--root", f"{self._folder.name}/state", "delete", "--force", Path(self._folder.name).name]
                subprocess.run(remove, capture_output=True, check=False)
        if self._is_alone:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()
        self._process.stdout.close()
        self._process.wait()
        self._errors.close()
        if self._folder is not None:
            self._folder.cleanup()

    @staticmethod
    def _container(sandbox: Sandbox, folder: "tempfile.TemporaryDirectory[str] | None") -> list[str]:
        """Returns the end of a command line that starts a container, whose files it writes to ``folder``."""
        if folder is None or not sandbox.bundle:
            return []
        (Path(folder.name) / "rootfs").mkdir()
        (Path(folder.name) / "config.json").write_text(sandbox.bundle, encoding="utf-8")
        return ["--root", f"{folder.name}/state", "run", "--bundle", folder.name, Path(folder.name).name]

    def __enter__(self) -> "Program":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

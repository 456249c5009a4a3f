"""One engine's process, from the server's side."""

import asyncio
import contextlib
import json
import logging
import socket
import subprocess
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tandem.config.engine import EngineArgs
from tandem.config.load import to_mapping
from tandem.runtime.process.processes import Threads, describe_exit, kill, spawn, terminate
from tandem.runtime.rpc.calls import Meta, message_from, message_meta
from tandem.runtime.rpc.channel import BrokenFrame, receive_from
from tandem.serving.engines.heartbeat import Heartbeat
from tandem.serving.engines.messages import Abort, EngineInfo, EngineRequest, Step, step_of
from tandem.types import RunError, UserError, WeightVersion
from tandem.types.wire import Frame, encode

logger = logging.getLogger(__name__)


class InstanceDied(RunError):
    """The engine's process ended before it answered. The text names it and says how it ended."""


class Instance:
    """A running engine process. Lives in one event loop; ``on_step`` is called with what each step made known. ``heartbeat_s``, ``step_s``: the limits of
    its ``Heartbeat``. ``weights``: what the model's own are called. Its spans come with the steps; its owner sends them to the collector of ``args``."""

    def __init__(
        self, name: str, args: EngineArgs, threads: int, on_step: Callable[[Step], None], heartbeat_s: float, step_s: float,
        weights: WeightVersion | None = None,
    ) -> None:  # fmt: skip
        self.name = name
        self.heartbeat = Heartbeat(heartbeat_s, step_s, lambda: self._write({}, "event", "ping"))
        self._on_step = on_step
        ours, theirs = socket.socketpair()
        args = replace(args, otlp_traces_endpoint=None, otlp_traces_protocol=EngineArgs().otlp_traces_protocol)
        called = [] if weights is None else ["--weight-version", *map(str, weights)]
        with theirs:
            self.process: subprocess.Popen[bytes] = spawn(
                "tandem.serving.engines.engine_process",
                ["--channel", str(theirs.fileno()), "--threads", str(threads), *called, json.dumps(to_mapping(args))],
                threads=Threads(threads), pass_fds=[theirs.fileno()],
            )  # fmt: skip
        self._socket = ours
        self._calls: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._numbers = 0
        self._writer: asyncio.StreamWriter | None = None
        self._reader_task: asyncio.Task[None] | None = None
        self.died: asyncio.Event = asyncio.Event()
        """Set once nothing more comes from the process."""
        self.how = ""

    async def start(self) -> EngineInfo:
        """Wait until the model is loaded. Raises ``UserError`` where it cannot be, and ``InstanceDied``."""
        reader, self._writer = await asyncio.open_connection(sock=self._socket)
        try:
            frame = await receive_from(reader)
        except (EOFError, OSError, BrokenFrame):
            raise self._bury() from None
        if frame.kind == "error":
            self._bury()
            message = str(frame.meta["message"])
            if frame.meta["class"] == "UserError":
                raise UserError(message)
            raise RunError(f"{self.name} cannot load the model: {frame.meta['class']}: {message}")
        self._reader_task = asyncio.create_task(self._receive(reader), name=f"{self.name} reader")
        return message_from(EngineInfo, frame.meta)

    @property
    def has_calls(self) -> bool:
        """Control calls wait for its answer."""
        return bool(self._calls)

    def add(self, request: EngineRequest) -> None:
        self._write(message_meta(request), "event", "add")

    def abort(self, ids: list[str]) -> None:
        self._write(message_meta(Abort(ids)), "event", "abort")

    async def call(self, name: str, **arguments: Any) -> dict[str, Any]:
        """The result of a control call. Raises ``UserError`` where the engine refuses it, ``RunError`` where it fails and
        ``InstanceDied``."""
        if self.died.is_set():
            raise InstanceDied(self.how)
        self._numbers += 1
        number = self._numbers
        answer = self._calls[number] = asyncio.get_running_loop().create_future()
        self._write(arguments, "call", name, number)
        try:
            result: dict[str, Any] = await answer
            return result
        finally:
            self._calls.pop(number, None)

    async def stop(self, grace_s: float = 5.0) -> None:
        """End it: close the channel, at which it ends by itself, or kill it after ``grace_s``."""
        if self._writer is not None:
            self._writer.close()
        else:
            self._socket.close()
        for _ in range(int(grace_s * 50)):
            if self.process.poll() is not None:
                break
            await asyncio.sleep(0.02)
        kill(self.process)
        if self._reader_task is not None:
            self._reader_task.cancel()
            await asyncio.gather(self._reader_task, return_exceptions=True)

    def _write(self, meta: Meta, kind: str, method: str, call: int = 0) -> None:
        if self._writer is not None and not self.died.is_set():
            self._writer.write(encode(meta, None, kind, method, call))

    async def _receive(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                self._take(await receive_from(reader))
        except (EOFError, OSError, BrokenFrame):
            error = self._bury()
        self.died.set()
        for answer in self._calls.values():
            if not answer.done():
                answer.set_exception(error)

    def _take(self, frame: Frame) -> None:
        if frame.method == "pong":
            self.heartbeat.answered(frame.meta["working_s"])
            return
        self.heartbeat.heard()
        if frame.kind == "event":
            self._on_step(step_of(frame.meta))
            return
        answer = self._calls.get(frame.call)
        if answer is None or answer.done():
            return
        if frame.kind == "result":
            answer.set_result(frame.meta)
        else:
            kind = UserError if frame.meta["class"] == "UserError" else RunError
            answer.set_exception(kind(str(frame.meta["message"])))

    def _bury(self) -> InstanceDied:
        # It closed its channel: it is dead, or about to be.
        status = terminate(self.process, grace_s=0.2)
        self.how = f"{self.name} died: {describe_exit(status)}"
        if self._writer is not None:
            with contextlib.suppress(OSError):
                self._writer.close()
        return InstanceDied(self.how)

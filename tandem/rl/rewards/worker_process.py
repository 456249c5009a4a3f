"""A reward worker from the pool's side: start it, call it with a deadline, end it with everything it started."""

import contextlib
import os
import select
import selectors
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from time import monotonic
from typing import Any

from tandem.config.load import to_mapping
from tandem.config.rewards import RewardsConfig
from tandem.rl.rewards.judgement import Item, Judgement
from tandem.rl.rewards.messages import complete_message, encode_message, items_to_json, judgements_from_json
from tandem.runtime.processes import Threads, describe_exit, kill_group, spawn
from tandem.types import UserError


class JudgeHung(Exception):
    """No answer within the deadline."""


class JudgeRaised(Exception):
    """The function raised, or gave something that is no list of values; the worker lives on."""


class WorkerDied(Exception):
    """The worker's process ended; the text says how."""


class PoolClosed(Exception):
    """The pool was closed while a call was under way."""


class WorkerProcess:
    """One worker. ``closing`` is a socket that becomes readable when the pool is closed. Used by one thread at a
    time."""

    def __init__(self, config: RewardsConfig, log: Path, closing: socket.socket) -> None:
        """Start it; ``wait_ready`` says when it has loaded the functions."""
        self._channel, theirs = socket.socketpair()
        with theirs:
            self.process = spawn(
                "tandem.rl.rewards.worker",
                [str(theirs.fileno())],
                threads=Threads(),
                new_session=True,
                pass_fds=[theirs.fileno()],
                output=log,
                # The hash seed is fixed so that a function which goes through a set gives the same reward after a restart.
                environment={"PYTHONHASHSEED": "0", "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            )
        # A process that the function left behind may hold the socket open, so the process itself is watched as well.
        self._watch = os.pidfd_open(self.process.pid) if hasattr(os, "pidfd_open") else None
        self._closing = closing
        self._buffer = bytearray()
        self._unsent = memoryview(encode_message({"config": to_mapping(config)}))
        self._channel.setblocking(False)
        self.batched: Sequence[bool] = ()
        self._reads_ids: Sequence[bool] = ()

    def wait_ready(self, deadline_s: float) -> None:
        """Raises ``UserError`` where a function cannot be loaded, does not load in time or ends the process."""
        try:
            message = self._exchange(deadline_s)
        except JudgeHung:
            self.kill()
            raise UserError(
                f"the reward functions were not loaded within {deadline_s:g} s; do less when they are imported or raise "
                "rewards.start_deadline_s"
            ) from None
        except PoolClosed:
            self.kill()
            raise
        except WorkerDied as death:
            raise UserError(f"a reward worker ended while it loaded the reward functions ({death}); see its log") from None
        if "error" in message:
            self.kill()
            raise UserError(message["error"])
        self.batched, self._reads_ids = message["batched"], message["reads_ids"]

    def judge(self, judge: int, items: Sequence[Item], deadline_s: float) -> list[Judgement]:
        """Judgements of ``items`` by function number ``judge``. Raises ``JudgeHung`` and ``WorkerDied`` (the process is
        gone then), ``JudgeRaised`` and ``PoolClosed``."""
        self._unsent = memoryview(encode_message({"judge": judge, "items": items_to_json(items, self._reads_ids[judge])}))
        try:
            answer = self._exchange(deadline_s)
        except (JudgeHung, PoolClosed):
            self.kill()
            raise
        if "error" in answer:
            raise JudgeRaised(answer["error"])
        return judgements_from_json(answer["judgements"])

    def ended(self) -> bool:
        """Whether the process is gone."""
        if self._channel.fileno() < 0:
            return True
        if self._watch is not None and select.select([self._watch], [], [], 0)[0]:
            return True
        try:
            return self._channel.recv(1, socket.MSG_PEEK) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    def kill(self) -> int:
        """End the process and its whole group; returns the exit status."""
        status = kill_group(self.process)
        self._channel.close()
        if self._watch is not None:
            os.close(self._watch)
            self._watch = None
        return status

    def _exchange(self, deadline_s: float) -> dict[str, Any]:
        ends = monotonic() + deadline_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._channel, selectors.EVENT_READ | selectors.EVENT_WRITE)
            selector.register(self._closing, selectors.EVENT_READ)
            if self._watch is not None:
                selector.register(self._watch, selectors.EVENT_READ)
            while True:
                ready = {key.fileobj: events for key, events in selector.select(max(ends - monotonic(), 0))}
                if self._closing in ready:
                    raise PoolClosed
                events = ready.get(self._channel, 0)
                try:
                    if events & selectors.EVENT_WRITE:
                        self._unsent = self._unsent[self._channel.send(self._unsent) :]
                        if not self._unsent:
                            selector.modify(self._channel, selectors.EVENT_READ)
                    message = self._receive() if events & selectors.EVENT_READ else None
                except (EOFError, OSError, ValueError):  # ValueError: it wrote something that is no message
                    raise self._died() from None
                if message is not None:
                    return message
                if self._watch in ready and not events & selectors.EVENT_READ:
                    raise self._died()
                if monotonic() >= ends:
                    raise JudgeHung

    def _receive(self) -> dict[str, Any] | None:
        with contextlib.suppress(BlockingIOError):
            part = self._channel.recv(1 << 20)
            if not part:
                raise EOFError
            self._buffer += part
        return complete_message(self._buffer)

    def _died(self) -> WorkerDied:
        # Its socket closes a moment before it ends, and then its own status says more than the SIGKILL that follows here.
        if self._watch is not None:
            select.select([self._watch], [], [], 0.5)
        return WorkerDied(describe_exit(self.kill()))

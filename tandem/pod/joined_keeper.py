"""The keeper of checkpoints in the memory of a pod that joined: owned by the pod's command, published by each life of the pod in the store of the run, and
started again if it dies. So the loss of the controller, which ends a life, leaves the checkpoints where they are. Imports no torch.
"""

import json
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tandem.pod.near_tiers import KEEPERS
from tandem.runtime.coordination.session import Session
from tandem.runtime.process.deadline import Deadline
from tandem.runtime.process.worker import serve
from tandem.runtime.rpc.calls import Blobs, CallError, Meta, PeerDied, Progress, Reply, is_result
from tandem.runtime.rpc.channel import BrokenFrame, Channel
from tandem.trainer.checkpoint.memory.keeper_process import DEADLINE_S, KeeperProcess
from tandem.trainer.checkpoint.memory.launched_keepers import read_keeper
from tandem.types import RunError, UserError

logger = logging.getLogger(__name__)
_LOOK_S = 1.0


class LaunchedKeeper:
    """The keeper of a launcher on this node, which outlives the pod's command. ``path``: see ``launched_keepers``."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def start(self) -> dict[str, Any]:
        """Returns where it is. Raises ``RunError`` while that is not known."""
        try:
            return read_keeper(self._path)
        except (OSError, ValueError) as error:
            raise RunError(f"the keeper of this node is not known: '{self._path}': {error}") from None

    def forget(self) -> None:
        """Leaves it to its launcher."""

    def close(self) -> None:
        """Leaves it to its launcher."""


class PodKeeper:
    """The keeper of a pod, as the pod's command sees it: ``process`` is started when a life of the pod asks for it, and kept until ``close``.
    ``is_asked_for``: it may have checkpoints that a controller looks for."""

    def __init__(self, process: KeeperProcess | LaunchedKeeper) -> None:
        self._process, self._lock, self.is_asked_for = process, threading.Lock(), isinstance(process, LaunchedKeeper) or bool(process.kept_in)

    @contextmanager
    def for_life(self) -> Iterator[int]:
        """Yields the descriptor by which the next life, which is started inside, asks for it."""
        ours, theirs = socket.socketpair()
        threading.Thread(target=serve, args=({"start": self._start}, ours.detach()), name="keeper", daemon=True).start()
        with theirs:
            yield theirs.fileno()

    def _start(self, meta: Meta, blobs: Blobs, progress: Progress) -> Reply:
        with self._lock:
            self.is_asked_for = True
            return self._process.start(), {}

    def forget(self) -> None:
        """Removes what would outlive the keeper."""
        self._process.forget()

    def close(self) -> None:
        self._process.close()


def asks_owner(descriptor: int) -> Callable[[], Mapping[str, Any]]:
    """Returns the call by which a life of a pod has its keeper started, where it does not run, at the other end of ``descriptor``. It returns where the keeper
    is, as of ``KeeperProcess.start``, and raises what that raises, and ``CallError``."""
    os.set_inheritable(descriptor, False)
    channel = Channel(socket.socket(fileno=descriptor))

    def start() -> Mapping[str, Any]:
        deadline = Deadline(DEADLINE_S + 10)
        try:
            channel.send({}, kind="call", method="start", deadline=deadline)
            while not is_result(frame := channel.receive(deadline), "the pod's command", "start", None):
                pass
        except (OSError, EOFError, BrokenFrame) as error:
            raise PeerDied("the pod's command", "start", f"the pod's command does not answer: {error}") from None
        return frame.meta

    return start


class JoinedKeeper:
    """Publishes the keeper of the pod ``name``, which ``start`` starts where it does not run, from a thread, on the lease of ``session``, until ``close``.
    ``host``: the node of the pod."""

    def __init__(self, name: str, host: str, start: Callable[[], Mapping[str, Any]], session: Session) -> None:
        self._name, self._host, self._start, self._session = name, host, start, session
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="keeper", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        told, troubles = None, set[str]()
        while not self._ended.is_set():
            try:
                # Where it has died, its checkpoints are lost, and the next ones are kept again.
                facts = json.dumps({**self._start(), "node": self._host}).encode()
                if facts != told:
                    self._session.store.put(KEEPERS + self._name, facts, self._session.lease)
                    logger.info("keeps checkpoints in memory: %s", facts.decode())
                    told = facts
            except (RunError, UserError, CallError, OSError) as error:
                if str(error) not in troubles:
                    troubles.add(str(error))
                    logger.warning("keeps no checkpoints in memory: %s", error)
            self._ended.wait(_LOOK_S)

    def close(self) -> None:
        self._ended.set()
        self._thread.join(timeout=_LOOK_S)

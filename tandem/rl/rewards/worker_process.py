"""The pool's side of a reward worker: starts it, calls it with a deadline, and terminates it with its child processes."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tandem.config.load import to_mapping
from tandem.config.rewards import RewardsConfig
from tandem.rl.rewards.judgement import NO_STATE, Item, Judgement, TrainerState
from tandem.rl.rewards.messages import JudgeAnswer, JudgeRequest, Loaded, items_to_json, judgements_from_json
from tandem.runtime.process.processes import Threads, describe_exit
from tandem.runtime.process.worker import Worker
from tandem.runtime.rpc.calls import Meta, RpcTimeout, WorkerDied, message_from, message_meta
from tandem.types import UserError


class JudgeHung(Exception):
    """Raised when there is no answer within the deadline."""


class JudgeRaised(Exception):
    """Raised when the function raised, or returned an invalid result; the worker is still alive."""


class JudgeDied(Exception):
    """Raised when the worker's process ended; the message says how."""


class PoolClosed(Exception):
    """Raised when the pool was closed while a call was in progress."""


class WorkerProcess:
    """One worker. Used by one thread at a time, except ``kill``. ``closed`` is set before the pool kills its workers."""

    def __init__(self, config: RewardsConfig, log: Path, closed: threading.Event) -> None:
        """Starts it; ``wait_ready`` returns when it has loaded the functions."""
        self._closed = closed
        self._worker = Worker(
            "the reward worker",
            "tandem.rl.rewards.worker",
            ["--config", json.dumps(to_mapping(config))],
            threads=Threads(),
            new_session=True,
            output=log,
            # The hash seed is fixed, so that a function that iterates over a set gives the same reward after a restart.
            environment={"PYTHONHASHSEED": "0", "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )
        self.batched: Sequence[bool] = ()
        self.is_async: Sequence[bool] = ()
        self.columns: Sequence[Sequence[str]] = ()
        self.files: Mapping[str, str] = {}
        self._reads_ids: Sequence[bool] = ()

    @property
    def process(self) -> "subprocess.Popen[bytes]":
        return self._worker.process

    def wait_ready(self, deadline_s: float) -> None:
        """Waits until the functions are loaded. Raises ``UserError`` if one cannot be loaded or does not load in time, ``JudgeDied`` if the process
        ends, and ``PoolClosed``."""
        try:
            loaded = message_from(Loaded, self._call("load", {}, deadline_s))
        except JudgeHung:
            raise UserError(
                f"the reward functions were not loaded within {deadline_s:g} s; do less work at import time or raise "
                "rewards.start_deadline_s"
            ) from None
        except UserError:
            self.kill()
            raise
        self.batched, self._reads_ids, self.is_async = loaded.batched, loaded.reads_ids, loaded.is_async
        self.columns, self.files = loaded.columns, loaded.files

    def judge(
        self, judges: Sequence[int], items: Sequence[Item], deadline_s: float, state: TrainerState = NO_STATE
    ) -> list[list[Judgement] | JudgeRaised]:
        """Returns, for each of the functions with the indices ``judges``, its judgements of ``items`` or what it raised. Raises ``JudgeHung`` and
        ``JudgeDied`` (the process has ended then), and ``PoolClosed``."""
        sent = items_to_json(items, any(self._reads_ids[judge] for judge in judges))
        request = JudgeRequest(list(judges), sent, list(state), deadline_s)
        answer = message_from(JudgeAnswer, self._call("judge", message_meta(request), deadline_s))
        pairs = zip(answer.judgements, answer.errors, strict=True)
        return [JudgeRaised(error) if error else judgements_from_json(judgements) for judgements, error in pairs]

    def ended(self) -> bool:
        """Whether the process has ended."""
        return not self._worker.alive

    def kill(self) -> None:
        """Terminates the process and its whole group. May be called from another thread during a call."""
        self._worker.stop(grace_s=0.0)

    def _call(self, name: str, meta: Meta, deadline_s: float) -> dict[str, Any]:
        if self._closed.is_set():
            raise PoolClosed
        try:
            return self._worker.call(name, meta, deadline_s=deadline_s).meta
        except (RpcTimeout, WorkerDied) as error:
            status = self._worker.stop(grace_s=0.0)
            if self._closed.is_set():
                raise PoolClosed from None
            raise (JudgeHung() if isinstance(error, RpcTimeout) else JudgeDied(describe_exit(status))) from None

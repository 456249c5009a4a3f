"""The pool's side of a reward worker: starts it, calls it with a deadline, and terminates it with its child processes."""

import json
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from tandem.config.load import to_mapping
from tandem.config.rewards import RewardsConfig
from tandem.rl.function_process import CallHung, FunctionProcess
from tandem.rl.rewards.judgement import NO_STATE, Item, Judgement, Scope, TrainerState
from tandem.rl.rewards.messages import JudgeAnswer, JudgeRequest, Loaded, items_to_json, judgements_from_json
from tandem.runtime.rpc.calls import message_from, message_meta
from tandem.types import UserError


class JudgeRaised(Exception):
    """Raised when the function raised, or returned an invalid result; the worker is still alive."""


class WorkerProcess(FunctionProcess):
    """One worker. Used by one thread at a time, except ``kill``. ``closed`` is set before the pool kills its workers."""

    def __init__(self, config: RewardsConfig, log: Path, closed: threading.Event) -> None:
        """Starts it; ``wait_ready`` returns when it has loaded the functions."""
        super().__init__("the reward worker", "tandem.rl.rewards.worker", ["--config", json.dumps(to_mapping(config))], log, closed)
        self.batched: Sequence[bool] = ()
        self.is_async: Sequence[bool] = ()
        self.scopes: Sequence[Scope] = ()
        self.columns: Sequence[Sequence[str]] = ()
        self.files: Mapping[str, str] = {}
        self._reads_ids: Sequence[bool] = ()

    def wait_ready(self, deadline_s: float) -> None:
        """Waits until the functions are loaded. Raises ``UserError`` if one cannot be loaded or does not load in time, ``CallDied`` if the process
        ends, and ``PoolClosed``."""
        try:
            loaded = message_from(Loaded, self.call("load", {}, deadline_s))
        except CallHung:
            raise UserError(
                f"the reward functions were not loaded within {deadline_s:g} s; do less work at import time or raise "
                "rewards.start_deadline_s"
            ) from None
        except UserError:
            self.kill()
            raise
        self.batched, self._reads_ids, self.is_async = loaded.batched, loaded.reads_ids, loaded.is_async
        self.scopes, self.columns, self.files = loaded.scopes, loaded.columns, loaded.files

    def judge(
        self, judges: Sequence[int], items: Sequence[Item], deadline_s: float, state: TrainerState = NO_STATE
    ) -> list[list[Judgement] | JudgeRaised]:
        """Returns, for each of the functions with the indices ``judges``, its judgements of ``items`` or what it raised. Raises ``CallHung`` and
        ``CallDied`` (the process has ended then), and ``PoolClosed``."""
        sent = items_to_json(items, any(self._reads_ids[judge] for judge in judges))
        request = JudgeRequest(list(judges), sent, list(state), deadline_s)
        answer = message_from(JudgeAnswer, self.call("judge", message_meta(request), deadline_s))
        pairs = zip(answer.judgements, answer.errors, strict=True)
        return [JudgeRaised(error) if error else judgements_from_json(judgements) for judgements, error in pairs]

"""The tool pool: runs tools in separate processes, so that one that hangs or dies costs only its sample."""

import json
import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from tandem.config.multi_turn import MultiTurnConfig
from tandem.rl.function_pool import FunctionPool, Program
from tandem.rl.function_process import CallDied, CallHung
from tandem.rl.rollout.tool_worker import ToolAnswer, ToolRequest
from tandem.runtime.rpc.calls import message_from, message_meta
from tandem.runtime.traces.spans import span
from tandem.types import UserError
from tandem.types.one_line import describe

logger = logging.getLogger(__name__)
ATTEMPTS = 2
"""Processes that may end during one call: the second time the call is to blame."""


class ToolPool:
    """``config.tool_workers`` processes that run the tools at ``paths``, with the output in ``log_dir/tool-worker-N.log``.

    The constructor loads every tool and raises ``UserError`` if one cannot be loaded.
    """

    def __init__(self, paths: Sequence[str], config: MultiTurnConfig, *, log_dir: Path | None = None) -> None:
        self._config = config
        deadline = (config.tool_start_deadline_s, "rollout.multi_turn.tool_start_deadline_s")
        program = Program("the tools were", "tool-worker", "tandem.rl.rollout.tool_worker", ["--tools", json.dumps(list(paths))], *deadline)
        self._pool = FunctionPool(program, config.tool_workers, log_dir)

    def run(self, name: str, arguments: Mapping[str, Any], id: str = "") -> "Future[ToolAnswer]":
        """Starts a call of the tool ``name``. ``id``: of the call, for its span."""
        request = ToolRequest(name, dict(arguments))
        return self._pool.run(lambda number: self._traced(number, request, id))

    def close(self) -> None:
        """Terminates every process with its child processes."""
        self._pool.close()

    def _traced(self, number: int, request: ToolRequest, id: str) -> ToolAnswer:
        attributes = {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": request.name, "gen_ai.tool.call.id": id}
        with span(f"execute_tool {request.name}", attributes, "client") as opened:
            answer = self._answer(number, request)
            if opened is not None:
                opened.error = answer.fault
            return answer

    def _answer(self, number: int, request: ToolRequest) -> ToolAnswer:
        how, log, name = "", self._pool.logs[number].name, request.name
        for _ in range(ATTEMPTS):
            try:
                return message_from(ToolAnswer, self._pool.call(number, "run", message_meta(request), self._config.tool_timeout_s))
            except CallHung:
                logger.warning("%s: tool '%s' hung and was ended", log, name)
                return ToolAnswer("", f"no answer within rollout.multi_turn.tool_timeout_s ({self._config.tool_timeout_s:g} s), and its process was ended")
            except CallDied as death:
                logger.warning("%s: tool '%s' ended its process (%s)", log, name, death)
                how = str(death)
            except UserError as error:  # The process cannot be replaced.
                return ToolAnswer("", describe(error))
        return ToolAnswer("", f"it ended its process {ATTEMPTS} times ({how})")

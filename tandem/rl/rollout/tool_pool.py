"""The tool pool: runs tools in separate processes, so that one that hangs or dies costs only its sample."""

import json
import logging
import os
import queue
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tandem.config.multi_turn import MultiTurnConfig
from tandem.rl.function_process import CallDied, CallHung, FunctionProcess
from tandem.rl.rollout.tool_worker import Loaded, ToolAnswer, ToolRequest
from tandem.runtime.rpc.calls import message_from, message_meta
from tandem.types import UserError
from tandem.types.one_line import describe

logger = logging.getLogger(__name__)
ATTEMPTS = 2
"""Processes that may end during one call: the second time the call is to blame."""


class ToolPool:
    """``config.tool_workers`` processes that run the tools at ``paths``. They die with this process however it dies, and are replaced when they die. Their
    output goes to ``log_dir/tool-worker-N.log``.

    The constructor loads every tool and raises ``UserError`` if one cannot be loaded.
    """

    def __init__(self, paths: Sequence[str], config: MultiTurnConfig, *, log_dir: Path | None = None) -> None:
        self._paths, self._config, self._closed = list(paths), config, threading.Event()
        if log_dir is not None:
            log_dir.mkdir(parents=True, exist_ok=True)
        names = [log_dir / f"tool-worker-{i}.log" if log_dir is not None else Path(os.devnull) for i in range(config.tool_workers)]
        self._lock = threading.Lock()
        self._files: dict[str, str] = {}
        self._processes: dict[Path, FunctionProcess] = {}
        self._idle: queue.SimpleQueue[Path] = queue.SimpleQueue()
        self._threads = ThreadPoolExecutor(config.tool_workers, "tools")
        try:
            for log in names:
                self._start(log)
            for log in names:
                self._wait_ready(self._processes[log])
                self._idle.put(log)
        except BaseException:
            self.close()
            raise

    def run(self, name: str, arguments: Mapping[str, Any]) -> "Future[ToolAnswer]":
        """Starts a call of the tool ``name``."""
        return self._threads.submit(self._run, name, dict(arguments))

    def close(self) -> None:
        """Terminates every process with its child processes."""
        self._closed.set()
        with self._lock:
            for process in self._processes.values():
                process.kill()
        self._threads.shutdown(cancel_futures=True)

    def _run(self, name: str, arguments: dict[str, Any]) -> ToolAnswer:
        log = self._idle.get()
        try:
            return self._answer(log, name, arguments)
        finally:
            self._idle.put(log)

    def _answer(self, log: Path, name: str, arguments: dict[str, Any]) -> ToolAnswer:
        how = ""
        for _ in range(ATTEMPTS):
            try:
                if self._processes[log].ended():
                    self._wait_ready(self._start(log))
                meta = message_meta(ToolRequest(name, arguments))
                return message_from(ToolAnswer, self._processes[log].call("run", meta, self._config.tool_timeout_s))
            except CallHung:
                logger.warning("%s: tool '%s' hung and was ended", log.name, name)
                return ToolAnswer("", f"no answer within rollout.multi_turn.tool_timeout_s ({self._config.tool_timeout_s:g} s), and its process was ended")
            except CallDied as death:
                logger.warning("%s: tool '%s' ended its process (%s)", log.name, name, death)
                how = str(death)
            except UserError as error:  # The process cannot be replaced.
                return ToolAnswer("", describe(error))
        return ToolAnswer("", f"it ended its process {ATTEMPTS} times ({how})")

    def _start(self, log: Path) -> FunctionProcess:
        process = FunctionProcess("the tool worker", "tandem.rl.rollout.tool_worker", ["--tools", json.dumps(self._paths)], log, self._closed)
        with self._lock:
            self._processes[log] = process
        return process

    def _wait_ready(self, process: FunctionProcess) -> None:
        """Waits until the tools are loaded. Raises ``UserError``, and ``CallDied`` and ``PoolClosed``."""
        try:
            files = message_from(Loaded, process.call("load", {}, self._config.tool_start_deadline_s)).files
        except CallHung:
            raise UserError(
                f"the tools were not loaded within {self._config.tool_start_deadline_s:g} s; do less work at import time or raise "
                "rollout.multi_turn.tool_start_deadline_s"
            ) from None
        self._files = self._files or files
        if changed := [file for file, digest in files.items() if self._files.get(file) != digest]:
            process.kill()
            raise UserError(f"'{changed[0]}' was changed while the run used it: restore it, or resume the run with it")

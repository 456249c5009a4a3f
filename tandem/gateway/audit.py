"""The audit log: a line of JSON for each request, without its answer, and without its prompt unless the operator asks for it."""

import datetime
import json
import logging
import os
import queue
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from logging.handlers import QueueHandler, QueueListener, WatchedFileHandler
from pathlib import Path
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from tandem.serving.log_lines import QUIET, USAGE, NotedSend, Usage
from tandem.types import UserError

AUDIT = "tandem.audit"
"""The key of a request's scope under which its ``Entry`` is."""
_LONGEST = 256


@dataclass
class Entry:
    """What the gateway learns of a request while it answers it."""

    request_id: str | None = None
    tenant: str | None = None
    key: str | None = None
    model: str | None = None
    stream: bool | None = None
    body: Any = None
    """What the client sent, if the log gets it."""
    administration: dict[str, Any] = field(default_factory=dict)
    """What an administrator does: ``action``, and to what."""


class _OwnersFile(WatchedFileHandler):
    """Only the owner may read who asked for what, also after the file was moved."""

    def _open(self) -> Any:
        return open(self.baseFilename, self.mode, encoding=self.encoding, opener=lambda path, flags: os.open(path, flags, 0o600))


def check_audit_log(path: Path) -> None:
    """Raises ``UserError`` if ``path`` cannot be written. Leaves no file where there was none."""
    has_been = path.exists()
    _opened(path).close()
    if not has_been:
        path.unlink(missing_ok=True)


def _opened(path: Path) -> _OwnersFile:
    try:
        return _OwnersFile(path, encoding="utf-8")
    except OSError as error:
        raise UserError(f"the audit log '{path}' cannot be written: {error.strerror}; correct 'audit_log'") from None


class AuditFile:
    """Adds lines to ``path`` in a thread, and opens the file anew when it was moved. Raises ``UserError`` if it cannot be written."""

    def __init__(self, path: Path) -> None:
        file = _opened(path)
        file.setFormatter(logging.Formatter("%(message)s"))
        lines: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._file, self._handler, self._listener = file, QueueHandler(lines), QueueListener(lines, file)
        self._listener.start()

    def act(self, action: str, by: str, **more: Any) -> None:
        """Adds a line for what an administrator did, ``by`` other means than a request."""
        self.add({"time": _time(datetime.datetime.now(datetime.UTC)), "action": action, "by": by, **more})

    def add(self, line: dict[str, Any]) -> None:
        self._handler.emit(logging.LogRecord("audit", logging.INFO, "", 0, json.dumps(line), None, None))

    def close(self) -> None:
        """Waits until every line is written."""
        self._listener.stop()
        self._file.close()


class AuditLog:
    """ASGI middleware that adds a line to the ``current`` file, if there is one, when a request has ended, however it did."""

    def __init__(self, app: ASGIApp, current: Callable[[], AuditFile | None]) -> None:
        self._app, self._current = app, current

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] in QUIET or self._current() is None:
            await self._app(scope, receive, send)
            return
        began, at, answer = time.monotonic(), datetime.datetime.now(datetime.UTC), NotedSend(send)
        usage, entry = scope.setdefault(USAGE, Usage()), Entry()
        scope[AUDIT] = entry
        try:
            await self._app(scope, receive, answer)
        finally:
            file = self._current()
            if file is not None:
                file.add({
                    "time": _time(at), "request_id": entry.request_id, "client": scope["client"][0] if scope.get("client") else None,
                    "tenant": entry.tenant, "key": entry.key, "method": scope["method"], "path": scope["path"][:_LONGEST],
                    "model": entry.model and entry.model[:_LONGEST],
                    "stream": entry.stream, "status": answer.status, "prompt_tokens": usage.prompt, "completion_tokens": usage.completion,
                    "seconds": round(time.monotonic() - began, 3), **({} if entry.body is None else {"body": entry.body}),
                    **entry.administration,
                })  # fmt: skip


def _time(at: datetime.datetime) -> str:
    return at.isoformat(timespec="milliseconds")

"""The server's log: a line for each request, and every ten seconds one on throughput. Neither has a prompt, an answer or a key."""

import asyncio
import logging
import queue
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tandem.runtime.records.logs import setup
from tandem.runtime.traces.context import SpanContext, current
from tandem.types import UserError

if TYPE_CHECKING:
    from tandem.serving.metrics import Metrics

USAGE = "tandem.usage"
"""The key of a request's scope under which its ``Usage`` is."""
STATS_S = 10.0
QUIET = ("/health", "/liveness", "/readiness", "/startup", "/metrics", "/version", "/ping")
"""Paths that machines ask every few seconds; only their failures would be news, and the balancer reports those."""
_MOST_LINES = 10_000
FILED = logging.getLogger("tandem.log")
"""Lines that are on standard error already, for the log file, if there is one."""
FILED.propagate = False
_LONGEST_PATH = 200


@dataclass
class Usage:
    """Tokens of a request. ``cached``: prompt tokens that the prefix cache held."""

    prompt: int = 0
    completion: int = 0
    cached: int = 0

    @property
    def body(self) -> dict[str, int | dict[str, int]]:
        """The object ``usage`` of OpenAI's answers."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }


class NotedSend:
    """Sends an answer, and notes its ``status``: 499 where the client left before one was sent."""

    def __init__(self, send: Send) -> None:
        self._send, self.status = send, 499

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        await self._send(message)


class LogLines:
    """Writes lines to standard error in a thread, so that a reader who stops does not stop the server; lines that he leaves no room for are counted."""

    def __init__(self) -> None:
        self._lines: queue.Queue[tuple[str, SpanContext | None] | None] = queue.Queue(_MOST_LINES)
        self._lost = 0
        self._is_closed = False
        self._thread = threading.Thread(target=self._write, name="log", daemon=True)
        self._thread.start()

    def add(self, line: str) -> None:
        if self._is_closed:
            return
        try:
            self._lines.put_nowait((line, current()))
        except queue.Full:
            self._lost += 1

    def close(self, limit_s: float = 1.0) -> None:
        """Waits, for at most ``limit_s`` seconds, until every line is written; later ones are dropped."""
        self._is_closed = True
        try:
            self._lines.put(None, timeout=limit_s)
        except queue.Full:
            return
        self._thread.join(limit_s)

    def _write(self) -> None:
        while (taken := self._lines.get()) is not None:
            (line, context), lost, self._lost = taken, self._lost, 0
            more = f" ({lost} lines before this one were lost)" if lost else ""
            print(f"tandem: {line}{more}", file=sys.stderr, flush=True)
            FILED.info("%s%s", line, more, extra={"trace": context})


def setup_beside_terminal(role: str, folder: str, name: str) -> None:
    """Writes the lines of this process to ``folder/NAME.log`` too, as JSON (``runtime.records.logs``). Raises ``UserError`` where that cannot be."""
    try:
        setup(role, Path(folder).expanduser(), run="", name=name)
    except OSError as error:
        raise UserError(f"the log folder '{folder}' cannot be written ({error.strerror}); name another one") from None
    FILED.propagate = True


class RequestLog:
    """ASGI middleware that logs each request when its answer has ended: client, method, path, status, tokens and seconds."""

    def __init__(self, app: ASGIApp, lines: LogLines) -> None:
        self._app, self._lines = app, lines

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in QUIET:
            await self._app(scope, receive, send)
            return
        began, answer, usage = time.monotonic(), NotedSend(send), Usage()
        scope[USAGE] = usage
        try:
            await self._app(scope, receive, answer)
        finally:
            tokens = f", {usage.prompt} prompt and {usage.completion} generated tokens" if usage.prompt else ""
            client = scope["client"][0] if scope.get("client") else "-"
            self._lines.add(f'{client} "{scope["method"]} {_printable(scope)}" {answer.status}{tokens}, {time.monotonic() - began:.3f} s')


async def log_stats(metrics: "Metrics", lines: LogLines, period_s: float = STATS_S) -> None:
    """Logs throughput and load every ``period_s`` seconds in which there was work, and once more after it, in vLLM's words."""
    before, at, was_busy = metrics.totals(), time.monotonic(), False
    while True:
        await asyncio.sleep(period_s)
        now, seconds = metrics.totals(), time.monotonic() - at
        is_busy = now.running + now.waiting > 0 or now.prompt_tokens + now.generation_tokens > before.prompt_tokens + before.generation_tokens
        if is_busy or was_busy:
            lines.add(
                f"Avg prompt throughput: {(now.prompt_tokens - before.prompt_tokens) / seconds:.1f} tokens/s, "
                f"Avg generation throughput: {(now.generation_tokens - before.generation_tokens) / seconds:.1f} tokens/s, "
                f"Running: {now.running} reqs, Waiting: {now.waiting} reqs, KV cache usage: {now.kv_cache_usage:.1%}, "
                f"Prefix cache hit rate: {now.prefix_hits / max(1, now.prefix_queries):.1%}"
            )
        before, at, was_busy = now, at + seconds, is_busy


class _HttpRecords(logging.Handler):
    """What uvicorn logs, as lines."""

    def __init__(self, lines: LogLines) -> None:
        super().__init__()
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.add(f"{record.levelname.lower()}: {self.format(record)}")


def log_http(lines: LogLines) -> None:
    """Has what uvicorn logs, at the level that it is given, written among ``lines``."""
    logger = logging.getLogger("uvicorn")
    logger.handlers, logger.propagate = [_HttpRecords(lines)], False


def _printable(scope: Scope) -> str:
    """Returns the path as it was sent, without its query, which may have a key."""
    raw: bytes = scope.get("raw_path") or scope["path"].encode("utf-8", "replace")
    text = "".join(chr(byte) if 0x20 < byte < 0x7F and byte != 0x22 else f"%{byte:02X}" for byte in raw.partition(b"?")[0])
    return text if len(text) <= _LONGEST_PATH else f"{text[:_LONGEST_PATH]}..."

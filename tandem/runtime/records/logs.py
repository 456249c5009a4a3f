"""Logs as JSON lines, one file for each process: ``runs/NAME/logs/ROLE.log``, and its older parts ``ROLE.log.1`` and ``ROLE.log.2``.

``readable`` gives a line to a person: ``tandem logs`` and the dashboard do. Lines that are no JSON, as those that functions of the user print, are left as
they are.
"""

import json
import logging
import logging.handlers
import sys
import threading
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any

from tandem.runtime.traces.context import current
from tandem.runtime.traces.spans import SPANS

MAX_LOG_BYTES = 64 * 2**20
OLDER_PARTS = 2
DEFAULT_LOGS = "~/.cache/tandem/log"
"""The folder of the logs of servers and gateways."""
_step: int | None = None


def step_is(step: int) -> None:
    """Says which step this process works on, for the lines that follow."""
    global _step
    _step = step


class JsonLines(logging.Formatter):
    """Formats a record as a JSON object on one line: ``time`` (UTC), ``level``, ``run``, ``role``, ``rank``, ``step``, ``trace_id`` and ``span_id`` (each only
    where there is one), ``pid``, ``logger``, ``message`` and ``exception`` (the traceback, where there is one)."""

    def format(self, record: logging.LogRecord) -> str:
        process, context = SPANS.process, getattr(record, "trace", None) or current()
        line: dict[str, Any] = {"time": _time(record.created), "level": record.levelname}
        if process.run:
            line["run"] = process.run
        line["role"] = process.service
        if process.rank >= 0:
            line["rank"] = process.rank
        if _step is not None:
            line["step"] = _step
        if context is not None:
            line |= {"trace_id": context.trace_id, "span_id": context.span_id}
        line |= {"pid": record.process, "logger": record.name, "message": record.getMessage()}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def readable(line: str) -> str:
    """Returns a line of a log for a person: time, level, process, logger and message, and a traceback below. A line that is none of ``JsonLines`` is returned
    as it is."""
    if not line.startswith("{"):
        return line
    try:
        said = json.loads(line)
        when = datetime.fromisoformat(said["time"]).astimezone()
        rank = f" rank {said['rank']}" if said.get("rank", 0) else ""
        step = f" step {said['step']}" if "step" in said else ""
        who = f"{said['level']} {said['role']}{rank}[{said['pid']}]{step} {said['logger']}"
        text = f"{when:%Y-%m-%d %H:%M:%S}.{when.microsecond // 1000:03d} {who}: {said['message']}"
    except (ValueError, KeyError, TypeError, RecursionError):
        return line
    return f"{text}\n{said['exception']}" if said.get("exception") else text


def setup(role: str, directory: Path, *, level: int = logging.INFO, run: str | None = None, rank: int = -1, name: str = "") -> Path:
    """Sends everything this process logs, uncaught exceptions of threads and warnings included, to ``directory/ROLE.log``, appending. A file of
    ``MAX_LOG_BYTES`` is renamed and a new one started; ``OLDER_PARTS`` older files are kept, so a log never fills a disk.

    Called at the start of a process; a second call replaces the first. ``run``: the name of its run, by default that of the folder around ``directory``.
    ``name``: of the file, without its ending, where several processes of the role share the folder. Returns the file's path.
    """
    global _step
    _step = None
    SPANS.identify(role, directory.absolute().parent.name if run is None else run, rank)
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{name or role}.log"
    handler = logging.handlers.RotatingFileHandler(path, maxBytes=MAX_LOG_BYTES, backupCount=OLDER_PARTS, encoding="utf-8")
    handler.setFormatter(JsonLines())
    logging.basicConfig(level=level, handlers=[handler], force=True)
    logging.captureWarnings(True)
    threading.excepthook = _log_thread
    return path


def log_uncaught() -> None:
    """Sends an uncaught exception to the log instead of standard error, for processes without a terminal."""
    sys.excepthook = _log_exception


def _log_exception(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    logging.getLogger("tandem").critical("uncaught exception", exc_info=(kind, error, trace))


def _log_thread(args: threading.ExceptHookArgs) -> None:
    error = args.exc_value or args.exc_type()
    name = args.thread.name if args.thread else "?"
    logging.getLogger("tandem").critical("uncaught exception in thread %s", name, exc_info=(args.exc_type, error, args.exc_traceback))

"""Plain-text logs, one file for each process role: ``runs/NAME/logs/ROLE.log``, and its older parts ``ROLE.log.1`` and ``ROLE.log.2``."""

import json
import logging
import logging.handlers
import sys
import threading
from pathlib import Path
from types import TracebackType

from tandem.runtime.traces.spans import SPANS

MAX_LOG_BYTES = 64 * 2**20
OLDER_PARTS = 2
PLAIN = "%(asctime)s.%(msecs)03d %(levelname)s {role}[%(process)d] %(name)s: %(message)s"


class JsonLines(logging.Formatter):
    """Formats a record as a JSON object on one line: ``time_s`` (unix), ``level``, ``role``, ``pid``, ``logger``, ``message`` and, where there
    is one, ``exception`` (the traceback)."""

    def __init__(self, role: str) -> None:
        super().__init__()
        self.role = role

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time_s": record.created,
            "level": record.levelname,
            "role": self.role,
            "pid": record.process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def setup(role: str, directory: Path, *, json_lines: bool = False, level: int = logging.INFO, rank: int = -1) -> Path:
    """Sends everything this process logs, uncaught exceptions of threads and warnings included, to ``directory/ROLE.log``, appending. A file of
    ``MAX_LOG_BYTES`` is renamed and a new one started; ``OLDER_PARTS`` older files are kept, so a log never fills a disk.

    Called at the start of a process; a second call replaces the first. Returns the file's path.
    """
    SPANS.identify(role, directory.absolute().parent.name, rank)
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{role}.log"
    handler = logging.handlers.RotatingFileHandler(path, maxBytes=MAX_LOG_BYTES, backupCount=OLDER_PARTS, encoding="utf-8")
    plain = logging.Formatter(PLAIN.format(role=role.replace("%", "%%")), "%Y-%m-%d %H:%M:%S")
    handler.setFormatter(JsonLines(role) if json_lines else plain)
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

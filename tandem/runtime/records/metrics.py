"""``metrics.jsonl``: one JSON object for each step, one on each line.

Keys: ``step`` (int, required; the step's place, counted from 0: row 3 describes the step from 3 to 4 optimizer steps
taken) and the field's metric names: ``reward/*``, ``accuracy``, ``actor/*``, ``response_length/*``, ``kl``,
``mismatch_kl``, ``rollout/staleness``, ``weight_version``, ``evaluation/*``, ``timing_s/*`` (seconds), ``perf/*`` and
``memory/{phase}/{predicted,measured}`` (bytes), ``comm/*``, ``controller/*``. Floats are written with the fewest digits that give back the same bits;
infinities and NaN as ``Infinity`` and ``NaN``, which Python's ``json`` reads.

``append`` hands a row to the operating system before it returns: a killed process loses none. ``sync`` flushes rows to the disk; it is
called before a checkpoint commits, because steps before a checkpoint are not repeated. A torn last line is removed when the file is opened.
"""

import json
import os
from collections.abc import Callable, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

from tandem.types.errors import RunError, UserError

VOLATILE = ("timing_s/", "reward_s/", "perf/", "memory/", "comm/", "controller/")
"""Prefixes of the keys that differ between two runs that are otherwise bit-identical."""
_BLOCK_BYTES = 1 << 16


class MetricsFile:
    """``metrics.jsonl``, open for appending. One process writes; others read with ``read_rows``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        _recover(path)
        try:
            self._file = path.open("ab")
        except OSError as error:
            raise UserError(f"the metrics file {path} cannot be written: {error.strerror}") from None

    def append(self, row: Mapping[str, Any]) -> str:
        """Writes one row and returns its digest. Raises ``ValueError`` where it has no ``step``, ``TypeError`` where a value is not an int,
        float, str or bool."""
        if type(row.get("step")) is not int:
            raise ValueError(f"a metrics row needs an int 'step'; it has {row.get('step')!r}")
        for key, value in row.items():
            if value is not None and type(value) not in (int, float, str, bool):
                raise TypeError(f"the metric '{key}' is a {type(value).__name__}; make it an int, float, str or bool first")
        line = json.dumps(dict(row)).encode("ascii") + b"\n"
        try:
            self._file.write(line)
            self._file.flush()
        except OSError as error:
            raise RunError(f"the metrics file {self.path} cannot be written: {error.strerror}; make room and resume") from None
        return row_digest(line[:-1])

    def sync(self) -> None:
        """Flushes every row to the disk."""
        os.fsync(self._file.fileno())

    def cut_after(self, step: int) -> None:
        """Goes back to the checkpoint after ``step`` optimizer steps: keeps rows 0 to ``step`` - 1, by one atomic rename."""
        self._file.close()
        _rewrite(self.path, lambda row: int(row["step"]) < step)
        self._file = self.path.open("ab")

    def rows(self) -> list[dict[str, Any]]:
        return read_rows(self.path)

    def last_row(self) -> dict[str, Any] | None:
        """Returns the newest row, ``None`` without one; other rows are not read. Raises ``RunError`` where it is broken."""
        line, begins, _ = _last_line(self.path)
        return _parse(f"the last line of {self.path}, at byte {begins},", line) if line else None

    def close(self) -> None:
        self._file.close()


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Returns all whole rows, without a torn last line. Raises ``RunError`` with the line's number where another line is broken."""
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    return [_parse(f"line {number} of {path}", line) for number, line in enumerate(lines[:-1], start=1)]


def row_digest(line: bytes) -> str:
    """Returns the BLAKE2b-128 digest of a row, a line without its end, in hexadecimal."""
    return blake2b(line, digest_size=16).hexdigest()


def digests_on_disk(path: Path) -> list[tuple[int | None, str]]:
    """Returns the step and the digest of every whole row; the step of one that cannot be read is ``None``."""
    found: list[tuple[int | None, str]] = []
    for line in path.read_bytes().split(b"\n")[:-1] if path.exists() else []:
        try:
            row = json.loads(line)
            step = row["step"] if isinstance(row, dict) and type(row.get("step")) is int else None
        except ValueError:
            step = None
        found.append((step, row_digest(line)))
    return found


def _parse(where: str, line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError:
        row = None
    if not isinstance(row, dict) or type(row.get("step")) is not int:
        raise RunError(f"{where} is not a metrics row; fix or remove that line") from None
    return row


def _recover(path: Path) -> None:
    """Removes a torn last line: one without a newline, or (where blocks of the file reached the disk out of order) one that is not JSON."""
    if not path.exists():
        return
    line, begins, ends = _last_line(path)
    try:
        json.loads(line or b"{}")
    except ValueError:
        ends = begins
    if ends < path.stat().st_size:
        os.truncate(path, ends)


def _last_line(path: Path) -> tuple[bytes, int, int]:
    """Returns the newest whole line without its end, and the offsets of its beginning and of what follows it. Reads backwards from the end of the file, so
    that a long run costs no more than a short one."""
    with path.open("rb") as file:
        start, data = file.seek(0, os.SEEK_END), b""
        while start and data.count(b"\n") < 2:
            size = min(_BLOCK_BYTES, start)
            start = file.seek(start - size)
            data = file.read(size) + data
    end = data.rfind(b"\n")
    begin = data.rfind(b"\n", 0, max(0, end)) + 1
    return data[begin:end] if end >= 0 else b"", start + begin, start + end + 1


def _rewrite(path: Path, keep: Callable[[dict[str, Any]], bool]) -> None:
    temporary = path.with_suffix(".jsonl.tmp")
    lines = path.read_bytes().split(b"\n")[:-1]
    kept = [line for number, line in enumerate(lines, start=1) if keep(_parse(f"line {number} of {path}", line))]
    with temporary.open("wb") as file:
        file.writelines(line + b"\n" for line in kept)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    directory = os.open(path.parent, os.O_RDONLY)
    os.fsync(directory)
    os.close(directory)

"""Shows and follows log files, which may be renamed when they are full, or not be there yet."""

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tandem.runtime.records.logs import readable
from tandem.types import UserError

_LOOK_S = 0.5
_ASK_S = 3.0
_PART = 1 << 20


def role_files(directory: Path, roles: Sequence[str]) -> tuple[Path, ...]:
    """Returns the logs of ``roles`` in the run's folder. Raises ``UserError`` for one that is not there, with those that are."""
    logs = directory / "logs"
    there = {str(path.relative_to(logs).with_suffix("")): path for path in sorted(logs.rglob("*.log"))}
    for role in roles:
        if role not in there:
            raise UserError(f"--role is '{role}', which has no log in '{logs}'; there are {', '.join(there) or 'none yet'}")
    return tuple(there[role] for role in roles)


def show(files: Sequence[Path]) -> None:
    """Writes ``files`` to standard output, several each under its name."""
    for path in files:
        if len(files) > 1:
            print(f"==> {path} <==")
        _copy(path, 0, is_last=True)


def follow(files: Callable[[], Sequence[Path]], is_active: Callable[[], bool]) -> None:
    """Writes what ``files``, asked again and again, have and get, until the run is no longer active."""
    places: dict[Path, tuple[int, int]] = {}
    newest: Path | None = None
    asked_s, goes_on = float("-inf"), True
    while True:
        if time.monotonic() - asked_s >= _ASK_S:
            # Before the last look, so that nothing is missed that the run has written at its end.
            goes_on, asked_s = is_active(), time.monotonic()
        for path in files():
            try:
                found = path.stat()
            except FileNotFoundError:
                continue
            number, at = places.get(path, (found.st_ino, 0))
            if number != found.st_ino or found.st_size < at:
                at = 0
            if found.st_size > at and path != newest:
                if newest is not None or len(files()) > 1:
                    print(f"==> {path} <==")
                newest = path
            places[path] = (found.st_ino, _copy(path, at, is_last=not goes_on))
        if not goes_on:
            return
        time.sleep(_LOOK_S)


def _copy(path: Path, at: int, *, is_last: bool) -> int:
    """Writes the lines that ``path`` has from byte ``at`` on, for a person. Returns where they end: a line that is not whole yet is left for the next time,
    unless ``is_last``."""
    with path.open("rb") as file:
        file.seek(at)
        while part := file.read(_PART):
            whole = part.rfind(b"\n") + 1
            if not whole:
                if len(part) < _PART and not is_last:
                    break
                whole = len(part)
            at += whole
            file.seek(at)
            for line in part[:whole].decode("utf-8", errors="replace").splitlines(keepends=True):
                sys.stdout.write(readable(line.rstrip("\n")) + "\n" if line.endswith("\n") else line)
    sys.stdout.flush()
    return at

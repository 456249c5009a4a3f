"""The ends of a run's logs, and the lines before them."""

import re
from pathlib import Path
from typing import Any

from tandem.report.hidden import without_secrets
from tandem.runtime.records.logs import readable
from tandem.types import UserError

MOST_BYTES = 131_072
LONGEST_LINE = 4000
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x08\x0b-\x1f\x7f]")
"""What a terminal would read as a command."""


def log_files(directory: Path) -> list[dict[str, Any]]:
    """Returns the logs of a run by name, with their bytes; links are left out, as they may lead out of the run's folder."""
    folder = directory / "logs"
    try:
        there = sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    except OSError:
        return []
    return [{"name": str(path.relative_to(folder)), "bytes": path.stat().st_size} for path in there[:500]]


def log_part(directory: Path, name: str, before: int | None, text: str = "") -> dict[str, Any]:
    """Returns whole lines of the log ``name``: its end, or those that end at the byte ``before``. ``text``: only lines with it. ``from`` and ``to`` are the
    bytes of the part. Raises ``UserError`` where there is no such log."""
    if name not in {file["name"] for file in log_files(directory)}:
        raise UserError(f"the run has no log '{name[:200]}'")
    with (directory / "logs" / name).open("rb") as file:
        size = file.seek(0, 2)
        end = size if before is None else max(0, min(before, size))
        start = max(0, end - MOST_BYTES)
        file.seek(start)
        data = file.read(end - start)
    if start:
        cut = data.find(b"\n") + 1
        # One line may be longer than the part: it is shown cut.
        start, data = (start + cut, data[cut:]) if 0 < cut < len(data) else (start, data)
    written = data.decode("utf-8", "replace").split("\n")
    if written and not written[-1]:
        written.pop()
    lines = [line for each in written for line in readable(each).split("\n")]
    wanted = text.casefold()
    return {"from": start, "to": end, "size": size, "lines": [_shown(line) for line in lines if wanted in line.casefold()]}


def _shown(line: str) -> str:
    line = str(without_secrets("", _ESCAPES.sub("", line)))
    return line if len(line) <= LONGEST_LINE else f"{line[:LONGEST_LINE]} … {len(line) - LONGEST_LINE:,} characters more"

"""Reads files that a user names: never waits for a FIFO, reads a device, or fills the memory with more than a file may hold."""

import json
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO

from tandem.types.errors import UserError

MOST_JSON_BYTES = 2**26
"""Of a JSON file beside a model. The largest known, the index of a mixture of hundreds of experts, has some 20 MB."""
MOST_TOKENIZER_BYTES = 2**28
"""Of a ``tokenizer.json``. The largest known have some 35 MB."""
_KINDS = ((stat.S_ISDIR, "a folder"), (stat.S_ISFIFO, "a FIFO"), (stat.S_ISCHR, "a device"), (stat.S_ISBLK, "a device"), (stat.S_ISSOCK, "a socket"))


def open_input(path: str | Path) -> BinaryIO:
    """Opens the regular file ``path`` for reading. Raises ``UserError`` if it is of another kind or its name is impossible, ``OSError`` as the system
    does, including ``FileNotFoundError``."""
    try:
        # O_NONBLOCK: opening a FIFO without a writer would wait for one.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except ValueError as error:
        raise UserError(f"{str(path)!r} is not the name of a file: {error}; correct the name") from None
    try:
        mode = os.fstat(descriptor).st_mode
        for is_kind, name in _KINDS:
            if is_kind(mode):
                raise UserError(f"'{path}' cannot be read: it is {name}; name a regular file")
        return open(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_input(path: str | Path, most_bytes: int, fix: str = "name the right file") -> bytes:
    """Returns the content of the regular file ``path``, of at most ``most_bytes`` bytes. Raises as ``open_input`` does, and ``UserError`` for a larger
    file; a sparse one is refused by its size. ``fix``: the end of that message."""
    with open_input(path) as file:
        size = os.fstat(file.fileno()).st_size
        # Files below /proc have size 0, so the bytes are counted too.
        content = file.read(most_bytes + 1) if size <= most_bytes else b""
    if max(size, len(content)) > most_bytes:
        raise UserError(f"'{path}' has {max(size, len(content)):,} bytes, more than the {most_bytes:,} that are read; {fix}")
    return content


def read_json_object(path: str | Path, fix: str) -> dict[str, Any]:
    """Returns the JSON object in ``path``. Raises ``UserError`` for anything else, ``FileNotFoundError``. ``fix``: as of ``read_input``."""
    content: dict[str, Any] = _read_json(path, fix, dict, "an object")
    return content


def read_json_list(path: str | Path, fix: str, of: str) -> list[Any]:
    """Does the same for a JSON list; ``of``: what it has."""
    content: list[Any] = _read_json(path, fix, list, f"a list of {of}")
    return content


def _read_json(path: str | Path, fix: str, kind: type, name: str) -> Any:
    try:
        content = json.loads(read_input(path, MOST_JSON_BYTES, fix))
    except FileNotFoundError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"'{path}' cannot be read as JSON: {error}") from None
    if not isinstance(content, kind):
        raise UserError(f"'{path}' contains a JSON {type(content).__name__}; it must contain {name}")
    return content

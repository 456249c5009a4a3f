"""The records of an event file: each has its length (8 bytes), a checksum (4), its bytes, and their checksum (4)."""

from collections.abc import Iterator
from pathlib import Path

_HEADER, _FOOTER = 12, 4


def read_records(path: Path) -> Iterator[bytes]:
    """Yields the whole records of ``path``; a last one that a killed process left torn is left out."""
    with path.open("rb") as file:
        while len(header := file.read(_HEADER)) == _HEADER:
            length = int.from_bytes(header[:8], "little")
            record = file.read(length + _FOOTER)
            if len(record) < length + _FOOTER:
                return
            yield record[:length]

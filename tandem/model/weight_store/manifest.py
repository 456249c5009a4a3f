"""The cached files of a model folder: one JSON file, replaced atomically whenever more bytes are safely stored."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tandem.model.weight_store.objects import RemoteFile
from tandem.storage.folder_manifest import replace_file

NAME = "manifest.json"


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A stored file: ``xxh3`` (128 bits, hexadecimal) of its bytes and the time of its last change."""

    xxh3: str
    mtime_ns: int


@dataclass(frozen=True, slots=True)
class Part:
    """The first ``size_bytes`` of file ``name``, which are on the disk and have the digest ``xxh3``."""

    name: str
    size_bytes: int
    xxh3: str


@dataclass(slots=True)
class Manifest:
    """``files``: the content of the folder at ``url``. ``stored``: the files that are complete. ``part``: the file being downloaded."""

    url: str
    files: tuple[RemoteFile, ...]
    stored: dict[str, StoredFile] = field(default_factory=dict)
    part: Part | None = None

    @property
    def total_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)

    @property
    def is_complete(self) -> bool:
        return all(file.name in self.stored for file in self.files)

    def write(self, entry: Path) -> None:
        """Replaces the manifest in the folder ``entry`` atomically."""
        replace_file(entry / NAME, json.dumps(asdict(self), indent=1))


def read_manifest(entry: Path) -> Manifest | None:
    """Returns the manifest in ``entry``; ``None`` if it is missing or unreadable, as after a crash of the machine."""
    try:
        data = json.loads((entry / NAME).read_text(encoding="utf-8"))
        return Manifest(
            url=data["url"],
            files=tuple(RemoteFile(**file) for file in data["files"]),
            stored={name: StoredFile(**file) for name, file in data["stored"].items()},
            part=None if data["part"] is None else Part(**data["part"]),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None

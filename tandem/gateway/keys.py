"""API keys: a file with their digests, which ``tandem keys`` writes and gateways read."""

import hashlib
import hmac
import json
import os
import secrets
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from tandem.config.gateway import LimitConfig
from tandem.config.load import build
from tandem.types import UserError
from tandem.types.input_file import read_input

_MOST_BYTES = 2**26
_PREFIX = "tk"
_ID_BYTES, _SECRET_BYTES = 6, 32
_NOBODY = hashlib.sha256(b"nobody").hexdigest()


@dataclass(frozen=True)
class KeyRecord:
    """What is known of a key. ``digest``: the SHA-256 of the whole key, whose 256 random bits need no slow hash. ``expires``: seconds since the epoch,
    0 for never. ``models``: those that it may ask for, empty for all."""

    id: str
    digest: str
    tenant: str
    models: tuple[str, ...] = ()
    created: float = 0.0
    expires: float = 0.0
    limits: LimitConfig = field(default_factory=LimitConfig)
    role: Literal["user", "admin"] = "user"
    """Whether it also opens the administration of the gateway."""

    def is_expired(self, now: float) -> bool:
        return bool(self.expires) and now >= self.expires


@dataclass(frozen=True)
class _KeyFile:
    keys: tuple[KeyRecord, ...] = ()


def new_key(
    tenant: str, *, models: tuple[str, ...] = (), expires: float = 0.0, limits: LimitConfig | None = None, role: Literal["user", "admin"] = "user"
) -> tuple[str, KeyRecord]:
    """Returns a new key, which is shown once, and its record."""
    id = secrets.token_hex(_ID_BYTES)
    key = f"{_PREFIX}-{id}-{secrets.token_urlsafe(_SECRET_BYTES)}"
    return key, KeyRecord(id, _digest(key), tenant, models, time.time(), expires, limits or LimitConfig(), role)


def find_key(records: Mapping[str, KeyRecord], given: str) -> KeyRecord | None:
    """Returns the record of the key ``given``, ``None`` if there is none. Takes the same time for an id that exists and one that does not, and for every
    wrong secret."""
    parts = given.split("-", 2)
    record = records.get(parts[1]) if len(parts) == 3 and parts[0] == _PREFIX else None
    is_right = hmac.compare_digest(_digest(given), _NOBODY if record is None else record.digest)
    return record if is_right else None


def read_keys(path: Path) -> dict[str, KeyRecord]:
    """Returns the records of a key file by their ids. Raises ``UserError`` if it cannot be read."""
    try:
        content = json.loads(read_input(str(path), _MOST_BYTES, "a key file is written by 'tandem keys'"))
        if not isinstance(content, dict):
            raise ValueError("it is no JSON object")
    except FileNotFoundError:
        raise UserError(f"the key file '{path}' does not exist; 'tandem keys create --file {path} --tenant NAME' makes one") from None
    except (OSError, ValueError) as error:
        raise UserError(f"the key file '{path}' cannot be read: {error}") from None
    return {record.id: record for record in build(_KeyFile, content, "").keys}


def write_keys(path: Path, records: Mapping[str, KeyRecord]) -> None:
    """Writes a key file, readable by its owner alone: a fresh name, a flush, one rename."""
    content: dict[str, Any] = {"keys": [asdict(record) for record in records.values()]}
    fresh = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
            json.dump(content, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)


def rotated(record: KeyRecord) -> tuple[str, KeyRecord]:
    """Returns a new key for the owner of ``record``, with all that he may do."""
    key, fresh = new_key(record.tenant)
    return key, replace(record, id=fresh.id, digest=fresh.digest, created=fresh.created)


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


class KeyFile:
    """The keys of a file as they are now: ``refresh`` reads it again when it has changed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp = self._stamp_now()
        self.records = read_keys(path)
        self.problem: str | None = None

    def refresh(self) -> dict[str, list[str]]:
        """Reads the file again if it has changed; returns the ids of the keys that were ``added``, ``removed`` or ``changed``. One that cannot be read changes
        nothing; ``problem`` says why."""
        stamp = self._stamp_now()
        if stamp == self._stamp:
            return {}
        before = self.records
        try:
            self.records, self.problem = read_keys(self._path), None
            self._stamp = stamp
        except UserError as error:
            self.problem = str(error)
        now = self.records
        ids = {
            "added": [id for id in now if id not in before], "removed": [id for id in before if id not in now],
            "changed": [id for id in now if id in before and now[id] != before[id]],
        }  # fmt: skip
        return {how: which for how, which in ids.items() if which}

    def _stamp_now(self) -> tuple[int, int] | None:
        try:
            status = self._path.stat()
        except OSError:
            return None
        return status.st_mtime_ns, status.st_ino

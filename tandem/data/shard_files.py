"""Shards on this machine: where they lie already, or in a folder that they are brought to once and verified."""

import os
import shutil
from array import array
from pathlib import Path

from tandem.data.shards import Shard, ShardReader, read_lengths, verify
from tandem.data.tokenize import TokenizedDataset, read_dataset
from tandem.storage.files import Storage, read
from tandem.types import RunError

CHUNK_BYTES = 2**20


class ShardFiles:
    """The shards of the dataset in ``storage``, each opened when it is first asked for. ``cache``: the folder for those of a
    storage that is elsewhere."""

    def __init__(self, storage: Storage, cache: Path | None = None) -> None:
        self.storage, self.cache = storage, cache
        self.dataset: TokenizedDataset = read_dataset(storage)
        self._readers: dict[int, ShardReader] = {}

    def open(self, number: int) -> ShardReader:
        """The reader of shard ``number``."""
        if number not in self._readers:
            shard = self.dataset.shards[number]
            tar, lengths = (self._file(f"{shard.name}.{suffix}", shard) for suffix in ("tar", "lengths"))
            self._readers[number] = ShardReader(tar, lengths, shard, self.dataset.dtype)
        return self._readers[number]

    def lengths(self, number: int) -> "array[int]":
        """Tokens of each document of shard ``number``, without bringing the shard here. Raises ``RunError`` where they are damaged."""
        shard = self.dataset.shards[number]
        try:
            return read_lengths(read(self.storage, f"{shard.name}.lengths"), shard)
        except FileNotFoundError:
            raise RunError(f"'{self.storage.url}' lacks {shard.name}.lengths; tokenize its source again") from None

    def _file(self, name: str, shard: Shard) -> Path:
        local = self.storage.local(name)
        if local is not None:
            return local
        if self.cache is None:
            raise RunError(f"'{self.storage.url}' is not on this machine; name a folder that its shards can be brought to")
        path = self.cache / name
        if not path.exists():
            self._bring(name, path, shard)
        return path

    def _bring(self, name: str, path: Path, shard: Shard) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            with self.storage.open(name) as source, fresh.open("wb") as target:
                shutil.copyfileobj(source, target, CHUNK_BYTES)
            if name.endswith(".tar"):
                with fresh.open("rb") as file:
                    if not verify(iter(lambda: file.read(CHUNK_BYTES), b""), shard):
                        raise RunError(f"'{self.storage.url}/{name}' does not have the digest it was written with; tokenize its source again")
            fresh.replace(path)
        except OSError as error:
            raise RunError(f"'{path}' cannot be written: {error.strerror or error}; make room in the cache folder") from None
        finally:
            fresh.unlink(missing_ok=True)

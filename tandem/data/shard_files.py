"""Shards on this machine: in their own folder, or downloaded once to a cache folder. Each is verified before it is read."""

import os
import shutil
from array import array
from pathlib import Path
from typing import BinaryIO

from tandem.data.shards import AGAIN, LENGTH_BYTES, Shard, ShardReader, read_lengths, verify
from tandem.data.tokenizing.tokenize import TokenizedDataset, read_dataset
from tandem.storage.files import Storage, read
from tandem.types import RunError, UserError

CHUNK_BYTES = 2**20


class ShardFiles:
    """The shards of the dataset in ``storage``, each opened on first use. ``cache``: the folder for shards downloaded from
    remote storage."""

    def __init__(self, storage: Storage, cache: Path | None = None) -> None:
        self.storage, self.cache = storage, cache
        self.dataset: TokenizedDataset = read_dataset(storage)
        self._readers: dict[int, ShardReader] = {}

    def open(self, number: int) -> ShardReader:
        """Returns the reader of shard ``number``. Raises ``RunError`` if its bytes differ from those written."""
        if number not in self._readers:
            shard = self.dataset.shards[number]
            tar, lengths = (self._file(f"{shard.name}.{suffix}", shard) for suffix in ("tar", "lengths"))
            try:
                reader = ShardReader(tar, lengths, shard, self.dataset.dtype)
                with tar.open("rb") as file:
                    self._verify(file, tar.name, shard)
            except FileNotFoundError as error:
                raise RunError(f"'{error.filename}' does not exist; {AGAIN}") from None
            self._readers[number] = reader
        return self._readers[number]

    def check(self) -> None:
        """Raises ``UserError`` if a shard is missing or its size has changed; reads only names and sizes."""
        sizes = {file.name: file.size for file in self.storage.files()}
        for shard in self.dataset.shards:
            for name, size in ((f"{shard.name}.tar", shard.size), (f"{shard.name}.lengths", shard.documents * LENGTH_BYTES)):
                if name not in sizes:
                    raise UserError(f"'{self.storage.url}' has no {name}; {AGAIN}")
                if sizes[name] != size:
                    raise UserError(f"{name} in '{self.storage.url}' has {sizes[name]} bytes and was written with {size}; remove it, and {AGAIN}")

    def lengths(self, number: int) -> "array[int]":
        """Returns the number of tokens of each document of shard ``number`` without downloading the shard. Raises ``RunError`` if they are damaged."""
        shard = self.dataset.shards[number]
        try:
            return read_lengths(read(self.storage, f"{shard.name}.lengths"), shard)
        except FileNotFoundError:
            raise RunError(f"'{self.storage.url}' has no {shard.name}.lengths; {AGAIN}") from None

    def _file(self, name: str, shard: Shard) -> Path:
        local = self.storage.local(name)
        if local is not None:
            return local
        if self.cache is None:
            raise RunError(f"'{self.storage.url}' is not on this machine; name a folder to download its shards to")
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
                    self._verify(file, name, shard)
            fresh.replace(path)
        except OSError as error:
            raise RunError(f"'{path}' cannot be written: {error.strerror or error}; make room in the cache folder") from None
        finally:
            fresh.unlink(missing_ok=True)

    def _verify(self, file: BinaryIO, name: str, shard: Shard) -> None:
        if not verify(iter(lambda: file.read(CHUNK_BYTES), b""), shard):
            raise RunError(f"{name} of '{self.storage.url}' does not have the digest it was written with; remove it, and {AGAIN}")

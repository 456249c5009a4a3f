"""Files written with direct I/O, against their expected content."""

import ctypes
import errno
import fcntl
import mmap
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tandem.storage import direct
from tandem.storage.direct import read_from_disk, write_new

CHUNK = 64 << 10


def chunks_of(content: memoryview) -> Iterator[memoryview]:
    for start in range(0, len(content), CHUNK):
        yield content[start : start + CHUNK]


def paged(data: bytes) -> memoryview:
    """Returns ``data`` at the beginning of a page, as direct I/O requires."""
    memory = mmap.mmap(-1, max(1, len(data)))
    memory[: len(data)] = data
    return memoryview(memory)[: len(data)]


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, CHUNK, 3 * CHUNK + 4096, 3 * CHUNK + 4097, 5 * CHUNK - 1])
@pytest.mark.parametrize("shift", [0, 1])
def test_a_file_of_any_size_from_any_address_has_the_bytes_and_reads_back(tmp_path: Path, size: int, shift: int) -> None:
    data = os.urandom(size)
    write_new(tmp_path / "file", chunks_of(paged(b"x" * shift + data)[shift:]), size)
    assert (tmp_path / "file").read_bytes() == data
    for chunk_bytes in (CHUNK, 4096, 1000):
        assert b"".join(map(bytes, read_from_disk(tmp_path / "file", size, chunk_bytes))) == data


@pytest.mark.parametrize("fails", ["flag", "call"])
def test_a_file_system_without_direct_transfers_is_written_and_read_the_usual_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str) -> None:
    refused = []
    if fails == "flag":
        monkeypatch.setattr(direct, "_DIRECT", 0)
    else:
        real_write, real_read = os.write, os.preadv

        def is_direct(descriptor: int) -> bool:
            if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
                refused.append(descriptor)
                return True
            return False

        def write(descriptor: int, content: Any) -> int:
            if is_direct(descriptor):
                raise OSError(errno.EINVAL, "no direct transfers")
            return real_write(descriptor, content)

        def read(descriptor: int, into: Any, at: int) -> int:
            if is_direct(descriptor):
                raise OSError(errno.EINVAL, "no direct transfers")
            return real_read(descriptor, into, at)

        monkeypatch.setattr(os, "write", write)
        monkeypatch.setattr(os, "preadv", read)
    data = os.urandom(2 * CHUNK + 5)
    write_new(tmp_path / "file", chunks_of(paged(data)), len(data))
    assert (tmp_path / "file").read_bytes() == data
    assert b"".join(map(bytes, read_from_disk(tmp_path / "file", len(data), CHUNK))) == data
    assert fails == "flag" or len(refused) == 2


def test_what_is_read_is_what_lies_on_the_disk_and_a_shorter_file_is_said(tmp_path: Path) -> None:
    data = os.urandom(3 * CHUNK)
    write_new(tmp_path / "file", chunks_of(paged(data)), len(data))
    os.truncate(tmp_path / "file", 2 * CHUNK + 100)
    with pytest.raises(ValueError, match="shorter"):
        list(read_from_disk(tmp_path / "file", len(data), CHUNK))


def test_a_written_file_takes_none_of_the_systems_memory(tmp_path: Path) -> None:
    """Other file systems, such as tmpfs, may accept the flag and still cache the file."""
    system = subprocess.run(["stat", "-f", "-c", "%T", str(tmp_path)], capture_output=True, text=True, check=True).stdout.strip()
    if system not in ("ext2/ext3", "xfs"):
        pytest.skip(f"the temporary folder lies on {system}; ext4 and xfs are known to have direct transfers")
    data = os.urandom(16 * CHUNK)
    write_new(tmp_path / "file", chunks_of(paged(data)), len(data))
    held = (ctypes.c_ubyte * (len(data) // mmap.PAGESIZE))()
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    with (tmp_path / "file").open("rb") as file:
        address = ctypes.c_void_p(libc.mmap(None, ctypes.c_size_t(len(data)), mmap.PROT_READ, mmap.MAP_PRIVATE, file.fileno(), ctypes.c_long(0)))
        assert libc.mincore(address, ctypes.c_size_t(len(data)), held) == 0
        libc.munmap(address, ctypes.c_size_t(len(data)))
    assert sum(page & 1 for page in held) == 0

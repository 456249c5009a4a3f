"""Room for a file is allocated before it is written, and one that does not fit takes none of the room of others."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tandem.storage.disk_space import free_bytes, reserve


def allocated(file: Path) -> int:
    return file.stat().st_blocks * 512


def test_a_file_grows_to_all_that_is_left_and_no_further(small_disk: Callable[[str], Path]) -> None:
    disk = small_disk("256k")
    with (disk / "file").open("wb") as file:
        for size in (0, 1, 100_000, 200_000, 1 << 18):
            reserve(file.fileno(), size)
            assert allocated(disk / "file") == -(-size // 4096) * 4096
        with pytest.raises(OSError, match="No space left") as raised:
            reserve(file.fileno(), (1 << 18) + 1)
    assert raised.value.errno == errno.ENOSPC and os.statvfs(disk).f_bavail == 0


def test_a_folder_that_is_not_there_yet_has_the_room_of_its_disk(small_disk: Callable[[str], Path]) -> None:
    disk = small_disk("256k")
    (disk / "file").write_bytes(bytes(100_000))
    assert free_bytes(disk / "a" / "b") == free_bytes(disk) == (1 << 18) - allocated(disk / "file")


def test_the_disk_is_never_asked_for_more_than_it_has(small_disk: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    disk, asked = small_disk("256k"), list[int]()
    monkeypatch.setattr(os, "posix_fallocate", lambda file, start, size: asked.append(size))
    with (disk / "file").open("wb") as file:
        for size in (1 << 18, (1 << 18) + 4096, 2**40, 2**62):
            try:
                reserve(file.fileno(), size)
            except OSError as error:
                assert error.errno == errno.ENOSPC
    assert asked == [1 << 18]


def test_a_file_system_without_a_limit_has_room(small_disk: Callable[[str], Path]) -> None:
    disk = small_disk("0")
    assert os.statvfs(disk).f_blocks == 0 and free_bytes(disk) == 2**63
    with (disk / "file").open("wb") as file:
        reserve(file.fileno(), 1 << 20)
    assert allocated(disk / "file") == 1 << 20

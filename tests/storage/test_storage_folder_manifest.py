import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import xxhash

from tandem.storage import folder_manifest
from tandem.storage.folder_manifest import MANIFEST, check_folder, damaged_files, folder_digests, read_manifest, write_manifest
from tandem.types import RunError

CONTENT = {"a.bin": bytes(range(256)) * 9000, "b.json": b"{}", "empty": b""}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, content in CONTENT.items():
        (tmp_path / name).write_bytes(content)
    return tmp_path


def test_a_manifest_has_the_xxh3_of_every_file(folder: Path) -> None:
    write_manifest(folder)
    files = json.loads((folder / MANIFEST).read_text())["files"]
    assert files == {name: {"size": len(content), "xxh3_128": xxhash.xxh3_128_hexdigest(content)} for name, content in CONTENT.items()}
    check_folder(folder)


def test_without_xxhash_the_digests_are_blake2b(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_manifest, "best_algorithm", lambda: "blake2b_128")
    write_manifest(folder)
    files = json.loads((folder / MANIFEST).read_text())["files"]
    assert files["a.bin"]["blake2b_128"] == hashlib.blake2b(CONTENT["a.bin"], digest_size=16).hexdigest()
    check_folder(folder)


def test_the_digest_of_a_folder_is_of_names_and_bytes_alone(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    first, other = write_manifest(folder), tmp_path_factory.mktemp("other")
    for name in reversed(CONTENT):
        (other / name).write_bytes(CONTENT[name])
    assert write_manifest(other) == first
    (other / "empty").write_bytes(b"x")
    assert write_manifest(other) != first


HARMS: list[tuple[Callable[[Path], object], str]] = [
    (lambda folder: (folder / "b.json").write_bytes(b"{]"), "b.json' does not have the digest it was written with"),
    (lambda folder: (folder / "b.json").write_bytes(b"{"), "b.json' has 1 bytes instead of 2"),
    (lambda folder: (folder / "b.json").unlink(), "b.json' is missing"),
    (lambda folder: (folder / MANIFEST).unlink(), "has no manifest.json and cannot be verified"),
    (lambda folder: (folder / MANIFEST).write_text("{"), "manifest.json' is damaged"),
    (lambda folder: (folder / MANIFEST).write_text("[]"), "manifest.json' is damaged"),
    (lambda folder: (folder / MANIFEST).write_bytes(b"\xff"), "manifest.json' cannot be read"),
    (lambda folder: (folder / MANIFEST).write_text((folder / MANIFEST).read_text().replace('"size": 2', '"size": 3')), "manifest.json' is damaged"),
]


@pytest.mark.parametrize(("harm", "expected"), HARMS)
def test_any_harm_to_a_folder_is_one_line(folder: Path, harm: Callable[[Path], object], expected: str) -> None:
    write_manifest(folder)
    harm(folder)
    with pytest.raises(RunError) as caught:
        check_folder(folder)
    assert expected in str(caught.value) and "\n" not in str(caught.value)


def test_every_bit_of_a_manifest_is_covered(folder: Path) -> None:
    write_manifest(folder)
    whole, files = (folder / MANIFEST).read_bytes(), read_manifest(folder)
    for place in range(len(whole) - 1):
        (folder / MANIFEST).write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        try:
            found = read_manifest(folder)
        except RunError:
            continue
        # A blank between two values that became another one.
        assert found == files and whole[place : place + 1].isspace()


def test_files_that_are_not_named_are_ignored_and_bytes_are_counted(folder: Path) -> None:
    files, counted = folder_digests(folder), []
    (folder / "more").write_bytes(b"more")
    (folder / ".hidden").write_bytes(b"hidden")
    assert damaged_files(folder, files, counted.append) == []
    assert sum(counted) == sum(map(len, CONTENT.values()))
    assert "more" in folder_digests(folder) and ".hidden" not in folder_digests(folder)

"""Object storage: a folder and a real S3 server behave alike."""

from pathlib import Path

import pytest

from tandem.data.shard_files import ShardFiles
from tandem.data.shards import ShardWriter
from tandem.data.stream import TokenStream
from tandem.data.tokenizing.tokenize import TokenizedDataset
from tandem.storage.files import open_storage, read, read_blocks
from tandem.types import RunError, UserError


@pytest.fixture(params=["folder", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "folder":
        return str(tmp_path / "storage")
    return f"{request.getfixturevalue('s3_url')}/{tmp_path.name}"


def test_what_is_put_is_listed_and_read_back(url: str, tmp_path: Path) -> None:
    storage = open_storage(url, create=True)
    assert storage.files() == []
    for name, content in (("b/c d.bin", b"\0\xff" * 1000), ("a.txt", b""), ("ü.txt", b"x")):
        (tmp_path / "local").write_bytes(content)
        storage.put(name, tmp_path / "local")
        assert read(storage, name) == content
        assert not (tmp_path / "local").exists()
    assert storage.files() == [("a.txt", 0), ("b/c d.bin", 2000), ("ü.txt", 1)]
    (tmp_path / "local").write_bytes(b"new")
    storage.put("a.txt", tmp_path / "local")
    assert read(storage, "a.txt") == b"new"
    with storage.open("b/c d.bin") as file:
        file.seek(1999)
        assert file.read() == b"\xff"
    with pytest.raises(FileNotFoundError):
        read(storage, "nothing")
    (tmp_path / "local").write_bytes(b"copied")
    storage.copy("c.txt", tmp_path / "local")
    assert read(storage, "c.txt") == b"copied" == (tmp_path / "local").read_bytes()
    assert list(read_blocks(storage, "c.txt", 4)) == [b"copi", b"ed"]
    storage.remove("c.txt")
    storage.remove("c.txt")
    assert "c.txt" not in [file.name for file in storage.files()]


def test_shards_elsewhere_are_brought_here_once_and_verified(url: str, tmp_path: Path) -> None:
    storage = open_storage(url, create=True)
    writer = ShardWriter(tmp_path, "shard-000000", "uint16")
    for length in (5, 9, 30):
        writer.add(list(range(length)))
    dataset = TokenizedDataset("", 100, None, "uint16", (writer.close(),))
    (tmp_path / "dataset.json").write_bytes(dataset.to_json())
    for name in ("shard-000000.tar", "shard-000000.lengths", "dataset.json"):
        storage.put(name, tmp_path / name)
    cache = tmp_path / "cache"
    files = ShardFiles(storage, cache)
    assert files.lengths(0).tolist() == [5, 9, 30] and not cache.exists(), "lengths are read where they lie"
    pieces = TokenStream(files.dataset, files.open, seed=0, length=44).sequence(0)
    assert sorted(len(piece.tokens) for piece in pieces) == [5, 9, 30]
    assert all(list(piece.tokens) == list(range(len(piece.tokens))) for piece in pieces)
    if storage.local("x") is None:
        assert sorted(path.name for path in cache.iterdir()) == ["shard-000000.lengths", "shard-000000.tar"]
        (tmp_path / "broken").write_bytes(bytes(dataset.shards[0].size))
        storage.put("shard-000000.tar", tmp_path / "broken")
        assert ShardFiles(storage, cache).open(0).lengths.tolist() == [5, 9, 30], "what is here is not fetched again"
        with pytest.raises(RunError, match="does not have the digest"):
            ShardFiles(storage, tmp_path / "other").open(0)
        assert list((tmp_path / "other").glob("*.tar")) == []


def test_scratch_of_a_killed_process_is_cleared_away_and_nothing_stays(url: str) -> None:
    storage = open_storage(url, create=True)
    root = storage.local("")
    if root is not None:
        # The kernel has released the lock of a killed process.
        (root / ".scratch").mkdir()
        (root / ".scratch" / "left").write_text("x")
    with storage.scratch() as folder:
        assert list(folder.iterdir()) == []
        (folder / "mine").write_text("x")
        assert storage.files() == []
    assert not folder.exists() and storage.files() == []


def test_scratch_of_a_process_that_lives_is_left_alone(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path))
    with storage.scratch() as folder:
        (folder / "mine").write_text("x")
        with pytest.raises(UserError, match="another process is writing to"), storage.scratch():
            pass
        assert (folder / "mine").exists()
    with storage.scratch() as folder:
        assert list(folder.iterdir()) == []


def test_address_that_cannot_be_used_is_one_line(tmp_path: Path) -> None:
    for url, said in ((str(tmp_path / "nix"), "is not a folder"), ("nosuch://x", "nosuch")):
        with pytest.raises(UserError) as caught:
            open_storage(url)
        assert said in str(caught.value) and "\n" not in str(caught.value)

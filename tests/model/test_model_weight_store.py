"""The cache of models from object storage: the bytes are right after deaths, changes, full disks and concurrent starts."""

import errno
import hashlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.registry import _registry

from tandem.model.weight_store import WeightStore, download, is_remote, objects
from tandem.model.weight_store.manifest import read_manifest
from tandem.storage.folder_manifest import write_manifest
from tandem.types import RunError, UserError

MIB = 1 << 20


@pytest.fixture(autouse=True)
def small_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "RANGE_BYTES", 64 << 10)
    monkeypatch.setattr(download, "SAFE_BYTES", 256 << 10)
    monkeypatch.setattr(objects, "PAUSES_S", (0.0, 0.0))


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """Every range that was read from the storage."""
    seen: list[tuple[str, int, int]] = []
    real = objects.RemoteFolder.read

    def read(self: Any, name: str, start: int, end: int) -> bytes:
        seen.append((name, start, end))
        return real(self, name, start, end)

    monkeypatch.setattr(objects.RemoteFolder, "read", read)
    return seen


def make_remote(folder: Path, size: int = MIB, seed: int = 0) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"seed": seed}))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(content(size, seed))
    (folder / "pytorch_model.bin").write_bytes(b"pickled")
    (folder / "original").mkdir(exist_ok=True)
    return f"file://{folder}"


def content(size: int, seed: int) -> bytes:
    return hashlib.shake_128(str(seed).encode()).digest(size)


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def wanted(folder: Path) -> dict[str, bytes]:
    return {name: data for name, data in files_only(folder).items() if name != "pytorch_model.bin"}


def files_only(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}


def test_a_model_is_downloaded_once_and_then_read_from_the_disk(tmp_path: Path, reads: list[tuple[str, int, int]]) -> None:
    url, seen = make_remote(tmp_path / "remote"), []
    store = WeightStore(tmp_path / "cache", on_progress=lambda here, total: seen.append((here, total)))
    with store.hold(url + "/") as held:
        assert files(held.path) == wanted(tmp_path / "remote")
        total = sum(map(len, files(held.path).values()))
    assert seen == sorted(seen) and seen[-1] == (total, total) and len(seen) > 10
    first = len(reads)
    with store.hold(url) as again, WeightStore(tmp_path / "cache").hold(url, verify=True) as other:
        assert again.path == other.path == held.path and len(reads) == first


def test_memory_and_other_storages_of_fsspec_work_too(tmp_path: Path) -> None:
    storage = fsspec.filesystem("memory")
    storage.pipe({"/bucket/m/config.json": b"{}", "/bucket/m/model.safetensors": content(300_000, 1), "/bucket/m/deep/x.json": b"no"})
    with WeightStore(tmp_path).hold("memory://bucket/m") as held:
        assert files(held.path) == {"config.json": b"{}", "model.safetensors": content(300_000, 1)}


def test_a_model_that_changes_in_the_storage_is_downloaded_anew_beside_the_old_one(tmp_path: Path) -> None:
    url, store = make_remote(tmp_path / "remote"), WeightStore(tmp_path / "cache")
    with store.hold(url) as old:
        make_remote(tmp_path / "remote", seed=1)
        os.utime(tmp_path / "remote" / "model.safetensors", ns=(1, 1))
        with store.hold(url) as new:
            assert files(new.path)["model.safetensors"] == content(MIB, 1)
            assert files(old.path)["model.safetensors"] == content(MIB, 0)


def test_a_change_in_the_middle_of_a_download_is_never_taken_for_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url, real = make_remote(tmp_path / "remote"), objects.RemoteFolder.read

    def read(self: Any, name: str, start: int, end: int) -> bytes:
        if start == 128 << 10:
            make_remote(tmp_path / "remote", seed=1)
            os.utime(tmp_path / "remote" / "model.safetensors", ns=(5, 5))
        return real(self, name, start, end)

    monkeypatch.setattr(objects.RemoteFolder, "read", read)
    with pytest.raises(RunError, match="changed while it was downloaded"):
        WeightStore(tmp_path / "cache").hold(url)
    monkeypatch.setattr(objects.RemoteFolder, "read", real)
    with WeightStore(tmp_path / "cache").hold(url) as held:
        assert files(held.path) == wanted(tmp_path / "remote")


@pytest.mark.parametrize("verify", [False, True])
def test_a_damaged_file_is_seen_and_downloaded_again_alone(tmp_path: Path, reads: list[tuple[str, int, int]], verify: bool) -> None:
    url, store = make_remote(tmp_path / "remote"), WeightStore(tmp_path / "cache")
    with store.hold(url) as held:
        path = held.path / "model.safetensors"
    status = path.stat()
    with path.open("r+b") as file:
        file.seek(1000)
        file.write(b"\0\0\0\0")
    if verify:  # The modification time is wrong.
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
        with store.hold(url) as held:
            assert path.read_bytes() != content(MIB, 0)
    reads.clear()
    with store.hold(url, verify=verify) as held:
        assert files(held.path) == wanted(tmp_path / "remote")
    assert {name for name, _, _ in reads} == {"model.safetensors"}


def test_digests_that_the_folder_publishes_are_checked(tmp_path: Path) -> None:
    url = make_remote(tmp_path / "remote")
    right = hashlib.sha256(content(MIB, 0)).hexdigest()
    (tmp_path / "remote" / "SHA256SUMS").write_text(f"{right}  model.safetensors\n")
    with WeightStore(tmp_path / "cache").hold(url) as held:
        assert files(held.path)["model.safetensors"] == content(MIB, 0)
    (tmp_path / "remote" / "SHA256SUMS").write_text(f"{'0' * 64} *./model.safetensors\n")
    with pytest.raises(RunError, match="does not have the sha256 digest that its folder publishes"):
        WeightStore(tmp_path / "cache").hold(url)


def test_the_digests_of_an_exported_model_are_checked(tmp_path: Path) -> None:
    make_remote(tmp_path / "remote")
    write_manifest(tmp_path / "remote")
    with WeightStore(tmp_path / "cache").hold(f"file://{tmp_path / 'remote'}") as held:
        assert files(held.path) == wanted(tmp_path / "remote")
    (tmp_path / "remote" / "model.safetensors").write_bytes(content(MIB, 7))
    with pytest.raises(RunError, match="xxh3_128 digest"):
        WeightStore(tmp_path / "cache").hold(f"file://{tmp_path / 'remote'}")


def test_a_storage_that_cannot_be_reached_leaves_the_copy_that_was_used_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url, store = make_remote(tmp_path / "remote"), WeightStore(tmp_path / "cache")
    for seed in range(2):
        make_remote(tmp_path / "remote", seed=seed)
        with store.hold(url) as held:
            newest = held.path

    def unreachable(self: Any) -> Any:
        raise RunError(f"'{self.url}' cannot be read: connection refused")

    monkeypatch.setattr(objects.RemoteFolder, "list", unreachable)
    with pytest.warns(UserWarning, match=r"connection refused; using the copy in"), store.hold(url) as held:
        assert held.path == newest and files(held.path)["model.safetensors"] == content(MIB, 1)
    with pytest.raises(RunError, match="connection refused"):
        store.hold(url + "-other")
    with pytest.raises(RunError, match="connection refused"):
        WeightStore(tmp_path / "nothing").hold(url)


# -- room --------------------------------------------------------------------------------------------------------------


def test_what_was_used_longest_ago_goes_first_and_what_is_in_use_never(tmp_path: Path) -> None:
    urls = [make_remote(tmp_path / name, seed=i) for i, name in enumerate("abcd")]
    store = WeightStore(tmp_path / "cache", max_bytes=3 * MIB + 5000)
    paths = []
    for url in urls[:3]:
        with store.hold(url) as held:
            paths.append(held.path)
    with store.hold(urls[0]):  # The oldest is used again, and is in use while the next one arrives.
        with store.hold(urls[3]) as last:
            assert [path.exists() for path in [*paths, last.path]] == [True, False, True, True]
        with store.hold(urls[2]), store.hold(urls[3]), pytest.raises(UserError, match=r"models in use have .*: raise its size"):
            store.hold(urls[1])
    with pytest.raises(UserError, match="the weight cache may hold 1000"):
        WeightStore(tmp_path / "cache", max_bytes=1000).hold(urls[1])
    with store.hold(urls[1]) as held:
        assert files(held.path)["model.safetensors"] == content(MIB, 1)


def test_a_full_disk_is_one_line_and_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url, store = make_remote(tmp_path / "remote"), WeightStore(tmp_path / "cache")
    real = download._in_order

    def full(*given: Any) -> Any:
        ranges = real(*given)
        yield next(ranges)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(download, "_in_order", full)
    with pytest.raises(UserError, match=r"no space left for 'file://.*name another folder") as caught:
        store.hold(url)
    assert "\n" not in str(caught.value) and [path.name for path in (tmp_path / "cache").iterdir()] == ["locks"]
    monkeypatch.undo()
    monkeypatch.setattr("tandem.model.weight_store.store.free_bytes", lambda folder: 1000)
    with pytest.raises(UserError, match="no space left"):
        store.hold(url)


# -- processes ---------------------------------------------------------------------------------------------------------

CHILD = """
import json, sys, time
from tandem.model.weight_store import WeightStore, download, objects
download.RANGE_BYTES, download.SAFE_BYTES = 64 << 10, 256 << 10
count, real = [0], objects.RemoteFolder.read
def read(self, name, start, end):
    time.sleep(float(sys.argv[3]))
    count[0] += end - start
    return real(self, name, start, end)
objects.RemoteFolder.read = read
held = WeightStore(sys.argv[2]).hold(sys.argv[1])
print(json.dumps({"bytes": count[0], "path": str(held.path)}), flush=True)
"""


def child(url: str, cache: Path, pause_s: float) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", textwrap.dedent(CHILD), url, str(cache), str(pause_s)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_two_starts_at_once_share_one_download(tmp_path: Path) -> None:
    url = make_remote(tmp_path / "remote", size=4 * MIB)
    children = [child(url, tmp_path / "cache", 0.02) for _ in range(3)]
    results = [json.loads(process.communicate(timeout=60)[0]) for process in children]
    total = sum(map(len, wanted(tmp_path / "remote").values()))
    assert sorted(result["bytes"] for result in results) == [0, 0, total]
    assert all(files(Path(result["path"])) == wanted(tmp_path / "remote") for result in results)


def test_a_start_that_is_killed_leaves_a_beginning_that_the_next_goes_on_from(
    tmp_path: Path, reads: list[tuple[str, int, int]]
) -> None:
    url = make_remote(tmp_path / "remote", size=8 * MIB)
    process = child(url, tmp_path / "cache", 0.03)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        (entry,) = list((tmp_path / "cache").glob("remote-*")) or [tmp_path]
        manifest = read_manifest(entry)
        if manifest is not None and manifest.part is not None and manifest.part.size_bytes >= MIB:
            break
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert manifest is not None and not manifest.is_complete
    # Bytes that a crash of the machine may leave behind the verified prefix are not trusted.
    with (entry / "part").open("ab") as file:
        file.write(b"\0" * 100_000)
    with WeightStore(tmp_path / "cache").hold(url) as held:
        assert files(held.path) == wanted(tmp_path / "remote")
    starts = [start for name, start, _ in reads if name == "model.safetensors"]
    assert min(starts) >= MIB and "config.json" not in {name for name, _, _ in reads}


def test_a_beginning_that_is_not_what_it_was_is_not_gone_on_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url, real = make_remote(tmp_path / "remote"), objects.RemoteFolder.read

    def broken(self: Any, name: str, start: int, end: int) -> bytes:
        if start >= 512 << 10:
            raise RunError("the line is cut")
        return real(self, name, start, end)

    monkeypatch.setattr(objects.RemoteFolder, "read", broken)
    with pytest.raises(RunError, match="the line is cut"):
        WeightStore(tmp_path / "cache").hold(url)
    monkeypatch.setattr(objects.RemoteFolder, "read", real)
    (part,) = (tmp_path / "cache").glob("*/part")
    part.write_bytes(b"\1" * part.stat().st_size)
    with WeightStore(tmp_path / "cache").hold(url) as held:
        assert files(held.path) == wanted(tmp_path / "remote")


# -- bad input ---------------------------------------------------------------------------------------------------------


def test_a_range_is_read_again_after_a_fault_that_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fsspec.implementations.local import LocalFileSystem

    url, failures, real = make_remote(tmp_path / "remote"), [0], LocalFileSystem.cat_file

    def flaky(self: Any, path: str, start: int | None = None, end: int | None = None, **more: Any) -> bytes:
        failures[0] += 1
        if failures[0] % 3 == 1:
            raise TimeoutError("slow")
        data: bytes = real(self, path, start=start, end=end, **more)
        return data[:-1] if failures[0] % 3 == 2 else data

    monkeypatch.setattr(LocalFileSystem, "cat_file", flaky)
    monkeypatch.setattr(download, "STREAMS", 1)
    with WeightStore(tmp_path / "cache").hold(url) as held:
        assert files(held.path) == wanted(tmp_path / "remote")


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("file:///no/such/folder", "'file:///no/such/folder' does not exist"),
        ("file:///usr/lib", "has no config.json"),
        ("nonsense://x/y", "cannot be read: Protocol not known: nonsense"),
    ],
)
def test_an_address_without_a_model_is_one_line(tmp_path: Path, url: str, words: str) -> None:
    with pytest.raises(UserError, match=re.escape(words)) as caught:
        WeightStore(tmp_path).hold(url)
    assert "\n" not in str(caught.value)


def test_storage_without_its_library_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    monkeypatch.delitem(_registry, "s3", raising=False)
    with pytest.raises(UserError, match=r"pip install 'tandem-rl\[s3\]'"):
        WeightStore(tmp_path).hold("s3://bucket/model")


def test_a_cache_that_cannot_be_written_or_has_no_size_is_refused(tmp_path: Path) -> None:
    url = make_remote(tmp_path / "remote")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"weight cache .* cannot be written"):
        WeightStore(tmp_path / "file").hold(url)
    with pytest.raises(UserError, match="size is -1"):
        WeightStore(tmp_path, max_bytes=-1)


def test_an_address_is_told_from_a_path() -> None:
    assert is_remote("s3://bucket/model") and is_remote("file:///x")
    assert not is_remote("runs/x/model") and not is_remote("./s3:/x") and not is_remote(Path("s3://x"))


@pytest.mark.full
def test_starts_that_are_killed_at_any_moment_come_to_the_right_model_in_the_end(tmp_path: Path) -> None:
    """Forty starts at random moments, two at a time, all killed except the last: never a wrong byte, and little is downloaded again."""
    rng = random.Random(0)
    urls = [make_remote(tmp_path / name, size=6 * MIB, seed=i) for i, name in enumerate("ab")]
    for _ in range(20):
        children = [child(rng.choice(urls), tmp_path / "cache", 0.005) for _ in range(2)]
        time.sleep(rng.uniform(0.1, 0.9))
        for process in children:
            process.kill()
            process.communicate()
    for name, url in zip("ab", urls, strict=True):
        with WeightStore(tmp_path / "cache").hold(url, verify=True) as held:
            assert files(held.path) == wanted(tmp_path / name)

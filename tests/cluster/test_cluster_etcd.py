"""The etcd that a job starts for its run lets in the run alone, and leaves nothing behind."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from etcd_server import WHY_SKIPPED, program

from tandem.cluster import etcd_places, etcd_process
from tandem.cluster.etcd_process import USER, own_etcd
from tandem.cluster.launch.addresses import own_address
from tandem.cluster.launch.slurm.addresses import address_of
from tandem.config.coordination import CoordinationConfig
from tandem.config.load import apply_overrides
from tandem.runtime.coordination.etcd import EtcdStore
from tandem.runtime.rpc.credentials import write_credential
from tandem.types import RunError, UserError


@pytest.mark.skipif(program() is None, reason=WHY_SKIPPED)
def test_the_etcd_of_a_run_asks_for_its_password_and_shows_its_own_keys_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    password = tmp_path / "a password"
    write_credential(password, "ab" * 32)
    with own_etcd("127.0.0.1", password, tmp_path / "etcd.log", "/tandem/r/") as etcd:
        given = apply_overrides({}, etcd.overrides())["coordination"]
        config = CoordinationConfig(**{**given, "endpoints": tuple(given["endpoints"]), "deadline_s": 10.0})
        config.check()
        assert config.user == USER and config.password_file == str(password)
        store = EtcdStore(config, "/tandem/r/")
        store.put("key", b"value")
        entry = store.get("key")
        assert entry is not None and entry.value == b"value" and store.cluster_id == config.cluster_id
        store.close()
        with pytest.raises(UserError, match="asks for authentication"):
            EtcdStore(replace(config, user="", password_file=""), "/tandem/r/").get("key")
        with pytest.raises((UserError, RunError), match="permission"):
            EtcdStore(config, "/tandem/s/").get("key")
        assert list(tmp_path.glob("tandem-*"))
        # What it was told outlives it.
        store = EtcdStore(replace(config, deadline_s=60.0), "/tandem/r/")
        (process,) = [int(path.parent.name) for path in Path("/proc").glob("[0-9]*/cmdline") if f"--data-dir={tmp_path}/".encode() in read(path)]
        os.kill(process, signal.SIGKILL)
        store.put("other", b"later")
        assert {entry.key: entry.value for entry in store.list("")} == {"key": b"value", "other": b"later"}
        store.close()
    assert list(tmp_path.glob("tandem-*")) == []
    with pytest.raises(RunError):
        EtcdStore(replace(config, deadline_s=1.0), "/tandem/r/").get("key")


@pytest.mark.full
@pytest.mark.skipif(program() is None, reason=WHY_SKIPPED)
def test_an_etcd_whose_disk_is_full_goes_on_elsewhere_with_what_it_had_and_one_without_a_place_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    password, disks = tmp_path / "a password", [tmp_path / name for name in ("temporary", "shared")]
    write_credential(password, "ab" * 32)
    said, lost = list[str](), list[str]()
    with contextlib.ExitStack() as stack:
        for disk in disks:
            disk.mkdir()
            if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=320m", "tmpfs", disk], capture_output=True).returncode:
                pytest.skip("no file system can be mounted here (it needs root), so a full disk is NOT tested")
            stack.callback(subprocess.run, ["umount", "-l", disk], check=True)
        monkeypatch.setattr("tempfile.tempdir", str(disks[0]))
        monkeypatch.setattr(etcd_places, "MEMORY", tmp_path / "none")
        monkeypatch.setattr(etcd_process, "LOST_S", 3.0)
        # Of a job that was killed.
        (disks[1] / "etcd-0a" / "etcd").mkdir(parents=True)
        with own_etcd("127.0.0.1", password, tmp_path / "etcd.log", "/tandem/r/", shared=disks[1], say=said.append, lost=lost.append) as etcd:
            given = apply_overrides({}, etcd.overrides())["coordination"]
            store = EtcdStore(CoordinationConfig(**{**given, "endpoints": tuple(given["endpoints"]), "deadline_s": 60.0}), "/tandem/r/")
            store.put("key", b"value")
            fill_and_kill(disks[0])
            store.put("other", b"later")
            assert {entry.key: entry.value for entry in store.list("")} == {"key": b"value", "other": b"later"}
            store.close()
            ends = time.monotonic() + 60
            while not lost:
                # Its log has room for some more entries.
                assert time.monotonic() < ends
                fill_and_kill(disks[1])
                time.sleep(0.05)
        assert said == [f"the disk of {disks[0]} is full: the etcd of the run goes on in {disks[1]}"]
        assert lost == [
            f"the etcd of the run cannot run on this node: the disk of {disks[1]} is full, and no other place here has room; see '{tmp_path / 'etcd.log'}', "
            "then resume the run"
        ]
        assert [path.name for disk in disks for path in disk.iterdir()] == ["fill", "fill"], "nothing is left behind"


def test_a_disk_without_a_limit_has_room_for_etcd_until_its_folder_is_removed(small_disk: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    disk = small_disk("0")
    monkeypatch.setattr("tempfile.tempdir", str(disk))
    with contextlib.closing(etcd_places.EtcdPlaces(None)) as places:
        data = places.begin()
        assert data.is_relative_to(disk) and places.trouble() == "" == places.move()
        data.parent.rmdir()
        assert places.trouble() == f"{disk}: No such file or directory"


def fill_and_kill(disk: Path) -> None:
    """Leaves no room on ``disk``, and kills the etcd whose data is there."""
    if not (disk / "fill").exists():
        subprocess.run(["dd", "if=/dev/zero", f"of={disk}/fill", "bs=1M"], capture_output=True)
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        if f"--data-dir={disk}/".encode() in read(path):
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(path.parent.name), signal.SIGKILL)


def read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def test_a_node_is_reached_at_the_address_from_which_it_reaches_the_first_one() -> None:
    assert address_of("127.0.0.1") == own_address("127.0.0.1") == address_of("localhost") == "127.0.0.1"
    with pytest.raises(RunError, match=r"the address of node .no-such-node\.invalid. is not known here"):
        address_of("no-such-node.invalid")

"""The etcd that a job starts for its run lets in the run alone, and leaves nothing behind."""

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from etcd_server import WHY_SKIPPED, program

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


def read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def test_a_node_is_reached_at_the_address_from_which_it_reaches_the_first_one() -> None:
    assert address_of("127.0.0.1") == own_address("127.0.0.1") == address_of("localhost") == "127.0.0.1"
    with pytest.raises(RunError, match=r"the address of node .no-such-node\.invalid. is not known here"):
        address_of("no-such-node.invalid")

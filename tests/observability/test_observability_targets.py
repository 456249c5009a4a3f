"""The targets folder: processes name themselves, and those that were killed are found out."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tandem.runtime.exposition.targets import DEAD, announced, check_folder, sweep
from tandem.types import UserError

HOLDER = """
import sys, time
from tandem.runtime.exposition.targets import announced
with announced(sys.argv[1], sys.argv[2], ("127.0.0.1", int(sys.argv[3])), {"job": "server"}):
    print("there", flush=True)
    sys.stdin.read()
"""


def holder(folder: Path, identity: str, port: int) -> "subprocess.Popen[str]":
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(folder), identity, str(port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "there\n"
    return process


def ports(folder: Path) -> list[str]:
    """Returns the ports of all targets that Prometheus reads."""
    return sorted(json.loads(file.read_text())[0]["targets"][0].partition(":")[2] for file in folder.glob("*.json"))


def test_a_target_is_what_prometheus_reads_and_is_gone_at_the_end(tmp_path: Path) -> None:
    with announced(tmp_path / "new", "run-/runs/a b", ("::1", 9100), {"job": "grpo", "run": "a"}, tls=True, path="/prefix") as file:
        labels = {"job": "grpo", "run": "a", "__scheme__": "https", "__metrics_path__": "/prefix/metrics"}
        assert json.loads(file.read_text()) == [{"targets": ["[::1]:9100"], "labels": labels}]
        sweep(tmp_path / "new", 0)
        assert list((tmp_path / "new").iterdir()) == [file], "a live one stays, and nothing else is there"
    assert list((tmp_path / "new").iterdir()) == []


def test_a_wildcard_address_is_named_by_the_machine(tmp_path: Path) -> None:
    with announced(tmp_path, "x", ("0.0.0.0", 1), {}) as file:
        assert not json.loads(file.read_text())[0]["targets"][0].startswith("0.0.0.0")


def test_a_target_whose_process_was_killed_is_marked_then_removed(tmp_path: Path) -> None:
    killed, alive = holder(tmp_path, "a", 1001), holder(tmp_path, "b", 1002)
    try:
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        sweep(tmp_path)
        assert ports(tmp_path) == ["1001", "1002"], "Prometheus still sees that it does not answer"
        (dead,) = tmp_path.glob(f"*{DEAD}")
        sweep(tmp_path)
        os.utime(dead, (time.time() - 181, time.time() - 181))
        sweep(tmp_path)
        assert ports(tmp_path) == ["1002"]
    finally:
        for each in (killed, alive):
            each.communicate()
    assert ports(tmp_path) == []


def test_who_comes_back_takes_the_place_of_its_dead_self_at_once(tmp_path: Path) -> None:
    killed = holder(tmp_path, "a", 1001)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    sweep(tmp_path)
    other = holder(tmp_path, "b", 1002)
    with announced(tmp_path, "a", ("127.0.0.1", 1003), {}):
        assert ports(tmp_path) == ["1002", "1003"]
    other.communicate()


def test_a_folder_that_cannot_be_written_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"targets folder '.*' cannot be written") as refused:
        check_folder(tmp_path / "file" / "targets")
    assert "\n" not in str(refused.value)

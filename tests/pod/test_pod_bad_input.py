"""What keeps a pod from starting: one clear line each, before work, and nothing is left: no process, no shared memory, no key in etcd."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from etcd_server import WHY_SKIPPED, EtcdServer, free_ports, program
from pod_runs import RECIPE, PodRun

from tandem.config.recipe import load_config
from tandem.jobs.start import dry_run
from tandem.runtime.coordination.etcd import EtcdStore
from tandem.types import UserError

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounts another /dev/shm, which needs root")


def refused(run: PodRun, *arguments: str, mount: str = "", status: int = 1) -> str:
    """Returns the one line with which the command refuses; in a mount namespace of its own, where ``mount`` is run first."""
    command = [sys.executable, "-m", "tandem.cli.main", "train", str(RECIPE), f"--run.directory={run.parent}", f"--run.name={run.name}", *arguments]
    if mount:
        command = ["unshare", "--mount", "sh", "-c", f'{mount} && exec "$@"', "sh", *command]
    run.parent.mkdir(parents=True, exist_ok=True)
    (run.parent / "rewards.py").write_bytes((RECIPE.parent / "rewards.py").read_bytes())
    run.marks.append(f"bad-input-{time.monotonic_ns()}")
    done = subprocess.run(command, cwd=run.parent, env={**os.environ, "TANDEM_POD_TEST": run.marks[-1]}, capture_output=True, text=True, timeout=300)
    assert done.returncode == status, done.stdout + done.stderr
    (line,) = done.stderr.strip().splitlines()
    assert run.left_behind() == []
    return line


@pytest.mark.parametrize(
    "settings, line",
    [
        (["--pods.count=2"], r"--inline is one process and this run has 2 pods; leave --inline out or set pods\.count to 1"),
        (["--parallel.data=2"], r"--inline is one process and this run has 2 ranks; leave --inline out or set parallel to 1"),
    ],
    ids=["pods", "ranks"],
)
def test_a_dry_run_refuses_inline_as_the_run_does(settings: list[str], line: str) -> None:
    with pytest.raises(UserError, match=line):
        dry_run(load_config(RECIPE, settings), RECIPE, inline=True)


@pytest.mark.full
def test_inline_with_pods_makes_no_folder(tmp_path: Path) -> None:
    run = PodRun(tmp_path / "runs")
    assert "--inline is one process and this run has 2 pods" in refused(run, "--inline", "--pods", "2", status=2)
    assert not run.directory.exists()


@pytest.mark.full
@needs_root
@pytest.mark.parametrize(
    "options, line",
    [
        ("size=100k", "MiB of shared memory for its weights and /dev/shm has 0.1 MiB free; make /dev/shm larger (in a container: --shm-size)"),
        ("ro,size=10m", "shared memory in /dev/shm cannot be created: Read-only file system; mount a tmpfs there that this user can write"),
    ],
    ids=["small", "read-only"],
)
def test_shared_memory_that_does_not_do_is_named_with_the_size_before_work(options: str, line: str, tmp_path: Path) -> None:
    run = PodRun(tmp_path / "runs")
    assert line in refused(run, mount=f"mount -t tmpfs -o {options} tmpfs /dev/shm")
    assert not run.directory.exists()


@pytest.mark.full
@needs_root
def test_a_folder_of_runs_without_permission_is_named(tmp_path: Path) -> None:
    run = PodRun(tmp_path / "runs")
    run.parent.mkdir()
    (run.parent / "rewards.py").write_text("")
    line = refused(PodRun(tmp_path / "elsewhere"), f"--run.directory={run.parent}", mount=f"mount -t tmpfs -o ro tmpfs {run.parent}", status=2)
    assert "where a folder cannot be made: Read-only file system" in line


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[EtcdServer]:
    server = EtcdServer(tmp_path / "etcd").start()
    yield server
    server.kill()


@pytest.mark.full
def test_an_etcd_that_does_not_answer_is_named(tmp_path: Path) -> None:
    run, url = PodRun(tmp_path / "runs"), f"http://127.0.0.1:{free_ports(1)[0]}"
    line = refused(run, "--coordination", "etcd", f"--coordination.endpoints=[{url}]", "--coordination.deadline_s=1")
    assert f"etcd at {url} did not answer within 1 s" in line and "coordination.endpoints" in line
    assert not run.directory.exists()


@pytest.mark.full
@pytest.mark.skipif(program() is None, reason=WHY_SKIPPED)
def test_keys_of_another_run_in_etcd_are_named_and_stay_as_they_are(own_server: EtcdServer, tmp_path: Path) -> None:
    run = PodRun(tmp_path / "runs")
    with closing(EtcdStore(own_server.config(), "/tandem/run/")) as store:
        store.put("leader", b'{"run": "another", "host": "elsewhere", "pid": 7, "directory": "/there"}')
        before = store.list("")
        line = refused(run, "--coordination", "etcd", f"--coordination.endpoints=[{own_server.url}]", status=2)
        assert "in etcd are those of another run, which process 7 on elsewhere leads with /there; choose another run.name or coordination.prefix" in line
        assert store.list("") == before


@pytest.mark.full
def test_a_second_controller_in_the_folder_of_a_run_is_refused(tmp_path: Path) -> None:
    run = PodRun(tmp_path / "runs")
    first = run.begin("train", str(RECIPE), f"--run.directory={run.parent}", "--run.name=run", "--run.max_steps=500")
    try:
        while not (run.directory / "journal.sqlite").exists():
            time.sleep(0.1)
        second = subprocess.run([sys.executable, "-m", "tandem.cli.main", "resume", str(run.directory)], capture_output=True, text=True, timeout=120)
        assert second.returncode == 2 and len(second.stderr.strip().splitlines()) == 1
        assert f"is in use by process {first.pid}; wait for it, stop it, or choose another run.name" in second.stderr
        assert first.poll() is None
    finally:
        first.kill()
        first.communicate()
    assert run.left_behind() == []

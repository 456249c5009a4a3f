"""A run of this machine: where it is, what it says, and its stop."""

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from launched_runs import TINY, LaunchedRuns

from tandem.cli.main import main
from tandem.cluster.launch.log_files import follow
from tandem.cluster.launch.record import FOLDER, Record, read_record, write_record, write_secrets
from tandem.types import RunError

Here = Callable[..., str]
LONG = ("--run.max_steps=1000000", "--checkpoint.every_steps=100000")


def a_run(folder: Path) -> Path:
    """Returns the folder of a run of which nothing has happened."""
    (folder / "logs").mkdir(parents=True)
    (folder / "config.yaml").write_text(TINY.read_text())
    return folder


def test_a_folder_that_is_no_run_and_a_run_that_does_not_run_are_refused_in_one_line(here: Here, tmp_path: Path) -> None:
    for command in ("status", "logs", "cancel", "resume"):
        assert here(command, tmp_path) == f"'{tmp_path}' is not a run: it has no config.yaml; name a folder under runs/"
    run = a_run(tmp_path / "run")
    assert here("status", run) == f"{run}: stopped\n0 of at most 4 steps, no checkpoint yet\n"
    assert here("cancel", run) == f"the run in '{run}' is not running on this machine, so there is nothing to cancel"
    assert here("logs", run).startswith(f"the run in '{run}' has written nothing yet;")
    (run / "logs" / "controller.log").write_text("one\n")
    (run / "logs" / "pods" / "n2").mkdir(parents=True)
    (run / "logs" / "pods" / "n2" / "rollout_shim.log").write_text("two\n")
    assert here("logs", run, "--role", "tariner") == f"--role is 'tariner', which has no log in '{run}/logs'; there are controller, pods/n2/rollout_shim"
    assert here("logs", run) == "one\n" and here("logs", run, "--role", "pods/n2/rollout_shim") == "two\n"


def test_of_several_runs_one_that_cannot_be_read_hides_no_other(here: Here, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, last, none = a_run(tmp_path / "first"), a_run(tmp_path / "last"), tmp_path / "none"
    none.mkdir()
    (last / "logs" / "controller.log").write_text("one\n")
    said = {
        "status": f"{first}: stopped\n0 of at most 4 steps, no checkpoint yet\n{last}: stopped\n0 of at most 4 steps, no checkpoint yet\n",
        "cancel": f"{first}: not running\n{last}: not running\n", "logs": f"== {first}\n== {none}\n== {last}\none\n",
    }  # fmt: skip
    for command, out in said.items():
        assert main([command, *map(str, (first, none, last))]) == 2
        assert capsys.readouterr() == (out, f"tandem: '{none}' is not a run: it has no config.yaml; name a folder under runs/\n")


def test_a_record_is_for_its_user_alone_and_a_damaged_or_foreign_one_is_named(here: Here, tmp_path: Path) -> None:
    run = a_run(tmp_path / "run")
    record = Record("slurm", job="12", starts_etcd=True, folder="/shared", overrides=("--slurm.time=0-01:00:00",))
    write_record(run, record)
    write_secrets(run)
    assert read_record(run) == record
    assert (run / FOLDER).stat().st_mode & 0o077 == 0 and all(path.stat().st_mode & 0o077 == 0 for path in (run / FOLDER).glob("*[!n]"))
    first = (run / FOLDER / "pods.secret").read_text()
    write_secrets(run)
    assert (run / FOLDER / "pods.secret").read_text() == first and len(first) == 64
    path = run / FOLDER / "record.json"
    path.write_text(path.read_text().replace('"slurm"', '"torchx"'))
    assert here("status", run) == f"'{run}' was launched on torchx by another version of Tandem; use that version"
    path.write_text("{")
    with pytest.raises(RunError, match="is damaged"):
        read_record(run)


def test_following_shows_all_that_is_written_until_the_end_through_a_renamed_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem.cluster.launch.log_files._LOOK_S", 0.02)
    monkeypatch.setattr("tandem.cluster.launch.log_files._ASK_S", 0.02)
    path, is_active = tmp_path / "a.log", True

    def write() -> None:
        nonlocal is_active
        for line in ("one\n", "two\n"):
            with path.open("a") as file:
                file.write(line)
            time.sleep(0.3)
        path.rename(tmp_path / "a.log.1")
        path.write_text("three\n")
        is_active = False

    writer = threading.Thread(target=write)
    writer.start()
    follow(lambda: [path], lambda: is_active)
    writer.join()
    assert capsys.readouterr().out == "one\ntwo\nthree\n"


@pytest.mark.full
def test_a_local_run_is_shown_followed_cancelled_and_resumed(tmp_path: Path) -> None:
    runs = LaunchedRuns(tmp_path)
    run = runs.begin("train", TINY, "--run.name=here", *LONG)
    runs.wait_for_step("here", 3)
    status = runs.status("here")
    assert (status["state"], status["where"], status["launcher"]) == ("running", f"process {run.pid} on this machine", "local")
    follower = runs.begin("logs", "runs/here", "--follow")
    assert runs.tandem("cancel", "runs/here") == f"asked process {run.pid} to stop after its step, which it saves first\n"
    assert run.wait(60) == 130 and follower.wait(60) == 0
    status = runs.status("here")
    assert status["state"] == "stopped" and status["checkpoint"] == status["steps"] >= 3
    again = runs.begin("resume", "runs/here")
    runs.wait_for_step("here", status["steps"] + 3)
    assert runs.tandem("cancel", "runs/here", "--now").startswith(f"killed process {again.pid};")
    assert again.wait(60) == -9 and runs.status("here")["state"] == "stopped"
    steps = status["steps"] + 2
    runs.tandem("resume", "runs/here", f"--run.max_steps={steps}")
    runs.tandem("train", TINY, "--run.name=one", f"--run.max_steps={steps}", "--checkpoint.every_steps=100000")
    assert runs.model("here") == runs.model("one") and json.loads(runs.tandem("status", "runs/here", "--json"))["state"] == "finished"


@pytest.mark.full
def test_ranks_that_are_not_forked_end_with_the_same_weights(tmp_path: Path) -> None:
    runs = LaunchedRuns(tmp_path)
    for name, forks in (("forked", "true"), ("alone", "false")):
        runs.tandem("train", TINY, f"--run.name={name}", "--parallel.data=2", f"--machine.fork_workers={forks}")
    assert runs.model("forked") == runs.model("alone")
    # The log of a fork server is there alone where one was started.
    assert [[path.name for path in (runs.directory(name) / "logs").glob("*-forks.out")] for name in ("forked", "alone")] == [["rank-0-forks.out"], []]

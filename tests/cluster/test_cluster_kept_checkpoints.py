"""What a node keeps of a run's checkpoints is told from what other runs have there, and from what a process uses."""

import json
import os
import shutil
import socket
from pathlib import Path

import pytest

from tandem.cluster.launch.slurm import kept
from tandem.cluster.launch.slurm.kept import KeptHere, kept_on_node
from tandem.config.checkpoint import CheckpointConfig
from tandem.runtime.records.journal import Journal
from tandem.runtime.records.local_checkpoints import kept_name
from tandem.trainer.checkpoint.memory.kept_files import KeptFiles, Owner, open_folder


def make_run(path: Path) -> tuple[Path, str]:
    """Makes the folder of a run, and returns it with the name under which nodes keep its checkpoints."""
    path.mkdir(parents=True)
    (path / "config.yaml").touch()
    with Journal(path / "journal.sqlite") as journal:
        return path, kept_name(path, journal)


def keep(parent: Path, run: Path, name: str) -> int:
    """Keeps a checkpoint of ``run`` in memory and on disk. Returns the descriptor of the lock of its keeper."""
    folder, lock = open_folder(parent, run.name, "n1")
    KeptFiles(folder).set_owner(Owner(name, 1))
    (folder / "step-5").mkdir()
    (parent / name / "step-5").mkdir(parents=True)
    return lock


def there(parent: Path) -> list[str]:
    return sorted(path.name for path in parent.iterdir())


def test_a_run_without_a_job_is_removed_by_the_next_one_but_not_what_a_process_or_another_run_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parent, jobs = tmp_path / "memory", dict[Path, bool]()
    monkeypatch.setattr(kept, "_may_go_on", lambda directory: jobs[directory])
    config = CheckpointConfig(memory_every_steps=1, memory_directory=str(parent))
    (ended, of_ended), (works, of_works), (own, of_own) = (make_run(tmp_path / name / name) for name in ("ended", "works", "own"))
    locks = {run: keep(parent, run, name) for run, name in ((ended, of_ended), (works, of_works), (own, of_own))}
    for run in (ended, works, own):
        KeptHere(parent).mark(run)
    jobs |= {ended: False, works: True}
    with kept_on_node(config, own, socket.gethostname()):
        assert "ended" in there(parent), "its keeper lives"
        assert of_ended not in there(parent)
    os.close(locks[ended])
    with kept_on_node(config, own, "n1"):
        assert there(parent) == sorted([f".tandem-runs-{os.getuid()}", "works", of_works, "own", of_own])
    assert capsys.readouterr().out.endswith(f"node n1: removed the checkpoints in {parent} of '{ended}', which has no job any more\n")
    for run in (works, own):
        os.close(locks[run])
        KeptHere(parent).remove(run)
    assert there(parent) == [], "the marks too"


def test_a_run_of_the_same_name_elsewhere_keeps_what_it_has(tmp_path: Path) -> None:
    parent = tmp_path / "memory"
    (one, of_one), (two, of_two) = (make_run(tmp_path / name / "sort") for name in ("a", "b"))
    os.close(keep(parent, one, of_one))
    for run in (one, two):
        KeptHere(parent).mark(run)
    assert KeptHere(parent).remove(two) == [] and there(parent / "sort") == ["node-n1"]
    assert [path.name for path in KeptHere(parent).others(two)] == ["sort"]
    # The keeper has the checkpoints of the run whose ranks have called it last.
    folder = parent / "sort" / "node-n1"
    assert json.loads((folder / "owner.json").read_text())["of"] == of_one != of_two
    assert {path.name for path in KeptHere(parent).remove(one)} == {"node-n1", of_one} and there(parent) == []


def test_what_a_run_whose_folder_was_removed_has_left_is_found_by_its_name(tmp_path: Path) -> None:
    parent = tmp_path / "memory"
    run, name = make_run(tmp_path / "runs" / "sort")
    os.close(keep(parent, run, name))
    (parent / "sort-of").mkdir()
    KeptHere(parent).mark(run)
    shutil.rmtree(run)
    assert {path.name for path in KeptHere(parent).remove(run)} == {"node-n1", name} and there(parent) == ["sort-of"]

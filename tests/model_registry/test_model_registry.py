"""The registry: versions, lineage, stages. Tandem's registry and a real MLflow (if installed) behave alike."""

import json
import multiprocessing
import shutil
import socket
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from tandem.cli.main import main
from tandem.config.recipe import load_config
from tandem.config.registry import RegistryConfig
from tandem.jobs.registered import Registered
from tandem.model_registry.local import LocalRegistry
from tandem.model_registry.open import open_registry
from tandem.model_registry.versions import NewVersion, Registry, differences, find
from tandem.runtime.callback import Callback
from tandem.runtime.records.journal import Journal
from tandem.storage.digests import bytes_digest
from tandem.trainer.checkpoint.format.manifest import Manifest, marker_of, read_manifest
from tandem.types import RunError, UserError

RECIPE = {"algorithm": {"name": "pretrain"}, "trainer": {"learning_rate": 0.1}}


def entry(tmp_path: Path, step: int, name: str = "small", **changed: object) -> NewVersion:
    folder = tmp_path / "run" / name / f"step-{step}"
    folder.mkdir(parents=True, exist_ok=True)
    content = Manifest(step, {}, {"of": f"{name} {step}"}, (), ()).to_json()
    (folder / "MANIFEST.json").write_bytes(content)
    (folder / "COMMIT").write_bytes(marker_of(content))
    metrics = {"train/loss": 3.0 - step / 10}
    made = NewVersion(name, str(folder), bytes_digest(content), step, str(tmp_path / "run"), RECIPE, {"runs/text": "abc"}, "", metrics)
    return replace(made, **changed)  # type: ignore[arg-type]


@pytest.fixture(params=["local", "mlflow"])
def registry(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Registry]:
    if request.param == "mlflow":
        pytest.importorskip("mlflow", reason="mlflow is not installed, so that its registry works is not shown here")
    config = RegistryConfig(path=str(tmp_path / "registry")) if request.param == "local" else RegistryConfig(uri=f"sqlite:///{tmp_path}/mlflow.db")
    found = open_registry(config, create=True)
    yield found
    found.close()


def test_versions_are_numbered_by_model_and_keep_their_lineage(registry: Registry, tmp_path: Path) -> None:
    entries = [entry(tmp_path, 1), entry(tmp_path, 2), entry(tmp_path, 1, "other")]
    assert [registry.register(made).number for made in entries] == [1, 2, 1]
    assert registry.register(entries[1]).number == 2, "the same bytes are the same version"
    assert [v.reference for v in registry.versions()] == ["other/1", "small/1", "small/2"]
    found = find(registry, "small")
    assert found.entry == entries[1] and found.stage == "none" and found.created_s > 1.7e9
    assert find(registry, "small/1").entry == entries[0]


def test_production_has_one_version_and_the_former_is_archived(registry: Registry, tmp_path: Path) -> None:
    for step in (1, 2, 3):
        registry.register(entry(tmp_path, step))
    registry.promote(find(registry, "small/1"), "production")
    registry.promote(find(registry, "small/2"), "staging")
    assert find(registry, "small@production").number == 1
    registry.promote(find(registry, "small@staging"), "production")
    assert [v.stage for v in registry.versions("small")] == ["archived", "production", "none"]
    with pytest.raises(UserError, match="no version 'small@staging'"):
        find(registry, "small@staging")


NOWHERE = {
    "nix": "has no model 'nix'; it has small", "small/9": "has no version 'small/9'", "a/b": "names no version",
    "small@live": "the stage 'live' is not one of",
}  # fmt: skip


def test_reference_that_leads_nowhere_is_one_line(registry: Registry, tmp_path: Path) -> None:
    registry.register(entry(tmp_path, 1))
    for reference, said in NOWHERE.items():
        with pytest.raises(UserError) as caught:
            find(registry, reference)
        assert said in str(caught.value) and "\n" not in str(caught.value)


def test_differences_name_weights_recipe_data_and_metrics_and_nothing_that_is_the_same(tmp_path: Path) -> None:
    registry = LocalRegistry(tmp_path / "registry", create=True)
    left = registry.register(entry(tmp_path, 1))
    right = registry.register(
        entry(tmp_path, 2, recipe={"algorithm": {"name": "pretrain"}, "trainer": {"learning_rate": 0.2}}, data={"runs/text": "def"}, metrics={"x": 1.0})
    )
    assert [tuple(d) for d in differences(left, right)] == [
        ("weights", left.entry.digest, right.entry.digest), ("step", 1, 2), ("data runs/text", "abc", "def"),
        ("recipe trainer.learning_rate", 0.1, 0.2), ("metric train/loss", 2.9, None), ("metric x", None, 1.0),
    ]  # fmt: skip
    assert differences(left, left) == []


def test_promoted_version_survives_its_run_and_one_whose_files_are_gone_is_not_promoted(tmp_path: Path) -> None:
    registry = LocalRegistry(tmp_path / "registry", create=True)
    for step in (1, 2):
        registry.register(entry(tmp_path, step))
    registry.promote(find(registry, "small/1"), "staging")
    shutil.rmtree(tmp_path / "run")
    kept = find(registry, "small/1")
    assert read_manifest(Path(kept.entry.path))[0].step == 1 and str(tmp_path / "registry") in kept.entry.path
    with pytest.raises(UserError, match="no longer exist in"):
        registry.promote(find(registry, "small/2"), "production")
    assert [v.stage for v in registry.versions()] == ["staging", "none"]
    assert registry.promote(kept, "production").stage == "production"


def register_many(folder: Path, worker: int) -> None:
    registry = LocalRegistry(folder / "registry")
    for step in range(10):
        registry.register(NewVersion("small", "x", f"{worker}-{step}", step, "", {}, {}, ""))


def test_processes_that_enter_versions_at_once_get_numbers_of_their_own(tmp_path: Path) -> None:
    LocalRegistry(tmp_path / "registry", create=True).close()
    workers = [multiprocessing.get_context("fork").Process(target=register_many, args=(tmp_path, worker)) for worker in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0
    assert [v.number for v in LocalRegistry(tmp_path / "registry").versions()] == list(range(1, 31))


def test_damaged_registry_is_one_line(tmp_path: Path) -> None:
    LocalRegistry(tmp_path / "registry", create=True).close()
    (tmp_path / "registry" / "registry.sqlite").write_bytes(b"x" * 5000)
    for name in ("registry.sqlite-wal", "registry.sqlite-shm"):
        (tmp_path / "registry" / name).unlink(missing_ok=True)
    with pytest.raises(RunError, match=r"the model registry: .* is damaged") as caught:
        LocalRegistry(tmp_path / "registry")
    assert "\n" not in str(caught.value) and not isinstance(caught.value, sqlite3.Error)
    (tmp_path / "registry" / "registry.sqlite").write_bytes(b"")
    with pytest.raises(RunError, match="is empty"):
        LocalRegistry(tmp_path / "registry")


def test_two_registries_or_a_name_with_a_slash_are_refused() -> None:
    for config, said in ((RegistryConfig("a", "b"), "are both set"), (RegistryConfig("a", name="x/y"), "choose a name without")):
        with pytest.raises(UserError, match=said):
            config.check()


def test_commands_list_show_promote_and_compare(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    registry = LocalRegistry(tmp_path / "registry", create=True)
    for step in (1, 2):
        registry.register(entry(tmp_path, step))
    registry.close()
    where = ["--registry", str(tmp_path / "registry")]

    def said(*words: str) -> str:
        assert main(["models", *words, *where]) == 0
        return capsys.readouterr().out

    assert [line.split()[:4] for line in said("list").splitlines()[1:]] == [["small/1", "none", "1", "2.9000"], ["small/2", "none", "2", "2.8000"]]
    assert "HELD-OUT" not in said("list"), "no version has such a loss"
    assert "small/2 is in production" in said("promote", "small", "production")
    assert [json.loads(line)["stage"] for line in said("list", "small", "--json").splitlines()] == ["none", "production"]
    shown = json.loads(said("show", "small@production", "--json"))
    assert shown["version"] == 2 and shown["recipe"] == RECIPE and shown["data"] == {"runs/text": "abc"}
    assert "created by the run" in said("show", "small/1")
    assert json.loads(said("diff", "small/1", "small/2", "--json"))["differences"][1] == {"what": "step", "left": 1, "right": 2}
    assert "train/loss" in said("diff", "small/1", "small/2")
    for words, problem in ((["show", "nix"], "has no model 'nix'"), (["promote", "small/1", "live"], "the stage 'live'"), (["list", "nix"], "has no model")):
        assert main(["models", *words, *where]) == 2
        assert problem in capsys.readouterr().err


def test_versions_have_the_evaluation_of_their_own_step_and_no_earlier_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = load_config(Path(__file__).resolve().parents[2] / "recipes" / "pretrain.yaml", [f"registry.path={tmp_path / 'registry'}"])
    with Journal(tmp_path / "journal.sqlite") as journal, closing(Registered(recipe, tmp_path, journal, Callback())) as registered:
        for step, loss in ((0, 6.25), (4, 3.5)):
            journal.commit_evaluation(step, "held_out", {"loss": loss})
        for step in (2, 4):
            registered.enter(step, f"digest {step}", {"train/loss": 5.0 - step / 10})
    assert main(["models", "list", "--registry", str(tmp_path / "registry")]) == 0
    head, *rows = (line.split() for line in capsys.readouterr().out.splitlines())
    assert head[3:7] == ["TRAIN", "LOSS", "HELD-OUT", "LOSS"]
    assert [row[2:5] for row in rows] == [["2", "4.8000", "-"], ["4", "4.6000", "3.5000"]]


def harm(folder: Path) -> None:
    content = (folder / "MANIFEST.json").read_bytes()
    (folder / "MANIFEST.json").write_bytes(content.replace(b'"step": 1', b'"step": 3'))


def test_damaged_files_are_not_promoted(registry: Registry, tmp_path: Path) -> None:
    made = registry.register(entry(tmp_path, 1))
    harm(Path(made.entry.path))
    with pytest.raises(RunError, match=r"the files of 'small/1' in .* are damaged"):
        registry.promote(made, "production")
    other = Manifest(7, {}, {}, (), ()).to_json()
    (Path(made.entry.path) / "MANIFEST.json").write_bytes(other)
    (Path(made.entry.path) / "COMMIT").write_bytes(marker_of(other))
    with pytest.raises(RunError, match="holds another checkpoint than the one registered as 'small/1'"):
        registry.promote(made, "staging")
    assert [v.stage for v in registry.versions()] == ["none"]


def test_a_registry_means_the_same_from_any_folder_and_after_a_move(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    registry = LocalRegistry(Path("registry"), create=True)
    registry.promote(registry.register(entry(tmp_path, 1)), "production")
    registry.close()
    monkeypatch.chdir("/")
    (tmp_path / "registry").rename(tmp_path / "moved")
    moved = LocalRegistry(tmp_path / "moved")
    found = find(moved, "small@production")
    assert found.entry.path == str(tmp_path / "moved" / "models" / "small" / "1") and moved.promote(found, "staging").stage == "staging"
    moved.close()


def test_a_changed_row_of_the_registry_is_one_line_for_every_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    registry = LocalRegistry(tmp_path / "registry", create=True)
    for step in (1, 2):
        registry.register(entry(tmp_path, step))
    registry.close()
    path = tmp_path / "registry" / "registry.sqlite"
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE versions SET digest = 'abc' WHERE number = 2")
    for words in (["list"], ["show", "small"], ["promote", "small/1", "production"], ["verify"], ["diff", "small/1", "small/2"]):
        assert main(["models", *words, "--registry", str(tmp_path / "registry")]) == 1
        error = capsys.readouterr().err
        assert "is damaged: versions small/2: it does not have the digest" in error and len(error.splitlines()) == 1


def test_verify_names_the_state_of_every_version(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    registry = LocalRegistry(tmp_path / "registry", create=True)
    made = [registry.register(entry(tmp_path, step)) for step in (1, 2, 3)]
    registry.close()
    harm(Path(made[0].entry.path))
    shutil.rmtree(made[1].entry.path)
    assert main(["models", "verify", "--registry", str(tmp_path / "registry")]) == 1
    assert [line.split()[:2] for line in capsys.readouterr().out.splitlines()] == [["damaged", "small/1"], ["removed", "small/2"], ["ok", "small/3"]]
    assert main(["models", "verify", "small/3", "--registry", str(tmp_path / "registry"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["state"] == "ok"


def test_address_at_which_no_server_answers_is_refused_at_once_and_not_after_minutes() -> None:
    pytest.importorskip("mlflow", reason="mlflow is not installed, so that its registry works is not shown here")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: no other server can answer there
        address = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(RunError, match=f"no MLflow server answers at '{address}' .*; start it"):
            open_registry(RegistryConfig(uri=address), create=True)

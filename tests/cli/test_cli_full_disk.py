"""A full disk before and during a run, and two runs in one directory."""

import os
import resource
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers_cli import real

from tandem.config.model import NewModelConfig
from tandem.model.create_model import create_model
from tandem.runtime.process import temporary
from tandem.runtime.records.run_lock import RunLock


@pytest.fixture
def small_disk(small_disk: Callable[[str], Path]) -> Path:
    """A file system of 256 KiB."""
    return small_disk("256k")


def test_a_disk_too_small_for_the_run_is_refused_before_any_work(command, recipe, small_disk) -> None:
    done = command("train", recipe, f"--run.directory={small_disk / 'runs'}", "--model.create.hidden_size=128")
    assert "MiB are free; make room" in done.refusal(1)
    assert list(small_disk.iterdir()) == []


def test_a_full_folder_for_temporary_files_is_named_before_any_work(command, recipe, small_disk, monkeypatch) -> None:
    (small_disk / "full").write_bytes(bytes(os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_frsize - 4096))
    monkeypatch.setattr(tempfile, "tempdir", str(small_disk))
    for options in ((), ("--dry-run",)):
        message = command("train", recipe, *options).refusal(1)
        assert message.startswith(f"temporary files cannot be written: '{small_disk}': No space left on device; make room, or set TMPDIR")
    assert not (recipe.parent / "runs").exists()


def test_no_folder_for_temporary_files_at_all_is_refused_with_those_that_were_tried(command, recipe, monkeypatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/proc/none"])
    monkeypatch.setattr(temporary, "SYSTEM_FOLDERS", ())
    monkeypatch.setenv("TMPDIR", "/proc/none")
    for name in ("TEMP", "TMP"):
        monkeypatch.delenv(name, raising=False)
    message = command("train", recipe, "--dry-run").refusal(1)
    assert "No usable temporary directory found in ['/proc/none']; make room, or set TMPDIR" in message


@pytest.mark.parametrize(
    ("kibibytes", "inline"),
    [
        (1, True), (60, False), pytest.param(60, True, marks=pytest.mark.full),
        *(pytest.param(k, inline, marks=pytest.mark.full) for k in (5, 12, 20, 35, 90, 120) for inline in (True, False)),
    ],
)
def test_a_disk_that_takes_no_more_in_the_middle_of_a_run_ends_it_in_one_line(recipe, kibibytes, inline) -> None:
    limit = kibibytes * 1024

    def full() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    real("train", recipe, *["--inline"] * inline, before=full).refusal(1)
    runs = [path for path in (recipe.parent / "runs").glob("*/model") if path.is_dir()]
    assert runs == []


@pytest.mark.full
def test_a_run_that_a_full_disk_ended_goes_on_when_there_is_room(recipe) -> None:
    def full() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (60 * 1024, 60 * 1024))

    real("train", recipe, "--run.name=mine", "--inline", before=full).refusal(1)
    directory = recipe.parent / "runs" / "mine"
    done = real("resume", directory, "--inline")
    assert done.code == 0, done.err
    assert (directory / "model" / "model.safetensors").is_file()


@pytest.mark.full
def test_a_full_disk_ends_tokenizing_and_conversion_in_one_line_and_they_go_on_when_there_is_room(tmp_path) -> None:
    def full() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (3 * 1024, 3 * 1024))

    model = tmp_path / "model"
    create_model(NewModelConfig(hidden_size=32, num_hidden_layers=1, head_dim=8, characters="0123456789= "), 0, model)
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "a.txt").write_text("1234 " * 9000)
    tokens, megatron, tokenizer = tmp_path / "tokens", tmp_path / "megatron", tmp_path / "tokenizer"
    for arguments in (
        ("tokenize", tmp_path / "source", tokens, "--tokenizer", model),
        ("tokenize", tmp_path / "source", tokens, "--tokenizer", tokenizer, "--new-vocabulary", "300"),
        ("convert", model, megatron, "--to", "megatron"),
        ("convert", model, tmp_path / "copy"),
    ):
        said = real(*arguments, before=full).refusal(1)
        assert "File too large" in said or "could not write all of it" in said
        assert "'" + str(tmp_path) in said
    assert not megatron.exists() and not (tmp_path / "copy").exists() and not (tokenizer / "tokenizer.json").exists()
    done = real("tokenize", tmp_path / "source", tokens, "--tokenizer", model)
    assert done.code == 0, done.err


def test_a_second_run_in_a_directory_in_use_is_refused_with_its_holder(command, recipe) -> None:
    directory = recipe.parent / "runs" / "mine"
    directory.mkdir(parents=True)
    (directory / "config.yaml").write_text(recipe.read_text())
    before = sorted(path.name for path in directory.iterdir())
    with RunLock(directory):
        assert f"in use by process {os.getpid()}" in command("resume", directory).refusal()
        assert "use 'tandem resume" in command("train", recipe, "--run.name=mine").refusal()
    assert sorted(path.name for path in directory.iterdir()) == [*before, "lock"]


def test_resume_and_report_refuse_what_is_damaged(command, recipe, tmp_path) -> None:
    directory = tmp_path / "damaged"
    directory.mkdir()
    (directory / "config.yaml").write_text("model: [")
    assert "not valid YAML" in command("resume", directory).refusal()
    (directory / "journal.sqlite").write_bytes(b"no database" * 100)
    command("report", directory).refusal(1)
    (directory / "config.yaml").write_text(recipe.read_text())
    command("resume", directory).refusal(1)
    assert (directory / "journal.sqlite").read_bytes() == b"no database" * 100

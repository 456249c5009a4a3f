"""Nothing is trusted unverified: damage of a run's files is found before a resume uses it, and told where people look."""

import json
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import yaml
from pod_runs import PodRun, difference

from tandem.jobs.start import resume
from tandem.jobs.verify.resume_checks import check_records
from tandem.runtime.callback import Callback
from tandem.types import RunError

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from flips import Flip, check_changes_nothing, files_of, flipped, found_in, random_flips, try_flips


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> PodRun:
    """A run whose controller was killed in step 5, with checkpoints of steps 2 and 4 and a journal that is still in its write-ahead log."""
    run = PodRun(tmp_path_factory.mktemp("killed"))
    assert run.train("--run.trace_steps=[1]", "--fault", "controller:before:train:5").returncode == -9
    ends = time.monotonic() + 20
    while run.processes():
        assert time.monotonic() < ends
        time.sleep(0.05)
    return run


def copy_of(run: PodRun, folder: Path) -> PodRun:
    shutil.copytree(run.directory, folder / run.name)
    return PodRun(folder)


def sql(run: PodRun, statement: str) -> None:
    """Changes the journal as no process of a run does: past the chain."""
    with closing(sqlite3.connect(run.directory / "journal.sqlite")) as connection, connection:
        assert connection.execute(statement).rowcount > 0


class Messages(Callback):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def message(self, text: str) -> None:
        self.lines.append(text)


def check_flips(run: PodRun, count: int, seed: int) -> None:
    assert found_in(run.directory) == []
    outcome = try_flips(run.directory, random_flips(run.directory, count, seed))
    check_changes_nothing(run.directory, outcome.unnoticed)
    assert outcome.noticed.total() + len(outcome.unnoticed) == count and outcome.noticed.total() > 0.8 * count


@pytest.mark.full
def test_a_flipped_bit_in_any_file_is_noticed_or_changes_nothing_that_is_read(killed: PodRun) -> None:
    check_flips(killed, 25, seed=0)


@pytest.mark.full
def test_a_hundred_flipped_bits_are_noticed_or_change_nothing_that_is_read(killed: PodRun) -> None:
    check_flips(killed, 100, seed=1)


@pytest.mark.full
def test_every_file_that_a_resume_reads_is_verified(killed: PodRun) -> None:
    kinds = {Path(name).name for name in files_of(killed.directory)}
    assert {"config.yaml", "journal.sqlite", "journal.sqlite-wal", "metrics.jsonl", "model.safetensors", "tokenizer.json", "COMMIT"} <= kinds
    for name in files_of(killed.directory):
        with flipped(killed.directory, Flip(name, (killed.directory / name).stat().st_size // 2, 0)):
            lines = found_in(killed.directory)
        assert name.endswith("journal.sqlite") or lines, name


def set_value(run: PodRun, key: str, value: object) -> None:
    path = run.directory / "config.yaml"
    content = yaml.safe_load(path.read_text())
    section, name = key.split(".")
    content[section][name] = value
    path.write_text(yaml.safe_dump(content, sort_keys=False))


def cut(run: PodRun) -> None:
    """Flips a bit in the last frames of the write-ahead log: SQLite drops what stands behind it without a word."""
    path = run.directory / "journal.sqlite-wal"
    data = bytearray(path.read_bytes())
    data[len(data) * 3 // 4] ^= 1
    path.write_bytes(data)


def remove_checkpoints(run: PodRun) -> None:
    shutil.rmtree(run.directory / "checkpoints")


HARMS: dict[str, tuple[Callable[[PodRun], None], str]] = {
    "evaluation": (
        lambda run: sql(run, "UPDATE evaluations SET result = replace(result, '\"accuracy\":0', '\"accuracy\":1')"),
        "evaluations 0/sampled: it does not have the digest that it was written with; the reported accuracy or loss",
    ),
    "lost row": (lambda run: sql(run, "DELETE FROM evaluations WHERE step = 2"), "evaluations 2/sampled: it is lost"),
    "new row": (lambda run: sql(run, "INSERT INTO run VALUES ('seed', '1')"), "run seed: the chain has no such row"),
    "samples": (lambda run: sql(run, "UPDATE step_batches SET digest = '0' WHERE step = 5"), "step_batches 5/0: it does not have"),
    "cut": (cut, "entries are lost; every record of the run depends on it"),
    "recipe": (
        lambda run: set_value(run, "trainer.learning_rate", 2e-3),
        "has trainer.learning_rate 0.002, and the run began with 0.001; every result depends on it",
    ),
    "checkpoints": (remove_checkpoints, "and so are all others; the run would begin again at step 0"),
    "journal": (lambda run: (run.directory / "journal.sqlite").unlink(), "has checkpoints and no journal.sqlite; its samples, scores"),
}


@pytest.mark.parametrize("harm", HARMS)
def test_a_resume_that_would_use_what_is_damaged_is_refused_in_one_line(killed: PodRun, tmp_path: Path, harm: str) -> None:
    run, (do, expected) = copy_of(killed, tmp_path), HARMS[harm]
    do(run)
    before = {path: path.stat().st_mtime_ns for path in run.directory.rglob("*.safetensors")}
    with pytest.raises(RunError) as caught:
        check_records(run.directory, True, Messages())
    assert expected in str(caught.value) and "\n" not in str(caught.value)
    assert {path: path.stat().st_mtime_ns for path in run.directory.rglob("*.safetensors")} == before


def test_a_reference_model_with_a_flipped_byte_is_refused_by_the_command_and_named_by_verify(killed: PodRun, tmp_path: Path) -> None:
    run = copy_of(killed, tmp_path)
    weights = run.directory / "sft" / "model" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-5] ^= 4
    weights.write_bytes(data)
    done = run.resume()
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1, done.stderr
    assert "model.safetensors' does not have the digest it was written with: it belongs to the model that the run starts from" in done.stderr
    command = [sys.executable, "-m", "tandem.cli.main", "verify", str(run.directory)]
    told = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert told.returncode == 1 and told.stderr == ""
    assert "DAMAGED  start model" in told.stdout and "the reference model" in told.stdout and "ok       records" in told.stdout
    weights.write_bytes(bytes(data[:-5]) + bytes([data[-5] ^ 4]) + bytes(data[-4:]))
    told = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=60)
    assert told.returncode == 0 and all(json.loads(line)["findings"] == [] for line in told.stdout.splitlines())


@pytest.mark.full
def test_damage_that_no_later_step_depends_on_is_told_journalled_and_reported_and_the_run_is_the_same(
    killed: PodRun, undisturbed: PodRun, tmp_path: Path
) -> None:
    run = copy_of(killed, tmp_path)
    shutil.rmtree(run.directory / "checkpoints" / "step-4")
    # What the dead processes shared: a resume begins it anew.
    (run.directory / "pod" / "store.sqlite").write_bytes(b"x" * 5000)
    sql(run, "UPDATE transitions SET started_s = started_s + 1 WHERE id = 3")
    lines = (run.directory / "metrics.jsonl").read_text().splitlines(keepends=True)
    original = lines[1]
    lines[1] = original.replace('"step": 1,', '"step": 1, "x": 1,')
    (run.directory / "metrics.jsonl").write_text("".join(lines))
    done = run.resume()
    assert done.returncode == 0, done.stderr
    reasons = [event.detail["reason"] for event in run.events("damage")]
    expected = ("step-4', which the journal has as committed, is missing; the run continues from step 2 instead", "transitions 3", "line 2 of")
    for text in expected:
        assert any(text in reason for reason in reasons), (text, reasons)
        assert text in done.stdout + done.stderr
    assert "is missing" in (run.directory / "report.html").read_text()
    (run.directory / "metrics.jsonl").write_text((run.directory / "metrics.jsonl").read_text().replace('"step": 1, "x": 1,', '"step": 1,'))
    assert difference(run, undisturbed) == []


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ("learning_rate:", "learning_rbte:", "has sft.learning_rate no value, and the run began with 0.005"),
        ("model:", "model: [", "is not YAML any more"),
        ("model:", "modfl:", "values that are not those that the run began with"),
    ],
)
def test_a_damaged_recipe_is_not_taken_for_one_of_another_version(killed: PodRun, tmp_path: Path, before: str, after: str, expected: str) -> None:
    run = copy_of(killed, tmp_path)
    path = run.directory / "config.yaml"
    assert before in path.read_text()
    path.write_text(path.read_text().replace(before, after))
    with pytest.raises(RunError) as caught:
        resume(run.directory)
    assert "\n" not in str(caught.value) and expected in str(caught.value)


def test_a_lost_head_is_told_and_made_again(killed: PodRun, tmp_path: Path) -> None:
    run, told = copy_of(killed, tmp_path), Messages()
    (run.directory / "journal.sqlite.head").unlink()
    check_records(run.directory, True, told)
    assert [line for line in told.lines if "journal.sqlite.head is missing or damaged" in line] == told.lines != []
    again = Messages()
    check_records(run.directory, True, again)
    assert again.lines == []


def test_a_value_that_may_change_is_taken_from_an_edited_recipe_and_told(killed: PodRun, tmp_path: Path) -> None:
    run, told = copy_of(killed, tmp_path), Messages()
    set_value(run, "machine.threads", 2)
    check_records(run.directory, True, told)
    assert len(told.lines) == 1 and "machine.threads 2, and the run began with 1" in told.lines[0]


def test_a_run_is_private_to_its_user(killed: PodRun) -> None:
    assert killed.directory.stat().st_mode & 0o777 == 0o700


@pytest.mark.full
def test_no_secret_is_in_the_files_or_the_command_lines_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secrets = {name: f"not-for-others-{name}" for name in ("AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "OPENAI_API_KEY", "MLFLOW_TRACKING_PASSWORD")}
    for name, value in secrets.items():
        monkeypatch.setenv(name, value)
    run, lines = PodRun(tmp_path), set[str]()
    process = run.begin("train", str(run.recipe), f"--run.directory={run.parent}", f"--run.name={run.name}", "--run.max_steps=1")
    while process.poll() is None:
        lines.update(run.processes().values())
        time.sleep(0.05)
    assert process.returncode == 0, process.stderr
    credential = (run.directory / "pod" / "credential").read_text()
    assert any("tandem.pod.shim" in line for line in lines) and len(lines) >= 4
    private = {*secrets.values(), credential}
    assert not [line for line in lines if any(secret in line for secret in private)]
    files = [path for path in run.directory.rglob("*") if path.is_file() and path.name != "credential"]
    assert len(files) > 30 and not [path for path in files if any(secret.encode() in path.read_bytes() for secret in private)]

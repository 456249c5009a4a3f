"""Runs with trackers: their points are those of metrics.jsonl, also after a kill, and a tracker changes nothing in a run."""

import json
import time
from pathlib import Path

import pytest
import yaml
from event_files import numbers, scalars, table
from pod_runs import RECIPE, PodRun
from services import mlflow_points, trackio_points, wandb_points

from tandem import train

HERE = Path(__file__).parent
TENSORBOARD = "--trackers.names=[tensorboard]"


def points(run: PodRun) -> dict[int, dict[str, float]]:
    return {row["step"]: numbers(row) for row in map(json.loads, (run.directory / "metrics.jsonl").read_text().splitlines())}


@pytest.fixture(scope="module")
def tracked(tmp_path_factory: pytest.TempPathFactory) -> PodRun:
    run = PodRun(tmp_path_factory.mktemp("tracked"))
    done = run.train(TENSORBOARD, "--trackers.samples_every_steps=2", "--run.max_steps=3", "--inline")
    assert done.returncode == 0, done.stderr + done.stdout
    return run


def test_a_run_on_data_is_in_tensorboard_and_its_model_too(tmp_path: Path) -> None:
    sections = {
        "algorithm": {"name": "sft"}, "task": {"name": "sort"}, "data": {"sequence_length": 32, "global_batch_size": 2},
        "model": yaml.safe_load(RECIPE.read_text())["model"], "trackers": {"names": ["tensorboard"]}, "machine": {"threads": 1},
        "run": {"max_steps": 3, "directory": str(tmp_path), "name": "run"},
    }  # fmt: skip
    run = PodRun(tmp_path)
    train(sections, progress=False)
    assert scalars(run.directory / "tensorboard") == points(run) and len(points(run)) == 3
    assert table(run.directory / "tensorboard", "artefacts/model")[2][1] == [str(run.directory / "model")]


@pytest.mark.full
def test_a_run_of_reinforcement_learning_is_in_tensorboard_with_samples_and_its_model(tracked: PodRun) -> None:
    folder = tracked.directory / "tensorboard"
    assert scalars(folder) == points(tracked) and len(points(tracked)) == 3
    shown = table(folder, "samples")
    assert list(shown) == [0, 2] and len(shown[2]) == 5
    assert [table(folder, f"artefacts/{name}")[2][1] for name in ("model", "report.html")] == [
        [str(tracked.directory / name)] for name in ("model", "report.html")
    ]


@pytest.mark.full
def test_a_run_that_is_killed_between_checkpoints_and_resumed_has_each_point_once(tmp_path: Path) -> None:
    run = PodRun(tmp_path)
    process = run.begin(
        "train", str(run.recipe), f"--run.directory={tmp_path}", "--run.name=run", TENSORBOARD, "--checkpoint.every_steps=4", "--run.max_steps=9", "--inline"
    )
    sent = run.directory / "trackers" / "tensorboard.sent"
    while not sent.exists() or len(sent.read_text().splitlines()) < 6:
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    process.kill()
    process.communicate()
    done = run.resume("--inline")
    assert done.returncode == 0, done.stderr + done.stdout
    assert scalars(run.directory / "tensorboard") == points(run) and len(points(run)) == 9


@pytest.mark.full
@pytest.mark.parametrize("service", ["wandb", "mlflow", "trackio"])
def test_a_run_that_is_killed_and_resumed_has_each_point_once_at_a_service(service: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip(service, reason=f"{service} is not installed, so its tracker is not tested")
    run = PodRun(tmp_path)
    for variable in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    process = run.begin(
        "train", str(run.recipe), f"--run.directory={tmp_path}", "--run.name=run", f"--trackers.names=[{service}]", "--trackers.finish_timeout_s=120",
        "--checkpoint.every_steps=4", "--run.max_steps=100000", "--inline",
    )  # fmt: skip
    sent = run.directory / "trackers" / f"{service}.sent"
    while not sent.exists() or len(sent.read_text().splitlines()) < 6:
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    process.kill()
    process.communicate()
    steps = len((run.directory / "metrics.jsonl").read_text().splitlines())
    done = run.resume(f"--run.max_steps={steps + 5}", "--inline")
    assert done.returncode == 0, done.stderr + done.stdout
    read = {
        "wandb": lambda: wandb_points(run.directory),
        "mlflow": lambda: mlflow_points(tmp_path / "mlflow.db"),
        "trackio": lambda: trackio_points(tmp_path / "trackio" / "tandem.db"),
    }
    assert read[service]() == points(run) and len(points(run)) == steps + 5


@pytest.mark.full
def test_trackers_that_raise_and_hang_change_nothing_and_are_named(tracked: PodRun, tmp_path: Path) -> None:
    run = PodRun(tmp_path)
    file = HERE / "watched_trackers.py"
    done = run.train(f"--trackers.names=[{file}:Raises, {file}:Hangs]", "--trackers.finish_timeout_s=1", "--run.max_steps=3", "--inline")
    assert done.returncode == 0, done.stderr + done.stdout
    said = done.stdout + done.stderr
    assert said.count("Raises failed and is tried again, the run does not wait for it: OSError: no route to the tracker") == 1
    assert all(f"{name} ended and lacks 3 rows of metrics.jsonl" in said for name in ("Raises", "Hangs"))
    assert run.rows() == tracked.rows() and run.results() == tracked.results()

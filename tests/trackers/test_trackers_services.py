"""What W&B, MLflow and trackio have of a run whose rows are appended, cut and written again. Each is read back from its own files."""

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest
from etcd_server import free_ports
from services import Points, mlflow_points, mlflow_runs, trackio_points, wandb_records, wandb_written_points

from tandem.config.trackers import TrackersConfig
from tandem.runtime.records.metrics import MetricsFile
from tandem.trackers import follower as follower_module
from tandem.trackers.follower import Follower
from tandem.trackers.open import check_trackers, open_tracker
from tandem.trackers.sent_rows import SentRows
from tandem.trackers.tracker import RunFacts, SampleRow
from tandem.types import UserError

SAMPLE = SampleRow("3 1", "1 3", 1 / 3, {"task": 0.5})
SERVICES = [pytest.param("trackio"), pytest.param("wandb", marks=pytest.mark.full), pytest.param("mlflow", marks=pytest.mark.full)]


@dataclass
class Tracked:
    """A run in ``directory`` that the tracker ``name`` follows; ``settled``: the step of its newest checkpoint."""

    name: str
    directory: Path
    read: Callable[[], Points]
    settled: int = 0
    said: list[str] = field(default_factory=list)
    samples: Sequence[SampleRow] = ()
    uri: str = ""

    def life(self) -> Follower:
        """A new life of what follows the run."""
        config = TrackersConfig((self.name,), mlflow_uri=self.uri)
        check_trackers(config)
        facts = RunFacts("run", self.directory, {"run": {"seed": 3}})
        return Follower(
            facts, lambda: open_tracker(self.name, config, self.directory, self.said.append), SentRows(self.directory / "sent"),
            lambda step: self.samples if step == 2 else (), self.said.append, lambda: self.settled,
        )  # fmt: skip


@pytest.fixture
def tracked(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tracked:
    name: str = request.param
    pytest.importorskip(name, reason=f"{name} is not installed, so its tracker is not tested")
    directory = tmp_path / "run"
    directory.mkdir()
    # No login: W&B writes files.
    for variable in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("WANDB_DATA_DIR", str(directory / "wandb" / "data"))
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))
    if name == "trackio":
        for module in ("trackio.utils", "trackio.sqlite_storage"):
            monkeypatch.setattr(f"{module}.TRACKIO_DIR", tmp_path / "trackio")
    read: dict[str, Callable[[], Points]] = {
        "wandb": lambda: wandb_written_points(directory),
        "mlflow": lambda: mlflow_points(tmp_path / "mlflow.db"),
        "trackio": lambda: trackio_points(tmp_path / "trackio" / "tandem.db"),
    }
    return Tracked(name, directory, read[name])


def row(step: int, life: int = 0) -> dict[str, Any]:
    return {"step": step, "reward/mean": (step + 1) / 3, "timing_s/step": 0.1 + life, "train/loss": float("inf") if step == 1 else -1e-300, "kl": None}


def points(directory: Path) -> Points:
    rows = map(json.loads, (directory / "metrics.jsonl").read_text().splitlines())
    return {each["step"]: {name: value for name, value in each.items() if name != "step" and value is not None} for each in rows}


@pytest.mark.parametrize("tracked", SERVICES, indirect=True)
def test_rows_that_a_resume_repeats_are_there_once_with_the_values_of_the_file(tracked: Tracked) -> None:
    metrics, follows = MetricsFile(tracked.directory / "metrics.jsonl"), tracked.life()
    for step in range(7):
        metrics.append(row(step))
        tracked.settled = step - step % 3
        assert follows.catch_up() and not [text for text in tracked.said if "failed" in text]
    # The process is killed after it has sent rows 3 to 5 and before it has recorded them.
    SentRows(tracked.directory / "sent").cut(3)
    metrics.cut_after(6)
    follows = tracked.life()
    for step in range(6, 9):
        metrics.append(row(step, life=1))
        follows.catch_up()
    assert follows.catch_up(all_settled=True) and follows.tracker is not None
    follows.tracker.finish("finished")
    assert tracked.read() == points(tracked.directory) and len(points(tracked.directory)) == 9


@pytest.mark.parametrize("tracked", SERVICES, indirect=True)
def test_rows_that_were_sent_and_then_cut_because_the_newest_checkpoint_was_damaged_are_gone(tracked: Tracked) -> None:
    metrics, follows = MetricsFile(tracked.directory / "metrics.jsonl"), tracked.life()
    tracked.settled = 4
    for step in range(6):
        metrics.append(row(step))
    follows.catch_up()
    metrics.cut_after(2)
    for step in range(2, 5):
        metrics.append(row(step, life=1))
    assert follows.catch_up(all_settled=True) and follows.tracker is not None
    follows.tracker.finish("finished")
    assert tracked.read() == points(tracked.directory) and len(points(tracked.directory)) == 5


@pytest.mark.parametrize("tracked", SERVICES, indirect=True)
def test_the_recipe_samples_and_what_the_run_wrote_are_there(tracked: Tracked) -> None:
    metrics, tracked.samples = MetricsFile(tracked.directory / "metrics.jsonl"), [SAMPLE]
    (tracked.directory / "model").mkdir()
    (tracked.directory / "model" / "config.json").write_text("{}")
    (tracked.directory / "report.html").write_text("<p>report</p>")
    for step in range(3):
        metrics.append(row(step))
    follows = tracked.life()
    assert follows.catch_up(all_settled=True) and follows.tracker is not None, tracked.said
    follows.tracker.artefact(tracked.directory / "model")
    follows.tracker.artefact(tracked.directory / "report.html")
    follows.tracker.finish("finished")
    parent, model = tracked.directory.parent, str(tracked.directory / "model")
    assert tracked.read() == points(tracked.directory)
    if tracked.name == "wandb":
        records = list(wandb_records(tracked.directory))
        config = {item.key: json.loads(item.value_json) for record in records for item in record.run.config.update}
        assert config["run"] == {"seed": 3}
        (table,) = (tracked.directory / "wandb").glob("offline-run-*/files/media/table/*.json")
        assert json.loads(table.read_text())["data"] == [["3 1", "1 3", 1 / 3, 0.5]]
        artefacts = {record.artifact.type: record.artifact.manifest.contents[0] for record in records if record.artifact.name.endswith(follows_id(tracked))}
        assert artefacts["model"].ref == f"file://{model}/config.json" and artefacts["report"].local_path
        assert len(tracked.said) == 1 and tracked.said[0].startswith("has no login")
    elif tracked.name == "mlflow":
        with sqlite3.connect(parent / "mlflow.db") as connection:
            assert connection.execute("SELECT value FROM params WHERE key = 'run.seed'").fetchall() == [("3",)]
            assert connection.execute("SELECT value FROM tags WHERE key = 'tandem.model'").fetchall() == [(model,)]
            assert connection.execute("SELECT status FROM runs").fetchall() == [("FINISHED",)]
        (folder,) = (parent / "mlflow-artifacts").glob("*/artifacts")
        assert json.loads((folder / "samples" / "step_00000002.json").read_text())["data"] == [["3 1", "1 3", 1 / 3, 0.5]]
        assert (folder / "report.html").read_text() == "<p>report</p>"
    else:
        with sqlite3.connect(parent / "trackio" / "tandem.db") as connection:
            assert json.loads(connection.execute("SELECT config FROM configs").fetchone()[0]) == {"run": {"seed": 3}}
            metrics_of = dict(connection.execute("SELECT step, metrics FROM metrics"))
            references = [text for row in connection.execute("SELECT * FROM artifact_versions") for text in row if isinstance(text, str)]
        assert json.loads(metrics_of[2])["samples"]["_value"] == [{"prompt": "3 1", "completion": "1 3", "reward": 1 / 3, "task": 0.5}]
        assert any(f"file://{model}" in text for text in references)


def follows_id(tracked: Tracked) -> str:
    return (tracked.directory / "trackers" / f"{tracked.name}.id").read_text().strip()


@pytest.mark.full
@pytest.mark.parametrize("tracked", ["mlflow"], indirect=True)
def test_an_mlflow_run_that_was_deleted_there_is_written_anew(tracked: Tracked, tmp_path: Path) -> None:
    from mlflow import MlflowClient

    metrics, follows = MetricsFile(tracked.directory / "metrics.jsonl"), tracked.life()
    for step in range(2):
        metrics.append(row(step))
    follows.catch_up(all_settled=True)
    MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}").delete_run(*mlflow_runs(tmp_path / "mlflow.db"))
    tracked.life().catch_up(all_settled=True)
    assert tracked.read() == points(tracked.directory)


@pytest.mark.full
@pytest.mark.parametrize("tracked", ["wandb"], indirect=True)
def test_a_run_that_never_reaches_wandb_is_in_files_and_one_that_did_waits_for_it(tracked: Tracked, monkeypatch: pytest.MonkeyPatch) -> None:
    (port,) = free_ports(1)
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{port}")
    monkeypatch.setattr("tandem.trackers.wandb.INIT_S", 3.0)
    metrics = MetricsFile(tracked.directory / "metrics.jsonl")
    (tracked.directory / "trackers").mkdir()
    for _ in range(2):
        follows = tracked.life()
        metrics.append(row(len(points(tracked.directory))))
        assert follows.catch_up(all_settled=True) and follows.tracker is not None, tracked.said
        follows.tracker.finish("finished")
        assert tracked.read() == points(tracked.directory)
    assert all(line.startswith("does not reach W&B, so it writes files; send them with 'wandb sync' (CommError: ") for line in tracked.said), tracked.said
    (tracked.directory / "trackers" / "wandb.online").touch()
    metrics.append(row(2))
    assert not tracked.life().catch_up(all_settled=True)
    assert tracked.said[-1].startswith("failed and is tried again, the run does not wait for it: CommError: ") and "\n" not in tracked.said[-1]


@pytest.mark.parametrize("name", ["wandb", "mlflow", "trackio"])
def test_a_package_that_is_missing_is_one_line_with_what_installs_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=rf"'trackers.names' has '{name}', which is not installed; pip install 'tandem-rl\[{name}\]'"):
        check_trackers(TrackersConfig((name,)))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (TrackersConfig(("wandb",), project="a/b"), "'trackers.project' is 'a/b'; it must be a name without"),
        (TrackersConfig(("tensorboard",), project="x"), "add wandb, mlflow or trackio to trackers.names"),
        (TrackersConfig(("wandb",), mlflow_uri="sqlite:///x"), "trackers.names has no 'mlflow'"),
        (TrackersConfig(("mlflow",), wandb_offline=True), "trackers.names has no 'wandb'"),
        (TrackersConfig(("mlflow",), mlflow_uri="http://me:pw@host"), "'trackers.mlflow_uri' has a password"),
    ],
)
def test_keys_that_no_tracker_reads_and_bad_values_are_refused(config: TrackersConfig, message: str) -> None:
    with pytest.raises(UserError) as caught:
        config.check()
    assert message in str(caught.value)


@pytest.mark.full
@pytest.mark.parametrize("tracked", ["mlflow"], indirect=True)
def test_a_tracking_server_that_comes_up_late_has_every_row(tracked: Tracked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        version("mlflow")
    except PackageNotFoundError:
        pytest.skip("mlflow is not installed, only its client mlflow-skinny, so no MLflow server is tested")
    for module in ("flask", "graphene"):
        pytest.importorskip(module, reason=f"{module} is not installed, so no MLflow server can be started and none is tested")
    monkeypatch.setattr(follower_module, "FIRST_WAIT_S", 0.0)
    (port,), database = free_ports(1), tmp_path / "mlflow.db"
    tracked.uri = f"http://127.0.0.1:{port}"
    metrics, follows = MetricsFile(tracked.directory / "metrics.jsonl"), tracked.life()
    follows._wait_s = 0.0
    for step in range(3):
        metrics.append(row(step))
    assert not follows.catch_up(all_settled=True)
    assert tracked.said == [f"failed and is tried again, the run does not wait for it: RunError: no MLflow server answers at '{tracked.uri}' "
                            "([Errno 111] Connection refused); start it, or name another address"]  # fmt: skip
    server = subprocess.Popen(
        [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", f"sqlite:///{database}", "--artifacts-destination", str(tmp_path / "served"),
         "--host", "127.0.0.1", "--port", str(port), "--workers", "1"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    try:
        while not follows.catch_up(all_settled=True):
            assert server.poll() is None
            follows._not_before = 0.0
            time.sleep(0.2)
        assert follows.tracker is not None
        follows.tracker.finish("finished")
        assert tracked.said[1] == "works again and has all rows" and tracked.read() == points(tracked.directory)
        assert list((tmp_path / "served").glob("*/*/artifacts/config.yaml"))
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()

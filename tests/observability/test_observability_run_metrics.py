"""What ``/metrics`` of a run says, and how it is asked."""

import http.client
import json
import re
import socket
import sys
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tandem.cli.main import main
from tandem.jobs.exposed.run_metrics import RunMetrics
from tandem.runtime.callback import Callback
from tandem.runtime.exposition.http_server import MOST_CLIENTS, MetricsServer
from tandem.runtime.exposition.names import metric_name
from tandem.runtime.exposition.text import CONTENT_TYPE
from tandem.runtime.process.heartbeat_table import HeartbeatTable
from tandem.runtime.records.journal import Journal
from tandem.runtime.rpc.listener import listen

ROOT = Path(__file__).resolve().parents[2]


def series(text: bytes) -> dict[str, float]:
    """Returns every sample by its name and the labels that are not of the run."""
    found = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            if sample.name.startswith("tandem_"):
                labels = dict(sample.labels)
                assert (labels.pop("run"), labels.pop("job")) == ("r", "grpo"), sample
                found[" ".join((sample.name, *(value for _, value in sorted(labels.items()))))] = sample.value
    return found


def test_names_are_those_of_the_rows_in_the_alphabet_of_prometheus() -> None:
    names = {key: metric_name(key) for key in ("actor/grad_norm", "timing_s/step", "reward_s/my.judge-2/total", "kl", "evaluation/held_out/loss")}
    assert list(names.values()) == [
        "tandem_actor_grad_norm", "tandem_timing_s_step", "tandem_reward_s_my_judge_2_total", "tandem_kl", "tandem_evaluation_held_out_loss"
    ]  # fmt: skip


def test_a_run_shows_its_newest_row_its_phases_its_faults_and_its_ranks(tmp_path: Path) -> None:
    metrics = RunMetrics("r", "grpo", True)
    assert series(metrics.text())["tandem_run_phase starting"] == 1, "before it has a folder"
    metrics.started(str(tmp_path), 10, None)
    assert "tandem_events_total recovery" in series(metrics.text()), "before it has a journal"
    with Journal(tmp_path / "journal.sqlite") as journal:
        journal.record_event("recovery", {"step": 0})
        journal.record_event("recovery", {"step": 1})
        for step, loss in ((0, 3.0), (5, 2.0)):
            journal.commit_evaluation(step, "held_out", {"loss": loss, "why": "text"})
        (tmp_path / "ranks" / "0").mkdir(parents=True)
        table = HeartbeatTable(tmp_path / "ranks" / "0" / "heartbeats", 2)
        table.writer(1).phase_is("train", 4)
        metrics.phase("train", 4)
        for step in range(3):
            row = {"step": step, "kl": 0.25 * step, "actor/grad_norm": float("inf") if step == 1 else 1.0, "verdict": "taken", "timing_s/train": 2.0}
            metrics.row({**row, **({"evaluation/accuracy": 0.5} if step == 0 else {}), "timing_s/step": 3.0 + step})
        metrics.waiting("late")
        found = series(metrics.text())
        table.close()
    assert not list(tmp_path.glob("*-wal")), "its log was written back"
    expected = {
        "tandem_step": 2, "tandem_kl": 0.5, "tandem_actor_grad_norm": 1, "tandem_evaluation_accuracy": 0.5, "tandem_steps_total": 3,
        "tandem_not_finite_rows_total": 1, "tandem_phase_seconds_total train": 6, "tandem_run_median_step_seconds": 4, "tandem_run_phase train": 1,
        "tandem_events_total recovery": 2, "tandem_events_total mismatch": 0, "tandem_evaluation_held_out_loss": 2, "tandem_rank_step 1": 4,
        "tandem_run_exact": 1, "tandem_run_max_steps": 10, "tandem_run_overdue": 1, "tandem_train_skipped_steps": 0,
    }  # fmt: skip
    assert {name: found.get(name) for name in expected} == expected
    assert "tandem_phase_seconds_total step" not in found and "tandem_rank_step 0" not in found and "tandem_verdict" not in found
    assert 0 < found["tandem_run_disk_free_bytes"] < found["tandem_run_disk_size_bytes"]


def test_the_controller_answers_without_torch() -> None:
    code = "import sys, tandem.jobs.exposed.run_metrics, tandem.observability.files, tandem.cli.up; print('torch' in sys.modules)"
    import subprocess

    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


def test_clients_that_say_nothing_do_not_keep_others_out_for_good() -> None:
    server = MetricsServer(listen("127.0.0.1", 0), lambda: b"x 1\n", CONTENT_TYPE)
    try:
        silent = [socket.create_connection(server.address) for _ in range(MOST_CLIENTS)]
        further = socket.create_connection(server.address)
        assert further.recv(1) == b"", "it is closed"
        for each in silent:
            each.close()
        answers = []
        while len(answers) < 3:
            connection = http.client.HTTPConnection(*server.address, timeout=10)
            try:
                connection.request("HEAD" if not answers else "GET", "/metrics" if len(answers) < 2 else "/other")
                answer = connection.getresponse()
            except (OSError, http.client.HTTPException):
                continue  # The threads of those that left are not gone yet.
            finally:
                connection.close()
            answers.append((answer.status, answer.getheader("Content-Type")))
        assert answers == [(200, CONTENT_TYPE), (200, CONTENT_TYPE), (404, "text/plain; charset=utf-8")]
    finally:
        server.close()


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(arguments) == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1, line
    return line


def test_a_port_or_a_folder_that_cannot_be_used_is_refused_before_the_run_has_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = ["train", str(ROOT / "recipes" / "sort.yaml"), f"--run.directory={tmp_path / 'runs'}"]
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        for arguments in ([*run, "--dry-run"], run):
            line = refused([*arguments, f"--metrics.port={port}", f"--metrics.targets_folder={tmp_path / 't'}"], capsys)
            assert f"port {port} on 127.0.0.1 cannot be taken" in line
    (tmp_path / "file").write_text("")
    assert "targets folder" in refused([*run, f"--metrics.targets_folder={tmp_path / 'file' / 'x'}"], capsys)
    assert "'metrics.port' is 70000" in refused([*run, "--metrics.port=70000"], capsys)
    assert not (tmp_path / "runs").exists()


def test_every_series_of_a_run_that_has_a_name_of_its_own_is_in_the_document() -> None:
    exposed = ROOT / "tandem" / "jobs" / "exposed"
    names = set(re.findall(r'"(tandem_[a-z_]+)"', "".join(path.read_text() for path in exposed.glob("*.py"))))
    document = (ROOT / "docs" / "observability.md").read_text()
    assert len(names) > 15 and [name for name in sorted(names) if name not in document] == []


def test_a_target_in_the_folder_has_the_labels_of_the_run(tmp_path: Path) -> None:
    from tandem.config.recipe import load_config
    from tandem.jobs.callbacks import Callbacks
    from tandem.jobs.exposed.exposed_run import exposed, metrics_listener

    class Messages(Callback):
        def message(self, text: str) -> None:
            said.append(text)

    said: list[str] = []
    recipe = load_config(ROOT / "recipes" / "sort.yaml", [f"metrics.targets_folder={tmp_path / 'targets'}"])
    (tmp_path / "r").mkdir()
    told = Callbacks([Messages()])
    with metrics_listener(recipe.metrics) as listener:
        assert listener is not None
        with exposed(recipe, tmp_path / "r", listener, told):
            told.row({"step": 3, "timing_s/step": 1.0})
            (file,) = (tmp_path / "targets").glob("*.json")
            target = json.loads(file.read_text())[0]
            assert target["labels"] == {"job": "grpo", "run": "r"}
            connection = http.client.HTTPConnection(*target["targets"][0].split(":"), timeout=10)
            connection.request("GET", "/metrics")
            found = series(connection.getresponse().read())
            connection.close()
            assert (found["tandem_step"], found["tandem_run_exact"]) == (3, 1)
    assert list((tmp_path / "targets").iterdir()) == []
    assert [text.partition(" at ")[0] for text in said] == ["metrics"]
    everywhere = load_config(ROOT / "recipes" / "sort.yaml", ["metrics.targets_folder=", "metrics.host=0.0.0.0"])
    with metrics_listener(everywhere.metrics) as listener, exposed(everywhere, tmp_path / "r", listener, told):
        assert said[1].startswith("warning: anyone who reaches 0.0.0.0 may read the metrics of this run")

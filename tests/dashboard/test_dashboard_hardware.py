"""The hardware of a run and its replays on the dashboard: each figure is that of its source."""

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from recorded_runs import make_run, row
from rich.console import Console
from starlette.testclient import TestClient

from tandem.dashboard.app import make_app
from tandem.dashboard.report import write_report
from tandem.dashboard.runs import Runs
from tandem.dashboard.top import chosen_run, picture
from tandem.metrics_database.promql.syntax import NAME
from tandem.metrics_database.store import FILE, MetricsWriter, Retention
from tandem.runtime.records.replays import add_replay

BEGAN_S, EVERY_S, COUNT = 1_700_000_000, 15, 41
RANK = {"process": "tandem.trainer.rank_process", "pid": "12"}
NODE = {"node": "here"}


def used(name: str, at: int, **labels: str) -> float:
    """Returns what the ``at``-th sample says: counters that grow evenly, a gauge that is a square."""
    if name == "tandem_process_cpu_seconds_total":
        return 0.5 * at * EVERY_S
    if name == "tandem_node_cpu_seconds_total":
        return {"user": 1.25, "system": 0.25, "idle": 0.75}[labels["mode"]] * at * EVERY_S
    return {"tandem_process_resident_memory_bytes": 1e6 * at * at, "tandem_node_memory_bytes": 8e9, "tandem_node_memory_available_bytes": 8e9 - 1e7 * at}[name]


SERIES: tuple[tuple[str, dict[str, str]], ...] = (
    ("tandem_process_cpu_seconds_total", RANK),
    ("tandem_process_resident_memory_bytes", RANK),
    ("tandem_node_cpu_seconds_total", {**NODE, "mode": "user"}),
    ("tandem_node_cpu_seconds_total", {**NODE, "mode": "system"}),
    ("tandem_node_cpu_seconds_total", {**NODE, "mode": "idle"}),
    ("tandem_node_memory_bytes", NODE),
    ("tandem_node_memory_available_bytes", NODE),
)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = make_run(tmp_path / "runs" / "a", [row(step) for step in range(5)], steps=1)
    writer = MetricsWriter(folder / FILE, Retention())
    for at in range(COUNT):
        when = (BEGAN_S + at * EVERY_S) * 1000
        samples = [(tuple(sorted({NAME: name, **labels}.items())), when, used(name, at, **labels)) for name, labels in SERIES]
        writer.append([*samples, (((NAME, "up"),), when, 1.0)])
    writer.close()
    return folder


def ask(folder: Path, name: str, **parameters: Any) -> Any:
    client = TestClient(make_app(Runs(folder.parent), ""), base_url="http://127.0.0.1:6060")
    answer = client.get(f"/api/{name}", params={"run": folder.name, **parameters})
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_the_hardware_is_what_the_samples_say(run: Path) -> None:
    before = sorted((path.name, path.stat().st_mtime_ns) for path in run.iterdir())
    told = ask(run, "hardware")
    assert told["began_s"] == BEGAN_S
    lines = {chart["title"]: {line["name"]: line["key"] for line in chart["series"]} for chart in told["charts"]}
    assert lines == {
        "Cores in use on the machine": {"user": "0|here user", "system": "0|here system"},
        "Cores in use by process": {"trainer.rank_process 12": "1|trainer.rank_process 12"},
        "Memory of the machine in use": {"here": "2|here"}, "Memory by process": {"trainer.rank_process 12": "3|trainer.rank_process 12"},
    }  # fmt: skip
    keys = [key for each in lines.values() for key in each.values()]
    whole = ask(run, "hardware_curves", key=keys, points=COUNT)
    assert whole["x"] == [at * EVERY_S for at in range(COUNT)] and whole["whole"] == [0, (COUNT - 1) * EVERY_S]
    for key, cores in (("0|here user", 1.25), ("1|trainer.rank_process 12", 0.5)):
        # Of one sample there is no rate.
        assert whole["series"][key]["y"][0] is None and whole["series"][key]["y"][5:] == pytest.approx([cores] * (COUNT - 5))
    assert whole["series"]["2|here"]["y"] == [1e7 * at for at in range(COUNT)]
    assert whole["series"]["3|trainer.rank_process 12"]["y"] == [1e6 * at * at for at in range(COUNT)]
    part = ask(run, "hardware_curves", key=keys[-1:], points=3, **{"from": 150, "to": 450})
    assert part["x"] == [150, 300, 450] and part["series"] == {keys[-1]: {"y": [1e6 * at * at for at in (10, 20, 30)]}}
    assert sorted((path.name, path.stat().st_mtime_ns) for path in run.iterdir()) == before, "nothing is written beside it"


def test_a_terminal_has_what_each_process_uses(run: Path) -> None:
    console = Console(width=120, record=True)
    console.print(picture(chosen_run(run), 120))
    (line,) = [line.split() for line in console.export_text().splitlines() if "rank_process" in line]
    assert line == ["trainer.rank_process", "12", "0.50", f"{1e6 * (COUNT - 1) ** 2 / 2**20:,.0f}"]


def test_a_run_without_a_database_or_with_a_damaged_one_says_so(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "runs" / "a", [row(0)], steps=0)
    assert ask(folder, "hardware") == {"charts": [], "began_s": None}
    (folder / FILE).write_bytes(b"no database" * 999)
    assert ask(folder, "hardware")["charts"] == []
    client = TestClient(make_app(Runs(folder.parent), ""), base_url="http://127.0.0.1:6060")
    answer = client.get("/api/hardware_curves", params={"run": "a", "key": ["1|x", "99|x", "x", ""]})
    assert answer.status_code == 409 and "has no samples" in answer.json()["error"]["message"]


DAMAGE = ("UPDATE series SET labels = '{\"pid\"!' WHERE id = 2", "UPDATE series SET labels = '[' || id", "UPDATE samples SET value = 'nao'")


@pytest.mark.parametrize("damage", DAMAGE, ids=("of one series", "of all", "of samples"))
def test_damage_inside_the_database_is_one_line_and_keeps_no_other_figure_from_the_page_the_terminal_and_the_report(run: Path, damage: str) -> None:
    with closing(sqlite3.connect(run / FILE)) as connection, connection:
        connection.execute(damage)
    client = TestClient(make_app(Runs(run.parent), ""), base_url="http://127.0.0.1:6060")
    answers = [client.get(f"/api/{name}", params={"run": "a", "key": "1|trainer.rank_process 12"}) for name in ("hardware", "hardware_curves", "nodes", "run")]
    assert [each.status_code for each in answers[2:]] == [200, 200]
    refused = [each.json()["error"]["message"] for each in answers[:2] if each.status_code != 200]
    assert refused and all("\n" not in line and ("is damaged" in line or "has no samples" in line) for line in refused)
    console = Console(width=120, record=True)
    console.print(picture(chosen_run(run), 120))
    assert "rank_process" not in console.export_text()
    assert '"title":"Accuracy"' in write_report([run], run.parent / "report.html").read_text()


def test_what_a_replay_found_is_shown_and_a_damaged_line_is_left_out(run: Path) -> None:
    parts = [{"part": "train", "count": 9, "unequal": 1, "how": "equal bit for bit", "differences": ["actor/grad_norm: recorded 1.0, now 2.0"]}]
    for step in (3, 4):
        assert add_replay(run, {"time_s": 1.5, "step": step, "version": "0.1", "parts": parts}) == ""
    with (run / "replays.jsonl").open("a") as file:
        file.write('{"step": "x"}\n[1\n')
    assert ask(run, "run")["replays"] == [{"time_s": 1.5, "step": step, "version": "0.1", "parts": parts} for step in (4, 3)]
    assert json.loads((run / "replays.jsonl").read_text().splitlines()[0])["step"] == 3
    assert add_replay(run / "missing", {"step": 1}) == "No such file or directory"

"""What the dashboard answers, of runs that the real writers have written."""

import itertools
import json
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from recorded_runs import HOSTILE, make_run, row, samples_of, value, write_rows
from starlette.testclient import TestClient

from tandem.dashboard.app import make_app
from tandem.dashboard.runs import Runs
from tandem.dashboard.top import chosen_run
from tandem.runtime.records.journal import Journal
from tandem.runtime.records.run_lock import RunLock
from tandem.runtime.records.tracing import Tracer

COUNT = 500


class Dashboard:
    def __init__(self, folder: Path, token: str = "", host: str = "127.0.0.1:6060") -> None:
        self.client = TestClient(make_app(Runs(folder), token), base_url=f"http://{host}")

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self.client.get(path, **options)

    def ask(self, name: str, **parameters: Any) -> Any:
        answer = self.get(f"/api/{name}", params=parameters)
        assert answer.status_code == 200, answer.text
        return json.loads(answer.text, parse_constant=lambda constant: pytest.fail(f"the answer has {constant}"))

    def refusal(self, name: str, **parameters: Any) -> tuple[int, str]:
        answer = self.get(f"/api/{name}", params=parameters)
        message = answer.json()["error"]["message"]
        assert "\n" not in message and "Traceback" not in message
        return answer.status_code, message


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    make_run(folder / "a", [row(step) for step in range(COUNT)], finished=True)
    make_run(folder / "group" / "b", [row(step) for step in range(40)], text=HOSTILE.replace("\ud83d", ""))
    return folder


@pytest.fixture(scope="module")
def dashboard(runs: Path) -> Iterator[Dashboard]:
    yield Dashboard(runs)


def test_the_list_has_every_run_with_its_state_and_last_figures(dashboard: Dashboard, runs: Path) -> None:
    listed = {run["name"]: run for run in dashboard.ask("runs")["runs"]}
    assert list(listed) == ["a", "group/b"] and listed["a"]["steps"] == COUNT and listed["a"]["state"] == "target reached"
    assert listed["group/b"]["state"] == "not finished" and listed["group/b"]["figures"]["accuracy"] == value("accuracy", 39)
    assert not listed["a"]["live"]
    with RunLock(runs / "a"):
        assert [run["live"] for run in dashboard.ask("runs")["runs"]] == [True, False] and dashboard.ask("run", run="a")["live"] is not None
    assert not dashboard.ask("runs")["runs"][0]["live"]


def test_of_very_many_runs_the_newest_are_listed_and_every_one_is_opened_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.dashboard.runs.MOST_RUNS", 3)
    for number, name in enumerate(("d", "c", "group/b", "a", "a/sft", "group/a/b/c")):
        (tmp_path / name).mkdir(parents=True, exist_ok=True)
        write_rows(tmp_path / name, [row(0)])
        os.utime(tmp_path / name / "metrics.jsonl", (1e9 + number, 1e9 + number))
    many = Dashboard(tmp_path)
    answer = many.ask("runs")
    assert [run["name"] for run in answer["runs"]] == ["a", "a/sft", "group/a/b/c"] and answer["count"] == 6
    assert chosen_run(tmp_path).name == "group/a/b/c"
    assert [many.ask("run", run=name)["rows"] for name in Runs(tmp_path).find()] == [1] * 6
    (tmp_path / "a" / "inside").mkdir()
    write_rows(tmp_path / "a" / "inside", [row(0)])
    for name in ("a/inside", "../a", "group/../a", "/etc", "group", "a/", "e", ".", "a\0"):
        assert many.refusal("run", run=name)[0] == 404, name


def test_curves_are_those_of_the_rows_and_thinned_to_means_with_their_ranges(dashboard: Dashboard) -> None:
    whole = dashboard.ask("curves", run="a", key=["accuracy", "reward/mean"], points=1000)
    assert whole["x"] == list(range(COUNT)) and whole["rows_each"] == 1 and "low" not in whole["series"]["accuracy"]
    assert whole["series"]["reward/mean"]["y"] == pytest.approx([value("reward/mean", step) for step in range(COUNT)], rel=1e-6)
    thin = dashboard.ask("curves", run="a", key="accuracy", points=50)
    assert thin["rows_each"] == 16 and len(thin["x"]) == 32
    rows = [value("accuracy", step) for step in range(16, 32)]
    part = {name: thin["series"]["accuracy"][name][1] for name in ("y", "low", "high")}
    assert part == pytest.approx({"y": sum(rows) / 16, "low": min(rows), "high": max(rows)}, rel=1e-6)
    near = dashboard.ask("curves", run="a", key="accuracy", points=50, **{"from": 100, "to": 110})
    assert near["rows_each"] == 1 and near["x"] == list(range(99, 112)), "a line goes on at both sides of a part"
    late = dashboard.ask("curves", run="a", key="accuracy", points=50, axis="time", **{"from": 200, "to": 210})
    assert late["x"] == [198.0, 200.0, 202.0, 204.0, 206.0, 208.0, 210.0, 212.0]


def test_the_overview_has_the_figures_of_the_report(dashboard: Dashboard, runs: Path) -> None:
    run = dashboard.ask("run", run="a")
    cards = {card["name"]: card for card in run["cards"]}
    assert cards["optimizer steps"]["value"] == "500" and cards["mismatch_kl, largest"]["value"] == "exactly 0"
    assert (cards["held-out accuracy, sampled"]["before"], cards["held-out accuracy, sampled"]["value"]) == ("0.250", "0.750")
    assert run["status"] == ["target reached", "good"] and run["machine"]["torch"] == "2.13" and run["samples"] == 3
    assert run["memory"] == [{"phase": "train", "predicted": 4e6, "measured": 3e6 + COUNT - 1}]
    assert [event["kind"] for event in run["events"]] == ["recovery"] and run["events"][0]["detail"]["reason"] == "rank 1 was killed"
    titles = {chart["title"]: chart for section in run["sections"] for chart in section["charts"]}
    assert titles["Accuracy"]["points"][0]["x"] == [0, COUNT] and titles["Reward"]["series"][0]["key"] == "reward/mean"
    assert {"Entropy", "Gradient norm", "Reward function correct"} <= titles.keys() and "KL divergence" not in titles
    assert ["trainer.learning_rate", "0.001", "1e-06"] in run["recipe"]["changed"]
    assert [phase["name"] for phase in run["phases"]] == ["rollout", "train"]


def test_samples_have_rewards_advantages_and_tokens(dashboard: Dashboard) -> None:
    newest = dashboard.ask("samples", run="a")
    assert newest["step"] == 3 and newest["count"] == 12 and newest["mean"] == 0.25 and newest["total"] == 3
    first = newest["prompts"][0]["samples"][0]
    assert (first["reward"], first["correct"], first["parts"]) == (1.0, True, {"correct": 1.0, "format": 0.5})
    # Rewards 1, 0, 0, 0: mean 1/4, sample standard deviation 1/2.
    assert [sample["advantage"] for sample in newest["prompts"][0]["samples"]] == pytest.approx([1.5, -0.5, -0.5, -0.5], rel=1e-4)
    one = dashboard.ask("sample", run="a", step=3, id=first["id"])
    assert [token[1:] for token in one["token_list"]] == [[9, -0.1, -0.1, 1, 0.0625], [10, -1.5, -1.2, 1, 1.5], [2, -0.01, -0.01, 1, None]]
    before = dashboard.ask("sample", run="a", step=0, id="0/p0/0")
    assert (one["entropy_missing"], before["entropy_missing"], before["token_list"][1][-1]) == ("", "not recorded", None)
    assert one["replay"].endswith("/a --step 3") and one["versions"] == ["1.3"]
    assert [len(prompt["samples"]) for prompt in dashboard.ask("samples", run="a", step=2, only="correct")["prompts"]] == [1, 1, 1]
    assert dashboard.ask("samples", run="a", step=2, text="ANSWER 3 of")["matched"] == 3, "whatever the case"
    assert dashboard.ask("samples", run="a", step=2, only="truncated")["matched"] == 3
    assert dashboard.ask("samples", run="a", limit=1, offset=1)["prompts"][0]["id"] == "p1"


def test_a_search_goes_over_all_steps_and_finds_the_same_prompt_in_them(dashboard: Dashboard) -> None:
    found = dashboard.ask("search", run="a", text="of step 1")
    assert {sample["step"] for sample in found["found"]} == {1} and len(found["found"]) == 12 and found["next"] is None and found["looked_at"] == 4
    same = dashboard.ask("search", run="a", same_step=2, same_id="2/p0/1")
    assert [sample["step"] for sample in same["found"]] == [3] * 4 + [2] * 4 + [1] * 4 + [0] * 4
    assert {sample["prompt_id"] for sample in same["found"]} == {"p0"}
    assert [sample["step"] for sample in dashboard.ask("search", run="a", same_step=2, same_id="2/p1/0")["found"]] == [2] * 4
    part = dashboard.ask("search", run="a", only="correct", limit=3)
    assert len(part["found"]) == 3 and part["next"] == 2
    assert {sample["step"] for sample in dashboard.ask("search", run="a", only="correct", limit=3, before=part["next"])["found"]} == {2}


def test_phases_are_bars_and_those_too_short_to_be_seen_are_one(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", [row(0)], steps=0)
    with sqlite3.connect(folder / "journal.sqlite") as file:
        states = [(step, sidecar, state, 1000.0 + step + start, 1000.0 + step + end) for step in range(3000) for sidecar, state, start, end in (
            ("rollout", "rollout", 0.0, 0.4), ("trainer", "train", 0.4, 0.9), ("trainer", "offload", 0.9, 0.9001))]  # fmt: skip
        file.executemany("INSERT INTO transitions (step, sidecar, state, started_s, ended_s, incarnation) VALUES (?, ?, ?, ?, ?, 1)", states)
        file.execute("INSERT INTO transitions (step, sidecar, state, started_s, ended_s, incarnation) VALUES (3000, 'rollout', 'rollout', 4000.0, NULL, 1)")
    dashboard = Dashboard(tmp_path)
    step = dashboard.ask("phases", run="run", step=7)
    assert (step["from"], step["to"]) == pytest.approx((7.0, 7.9001)) and step["steps"] == [0, 3000]
    lanes = {lane["name"]: lane["bars"] for lane in step["lanes"]}
    assert [bar[2:4] for bar in lanes["rollout"]] == [["rollout", 7]] and lanes["trainer"][0][:3] == [7.4, 7.9, "train"]
    whole = dashboard.ask("phases", run="run", **{"from": 0, "to": 3000})
    assert all(len(lane["bars"]) < 3500 for lane in whole["lanes"]) and whole["count"] == 9001
    assert {bar[2] for lane in whole["lanes"] for bar in lane["bars"]} == {"several", "rollout"}
    (cut,) = [bar for lane in whole["lanes"] for bar in lane["bars"] if bar[5]]
    assert cut[2] == "rollout" and cut[0] == 3000.0, "a phase that was cut off is marked"
    assert dashboard.ask("phase", run="run", id=step["lanes"][0]["bars"][0][4])["state"] == "train"


def test_a_traced_step_has_a_lane_for_each_rank(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", [row(0)], steps=1)
    for rank in (0, 1):
        tracer = Tracer(folder / "traces", rank, steps=(0,))
        tracer.begin(0)
        with tracer.span("forward", micro_batch=0, stage=rank):
            pass
    dashboard = Dashboard(tmp_path)
    assert dashboard.ask("run", run="run")["traced"] == [0]
    traced = dashboard.ask("trace", run="run", step=0)
    assert [(lane["name"], lane["bars"][0][2]) for lane in traced["lanes"]] == [("rank 0", "forward"), ("rank 1", "forward")]
    assert dashboard.refusal("trace", run="run", step=5)[0] == 404


def test_logs_are_read_from_their_end_without_codes_of_terminals_and_secrets(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", [row(0)], steps=0)
    lines = [f"line {number} \x1b[31mred\x1b[0m token hf_{'a' * 20}" for number in range(5000)] + ["x" * 500_000]
    (folder / "logs" / "rank-0.log").write_text("\n".join(lines) + "\n")
    (folder / "logs" / "away.log").symlink_to("/etc/passwd")
    dashboard = Dashboard(tmp_path)
    assert [file["name"] for file in dashboard.ask("logs", run="run")["files"]] == ["rank-0.log", "trainer.log"]
    end = dashboard.ask("log", run="run", file="rank-0.log")
    assert len(end["lines"]) == 1 and end["lines"][0].startswith("x" * 4000) and "characters more" in end["lines"][0]
    before, number = dashboard.ask("log", run="run", file="rank-0.log", before=sum(len(line) + 1 for line in lines[:5000])), 4999
    assert before["lines"][-1] == f"line {number} red token (hidden)" and before["from"] > 0
    assert dashboard.ask("log", run="run", file="trainer.log", text="SECOND")["lines"] == ["second line"]
    for name in ("away.log", "../config.yaml", "/etc/passwd", "logs/trainer.log"):
        assert dashboard.refusal("log", run="run", file=name)[0] == 404, name


def test_a_comparison_has_the_curves_of_all_runs_and_what_differs(dashboard: Dashboard) -> None:
    compared = dashboard.ask("compare", run=["a", "group/b"])
    assert [run["steps"] for run in compared["results"]] == [COUNT, 40] and compared["differences"] == []
    accuracy = compared["sections"][0]["charts"][0]
    assert [(points["run"], points["x"]) for points in accuracy["points"]] == [(0, [0, COUNT]), (1, [0, 40])]
    assert dashboard.refusal("compare", run="a") == (404, "1 runs are named; a comparison has 2 to 16")


def test_values_that_are_not_finite_are_gaps_and_a_damaged_row_is_named(tmp_path: Path) -> None:
    odd = [row(0), row(1, accuracy=float("nan")), row(2, accuracy=float("inf")), row(3, note="text"), row(4, accuracy=None), row(5)]
    folder = make_run(tmp_path / "run", odd, steps=0)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": "no"}\nnot JSON\n' + json.dumps(row(6)) + '\n{"step": 7, "torn')
    dashboard = Dashboard(tmp_path)
    found = dashboard.ask("curves", run="run", key=["accuracy", "note"])
    assert found["x"] == [0, 1, 2, 3, 4, 5, 6]
    y = found["series"]["accuracy"]["y"]
    assert [place for place, each in enumerate(y) if each is None] == [1, 2, 4] and y[6] == pytest.approx(value("accuracy", 6), rel=1e-6)
    assert dashboard.ask("run", run="run")["problem"].startswith("line 7 of metrics.jsonl is not a metrics row")
    with Journal(folder / "journal.sqlite") as journal:
        journal.record_event("skipped_step", {"step": 1, "grad_norm": float("nan")})
    assert dashboard.ask("run", run="run")["events"][0]["detail"]["grad_norm"] == "nan"


def test_a_damaged_journal_is_one_line_and_the_curves_are_still_shown(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", [row(step) for step in range(5)])
    (folder / "journal.sqlite").write_bytes(b"not a database" * 1000)
    dashboard = Dashboard(tmp_path)
    (listed,) = dashboard.ask("runs")["runs"]
    run = dashboard.ask("run", run="run")
    for problem in (listed["problem"], run["problem"]):
        assert "journal.sqlite is damaged" in problem and "\n" not in problem
    assert run["samples"] is None and len(dashboard.ask("curves", run="run", key="accuracy")["x"]) == 5
    for name in ("samples", "phases", "search"):
        status, message = dashboard.refusal(name, run="run")
        assert status == 409 and "is damaged" in message


def test_runs_without_metrics_or_journal_and_folders_without_runs_are_shown(tmp_path: Path) -> None:
    make_run(tmp_path / "no-rows", [], steps=0)
    (tmp_path / "only-rows").mkdir()
    write_rows(tmp_path / "only-rows", [row(0)])
    (tmp_path / "empty" / "deeper").mkdir(parents=True)
    dashboard = Dashboard(tmp_path)
    listed = {run["name"]: run for run in dashboard.ask("runs")["runs"]}
    assert listed["no-rows"]["steps"] is None and listed["only-rows"]["problem"] == "it has no journal.sqlite"
    assert dashboard.ask("run", run="no-rows")["rows"] == 0 and dashboard.ask("curves", run="no-rows", key="accuracy")["x"] == []
    assert dashboard.ask("phases", run="no-rows")["lanes"] == [] and dashboard.ask("samples", run="no-rows")["step"] is None
    assert "does not exist" in dashboard.ask("run", run="only-rows")["problem"]
    assert Dashboard(tmp_path / "empty").ask("runs") == {"folder": str(tmp_path / "empty"), "runs": [], "count": 0}


def test_a_run_that_grows_and_one_that_a_resume_cuts_are_followed(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", [row(step) for step in range(100)])
    dashboard = Dashboard(tmp_path)
    assert len(dashboard.ask("curves", run="run", key="accuracy")["x"]) == 100
    write_rows(folder, [row(step, **{"new/metric": 1.0}) for step in range(100, 150)])
    grown = dashboard.ask("curves", run="run", key=["accuracy", "new/metric"])
    assert grown["x"] == list(range(150)) and grown["series"]["new/metric"]["y"] == [None] * 100 + [1.0] * 50
    from tandem.runtime.records.metrics import MetricsFile

    metrics = MetricsFile(folder / "metrics.jsonl")
    metrics.cut_after(120)
    metrics.append(row(120, accuracy=-1.0))
    metrics.close()
    cut = dashboard.ask("curves", run="run", key="accuracy")
    assert cut["x"] == list(range(121)) and cut["series"]["accuracy"]["y"][-1] == -1.0


def test_nothing_is_written_and_no_other_run_or_file_is_reached(dashboard: Dashboard, runs: Path) -> None:
    listing = lambda: sorted((str(path), path.stat().st_mtime_ns, path.stat().st_size) for path in runs.rglob("*"))
    before = listing()
    for name in ("run", "curves", "phases", "samples", "search", "logs"):
        dashboard.ask(name, run="a", **({"key": "accuracy"} if name == "curves" else {}))
    assert listing() == before
    for name in ("..", "../..", "/etc", "a/..", "a/logs", "", "x" * 900):
        assert dashboard.refusal("run", run=name)[0] == 404, name
    for path in ("/assets/../app.py", "/assets/%2e%2e/app.py", "/assets/", "/api", "/api/none", "/dashboard.html", "/assets/chat.html", "/assets/admin.js"):
        assert dashboard.get(path).status_code == 404, path
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
        assert dashboard.client.request(method, "/api/runs").status_code == 405


def test_only_names_of_this_machine_are_answered_and_beyond_it_only_the_token(runs: Path) -> None:
    for host, status in (("localhost:6060", 200), ("[::1]:6060", 200), ("127.0.0.1", 200), ("evil.example", 403), ("127.0.0.1.evil.example:6060", 403)):
        assert Dashboard(runs, host=host).get("/api/runs").status_code == status, host
    far = Dashboard(runs, token="a-token-of-24-letters-00", host="10.0.0.2:6060")
    assert far.get("/").status_code == 200 and far.get("/assets/dashboard.js").status_code == 200
    for given in ("", "Bearer ", "Bearer wrong", "Basic a-token-of-24-letters-00", "Bearer \xff"):
        refused = far.get("/api/runs", headers={"Authorization": given.encode("latin-1")})
        assert refused.status_code == 401 and "token" in refused.json()["error"]["message"]
    for path in ("/api/runs", "/api/run?run=a"):
        assert far.get(path, headers={"Authorization": "Bearer a-token-of-24-letters-00"}).status_code == 200
    assert far.get("/api/stream").status_code == 401


def test_hostile_parameters_are_one_line(dashboard: Dashboard) -> None:
    for name, parameters in (
        ("curves", {"from": "nan"}), ("curves", {"points": "-1"}), ("curves", {"axis": "x"}), ("samples", {"step": "1e400"}), ("samples", {"only": "<b>"}),
        ("search", {"same_id": "0/none/0", "same_step": 0}), ("phase", {"id": 10**12}), ("sample", {"step": 0, "id": HOSTILE.replace("\ud83d", "")}),
        ("samples", {"text": "y" * 5000}), ("log", {"file": "\0"}),
    ):  # fmt: skip
        assert dashboard.refusal(name, run="a", **parameters)[0] == 404, name
    hostile = dashboard.ask("samples", run="group/b")["prompts"][0]["samples"][0]["text"]
    assert hostile == HOSTILE.replace("\ud83d", ""), "texts are sent as they are, and shown as text"


def test_steps_whose_samples_are_not_judged_yet_are_shown(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", [row(0)], steps=1)
    with Journal(folder / "journal.sqlite") as journal:
        journal.commit_samples(1, samples_of(1)[0])
    newest = Dashboard(tmp_path).ask("samples", run="run")
    assert newest["step"] == 1 and newest["mean"] is None
    assert {sample["reason"] for sample in itertools.chain(*(prompt["samples"] for prompt in newest["prompts"]))} == {"not judged yet"}


def test_a_phase_that_lasts_is_followed_to_its_end_and_a_resume_is_read_again(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", [row(0)], steps=3)
    dashboard, whole = Dashboard(tmp_path), {"run": "run", "from": 0, "to": 1000}
    states = lambda of: [(lane["name"], [bar[2:] for bar in lane["bars"]]) for lane in of.ask("phases", run="run", step=3)["lanes"]]
    with RunLock(folder), Journal(folder / "journal.sqlite") as journal:
        dashboard.ask("phases", **whole)
        with journal.transition(3, "trainer", "train"):
            first, second = (dashboard.ask("phases", run="run", step=3)["lanes"][0]["bars"] for _ in range(2))
            assert first[0][2:4] == ["train", 3] and not first[0][5] and second[0][1] > first[0][1], "it lasts until now"
        assert states(dashboard) == states(Dashboard(tmp_path)) and dashboard.ask("phases", **whole)["count"] == 7
        journal.cut_after(1)
        journal.next_incarnation()
        with journal.transition(1, "trainer", "train"):
            pass
    again = dashboard.ask("phases", **whole)
    assert again["count"] == Dashboard(tmp_path).ask("phases", **whole)["count"] == 3 and again["steps"] == [0, 1]


def test_a_folder_that_is_a_run_is_listed_with_its_stage(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "one", [row(0)], steps=1)
    make_run(folder / "sft", [{"step": 0, "train/loss": 2.0, "timing_s/step": 1.0}], steps=0)
    dashboard = Dashboard(folder)
    assert [run["name"] for run in dashboard.ask("runs")["runs"]] == ["one", "one/sft"]
    assert [run["name"] for run in Dashboard(tmp_path).ask("runs")["runs"]] == ["one", "one/sft"]
    loss = dashboard.ask("run", run="one/sft")["sections"][0]
    assert loss["title"] == "Loss" and loss["charts"][0]["series"] == [{"key": "train/loss", "name": "training"}]


def test_of_a_long_run_the_newest_phases_are_read_and_older_ones_when_they_are_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_run(tmp_path / "run", [row(0)], steps=0)
    with sqlite3.connect(folder / "journal.sqlite") as file:
        states = [(step, "trainer", "train", 1000.0 + step, 1000.5 + step) for step in range(300)]
        file.executemany("INSERT INTO transitions (step, sidecar, state, started_s, ended_s, incarnation) VALUES (?, ?, ?, ?, ?, 1)", states)
    asked = ({}, {"step": 290}, {"from": 280, "to": 290}, {"from": 100, "to": 290}, {"step": 3}, {"from": 0, "to": 300})
    whole = [{**Dashboard(tmp_path).ask("phases", run="run", **each), "count": 0} for each in asked]
    monkeypatch.setattr("tandem.dashboard.phases.RECENT", 50)
    assert Dashboard(tmp_path).ask("phases", run="run", step=290)["count"] == 50
    assert [{**Dashboard(tmp_path).ask("phases", run="run", **each), "count": 0} for each in asked] == whole
    one = Dashboard(tmp_path)
    assert [{**one.ask("phases", run="run", **each), "count": 0} for each in (*asked, *asked)] == [*whole, *whole]

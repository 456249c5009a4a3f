"""Dashboards and alerts on a running system: a run of reinforcement learning on two ranks, a run on data, a server and a gateway, and a real Prometheus."""

import contextlib
import json
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from gateway_process import Gateway, gateway
from http_processes import end, until
from package_data import make_datasets
from pretrain_recipe import write_recipe
from prometheus_process import Observability, need_programs, observability
from server_process import Server, server
from tiny_model import make_model, make_tokenizer

from tandem.observability.alerts import ALERTS
from tandem.observability.dashboards.all import DASHBOARDS
from tandem.observability.dashboards.model import Dashboard
from tandem.observability.recording import GEN_AI, RECORDS

ROOT = Path(__file__).resolve().parents[2]
BUILT_IN = {"ALERTS"}
"""Series that Prometheus writes when there are alerts."""
_WORDS = {"and", "or", "unless", "bool", "offset"}


def names_in(expr: str) -> set[str]:
    """Returns the names of the series in a query: its identifiers that are no function, keyword, label, string or duration."""
    text = re.sub(r'"[^"]*"', "", expr)
    text = re.sub(r"\{[^}]*\}|\[[^\]]*\]", "", text)
    text = re.sub(r"\b(by|without|on|ignoring|group_left|group_right)\s*\([^)]*\)", "", text)
    return {name for name in re.findall(r"[a-zA-Z_:][\w:]*(?!\s*\(|[\w:])", text) if name not in _WORDS}


def filled(expr: str) -> str:
    """Returns the query of a panel as Grafana asks it when everything is chosen."""
    return re.sub(r"\$(run|model|route|job)\b", ".*", expr).replace("$__rate_interval", "30s")


def test_the_names_in_a_query_are_found() -> None:
    expr = 'sum by (le, m) (rate(a:b_total{x=~"c"}[5m])) / on (y) group_left () max(d_e) * 0 and f unless histogram_quantile(0.9, g) or on () vector(0)'
    assert names_in(expr) == {"a:b_total", "d_e", "f", "g"}
    assert all(names_in(query) for dashboard in DASHBOARDS for query in dashboard.queries())


@dataclass
class System:
    """What runs. ``told``: the notifications of Alertmanager, as (status, name of the alert)."""

    prometheus: Observability
    server: Server
    gateway: Gateway
    targets: Path
    told: list[tuple[str, str]]


@contextlib.contextmanager
def webhook(told: list[tuple[str, str]]) -> Iterator[str]:
    """Gives the address of a receiver of notifications."""

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            told.extend((alert["status"], alert["labels"]["alertname"]) for alert in body["alerts"])
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    receiver = HTTPServer(("127.0.0.1", 0), Receiver)
    thread = threading.Thread(target=receiver.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{receiver.server_address[1]}/"
    finally:
        receiver.shutdown()
        thread.join()
        receiver.server_close()


@contextlib.contextmanager
def training(recipe: Path, log: Path, *overrides: str) -> Iterator[None]:
    with log.open("wb") as sink:
        process = subprocess.Popen(["nice", "-n", "15", sys.executable, "-m", "tandem.cli.main", "train", str(recipe), *overrides], stdout=sink, stderr=sink)
    try:
        until(lambda: b"metrics at http://" in log.read_bytes() or process.poll() is not None, "the metrics of the run")
        assert process.poll() is None, log.read_text()
        yield
        assert process.poll() is None, log.read_text()
    finally:
        end(process)


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    need_programs(alertmanager=True)
    folder = tmp_path_factory.mktemp("system")
    targets, told = folder / "targets", list[tuple[str, str]]()
    of_run = f"--metrics.targets_folder={targets}"
    made = folder / "data"
    made.mkdir()
    make_datasets(made, "train", "held")
    data = write_recipe(
        folder / "pretrain", made, data={"train": [{"path": str(made / "train")}], "held_out": str(made / "held"), "global_batch_size": 4},
        evaluation={"every_steps": 50, "sequences": 4}, run={"max_steps": 1_000_000}, checkpoint={"every_steps": 500},
    )  # fmt: skip
    small = [
        "--rollout.prompts_per_step=4", "--algorithm.group_size=2", "--evaluation.every_steps=20", "--evaluation.prompts=8", "--evaluation.final_prompts=8",
        "--sft.steps=12",
    ]  # fmt: skip
    with contextlib.ExitStack() as stack:
        url = stack.enter_context(webhook(told))
        prometheus = stack.enter_context(observability(folder, targets, "--webhook", url))
        model = make_model(folder / "model", make_tokenizer(folder / "tokenizer"), 0)
        (folder / "serve").mkdir()
        tiny = ("--served-model-name", "tiny", "--targets-folder", str(targets))
        serving = stack.enter_context(server(model, folder / "serve", *tiny))
        # The runs keep all cores busy, so a probe may take long.
        probes = {"interval_s": 1.0, "timeout_s": 10.0, "failures": 3}
        front = stack.enter_context(gateway(folder, [serving], targets_folder=str(targets), probes=probes))
        rl = ["--run.max_steps=1000000", f"--run.directory={folder}", "--run.name=rl", "--parallel.data=2", "--evaluation.target_accuracy=1.0", of_run, *small]
        stack.enter_context(training(ROOT / "recipes" / "sort.yaml", folder / "rl.log", *rl))
        stack.enter_context(training(data, folder / "pretrain.log", of_run))
        until(lambda: len(prometheus.query('tandem_steps_total{job=~"grpo|pretrain"} > 3')) == 2, "steps of both runs", 300)
        yield System(prometheus, serving, front, targets, told)
        assert prometheus.stop() == 0


def ask_until(system: System, condition: Callable[[], bool], what: str) -> None:
    """Waits for ``condition`` while clients ask the gateway."""

    def asked() -> bool:
        for stream in (True, False):
            system.gateway.post("/v1/completions", {"model": "tiny", "prompt": "the quick", "max_tokens": 8, "stream": stream})
        return condition()

    until(asked, what)


@pytest.mark.full
@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda dashboard: dashboard.name)
def test_every_query_of_a_dashboard_has_series_in_a_running_system(system: System, dashboard: Dashboard) -> None:
    prometheus = system.prometheus
    ask_until(system, lambda: all(prometheus.query(record.name) for record in RECORDS), "all recorded series")
    there = set(prometheus.api("label/__name__/values"))
    panels = [panel for row in dashboard.rows.values() for panel in row]
    missing = {panel.title: names_in(query.expr) - there - BUILT_IN for panel in panels for query in panel.queries}
    assert len(panels) > 10 and {title: names for title, names in missing.items() if names} == {}
    queries = [query for panel in panels for query in panel.queries]
    answers: dict[str, list[dict[str, Any]]] = {filled(query.expr): [] for query in queries}

    def all_answered() -> bool:
        # A scrape may come too late on a busy machine, after which a series has no value for a moment.
        answers.update({expr: prometheus.query(expr) for expr, answer in answers.items() if not answer})
        return all(answers.values())

    with contextlib.suppress(AssertionError):
        ask_until(system, all_answered, "an answer to every query")
    assert [expr for expr, answer in answers.items() if not answer] == []
    for query in queries:
        labels = set(re.findall(r"\{\{(\w+)\}\}", query.legend)) - {"run"}
        if not names_in(query.expr) & BUILT_IN:
            assert any(labels <= set(series["metric"]) for series in answers[filled(query.expr)]), query
    for query in dashboard.variables.values():
        name, label = re.fullmatch(r"label_values\((\S+), (\w+)\)", query).groups()  # type: ignore[union-attr]
        assert prometheus.api(f"label/{label}/values", **{"match[]": name}), query


@pytest.mark.full
def test_every_rule_names_series_that_a_running_system_has(system: System) -> None:
    prometheus = system.prometheus
    ask_until(system, lambda: all(prometheus.query(record.name) for record in RECORDS), "all recorded series")
    there = set(prometheus.api("label/__name__/values"))
    assert {rule.name: names_in(rule.expr) - there for rule in (*ALERTS, *RECORDS) if names_in(rule.expr) - there} == {}
    groups = prometheus.api("rules")["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert len(rules) == len(ALERTS) + len(RECORDS) and [rule for rule in rules if rule["health"] != "ok"] == []
    assert all(prometheus.query(f'{record.name}{{{label}="tiny"}}') for record in GEN_AI for label in re.findall(r'"(gen_ai_\w+)"', record.expr))


@pytest.mark.full
def test_an_alert_fires_when_a_server_is_killed_and_clears_when_it_is_back(system: System, tmp_path: Path) -> None:
    faults = {"TandemTargetDown", "TandemBackendNotReady"}
    prometheus, killed = system.prometheus, system.server
    until(lambda: not prometheus.firing() & faults, "quiet")
    assert killed.stop(signal.SIGKILL) == -signal.SIGKILL
    until(lambda: faults <= prometheus.firing(), "the alerts to fire", 300)
    until(lambda: {("firing", name) for name in faults} <= set(system.told), "the notifications", 120)
    model = next(iter(killed.log.parent.parent.glob("model")))
    port = killed.url.rpartition(":")[2]
    back = ("--served-model-name", "tiny", "--targets-folder", str(system.targets), "--port", port)
    with server(model, tmp_path, *back):
        until(lambda: not prometheus.firing() & faults, "the alerts to clear", 120)
        until(lambda: {("resolved", name) for name in faults} <= set(system.told), "the notifications", 180)
        instances = [series["metric"]["instance"] for series in prometheus.query('up{job="server"}')]
        assert instances == [f"127.0.0.1:{port}"], "the target of the process that was killed is gone"

"""The table of a run's nodes: of one that has ended from its journal and its metrics, of one that trains from a real etcd as well."""

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from browser import browser, tab
from etcd_server import EtcdServer
from recorded_runs import make_run, row

from tandem.config.recipe import load_config
from tandem.dashboard.nodes import nodes
from tandem.dashboard.open_run import OpenRun
from tandem.dashboard.report import write_report
from tandem.jobs.run_files import write_recipe
from tandem.metrics_database.promql.syntax import NAME
from tandem.metrics_database.store import FILE, MetricsWriter, Retention
from tandem.runtime.coordination.cordons import cordon
from tandem.runtime.coordination.etcd import EtcdStore
from tandem.runtime.coordination.membership import join
from tandem.runtime.coordination.session import Session
from tandem.runtime.health.node_watch import HEALTH, NodeReading
from tandem.runtime.records.journal import Journal
from tandem.runtime.records.run_lock import RunLock

ROOT = Path(__file__).resolve().parents[2]
LOOKED_S = 1_700_000_100.5


def run_with_nodes(folder: Path) -> Path:
    """Writes a run with a controller and three nodes, of which one is cordoned, and whose faults are over but for two."""
    run = make_run(folder, [row(step) for step in range(5)], steps=1)
    with Journal(run / "journal.sqlite") as journal:
        journal.set("node", "head")
        journal.set("device", "cuda")
        for kind, detail in (
            ("node", {"node": "n1", "state": "in use"}), ("node", {"node": "n2", "state": "in use"}),
            ("node", {"node": "n3", "state": "spare"}),
            ("straggler", {"rank": 1, "node": "n1", "reason": "rank 1 is a straggler"}),
            ("gpu_fault", {"node": "n1", "reason": "node n1: GPU 0:18: throttled"}),
            ("straggler_over", {"rank": 1, "node": "n1", "reason": "rank 1 holds up the run no longer"}),
            ("memory_growth", {"node": "head", "process": "worker (7)", "reason": "node head: the memory of worker (7) grows without end"}),
            ("cordon", {"node": "n2", "state": "cordoned", "reason": "its pod was lost"}), ("node", {"node": "n3", "state": "in use"}),
        ):  # fmt: skip
            journal.record_event(kind, {"step": 2, **detail})
    writer = MetricsWriter(run / FILE, Retention())
    series: list[tuple[str, dict[str, str], float]] = [
        *(("tandem_node_last_look_timestamp_seconds", {"node": node}, LOOKED_S + at) for at, node in enumerate(("head", "n1", "n3"))),
        ("tandem_gpu_fault", {"node": "n1", "gpu": "0:18"}, 1.0), ("tandem_gpu_fault", {"node": "n3", "gpu": "all"}, 0.0), ("up", {}, 1.0),
    ]
    writer.append([(tuple(sorted({NAME: name, **labels}.items())), round(LOOKED_S * 1000), value) for name, labels, value in series])
    writer.close()
    return run


def test_the_nodes_of_a_run_that_has_ended_are_what_its_journal_and_its_metrics_say(tmp_path: Path) -> None:
    told = nodes(OpenRun("run", run_with_nodes(tmp_path / "run")))
    assert told["source"] == "the run's journal and metrics database" and told["problem"] == ""
    assert [(each["node"], each["state"], each["devices"]) for each in told["nodes"]] == [
        ("head", "controller", ["cuda"]), ("n1", "in use", ["GPU 0:18"]), ("n2", "cordoned", []), ("n3", "in use", []),
    ]  # fmt: skip
    by_name = {each["node"]: each for each in told["nodes"]}
    assert by_name["n1"]["findings"] == ["node n1: GPU 0:18: throttled"], "what is over is no finding"
    assert by_name["head"]["findings"] == ["node head: the memory of worker (7) grows without end"]
    assert by_name["n2"]["reason"] == "its pod was lost" and by_name["n2"]["since_s"] > LOOKED_S and by_name["n3"]["reason"] == ""
    assert [each["seen_s"] for each in told["nodes"]] == [LOOKED_S, LOOKED_S + 1, 0.0, LOOKED_S + 2]
    assert nodes(OpenRun("other", make_run(tmp_path / "other", [row(0)])))["nodes"] == []


@pytest.mark.full
def test_the_nodes_of_a_run_that_trains_are_what_its_etcd_says_and_an_etcd_that_does_not_answer_is_named(etcd_server: EtcdServer, tmp_path: Path) -> None:
    run = run_with_nodes(tmp_path / "run")
    prefix = f"/dashboard-{time.time_ns()}"
    etcd = ["coordination.store=etcd", f"coordination.endpoints=[{etcd_server.url}]", f"coordination.prefix={prefix}"]
    write_recipe(load_config(ROOT / "recipes" / "sort.yaml", etcd), run)
    config = replace(etcd_server.config(), prefix=prefix)
    store, cluster, other = (EtcdStore(config, f"{prefix}/{name}/") for name in ("run", "@cluster", "run-2"))
    session, beside = Session(store, 10.0), Session(other, 10.0)
    join(session, "n1", {"agent": "x", "machine": "host-1"})
    join(session, "n3", {"agent": "y", "machine": "host-3"})
    join(beside, "n7", {"agent": "z", "machine": "host-7"})
    reading = NodeReading("n1", LOOKED_S + 60, [{"name": "NVIDIA H100"}] * 2, faults={"GPU 0:19 (NVIDIA H100)": "ECC"})
    store.put(HEALTH + "n1", json.dumps(reading.to_json()).encode())
    cordon(cluster, "host-3", "ticket 4711", "anna")
    try:
        with RunLock(run):
            told = nodes(OpenRun("run", run))
            page = write_report([run], tmp_path / "report.html")
        by_name: dict[str, Any] = {each["node"]: each for each in told["nodes"]}
        assert told["source"] == "the coordination store" and set(by_name) == {"head", "n1", "n2", "n3"}, "those of other runs are not in it"
        assert by_name["n1"]["lease"] == f"{session.lease:x}" and by_name["n1"]["devices"] == ["NVIDIA H100"] * 2 and by_name["n1"]["seen_s"] == LOOKED_S + 60
        assert by_name["n1"]["findings"] == ["GPU 0:19 (NVIDIA H100): ECC", "node n1: GPU 0:18: throttled"]
        assert (by_name["n3"]["state"], by_name["n3"]["reason"], by_name["n3"]["by"]) == ("cordoned", "ticket 4711", "anna")
        assert by_name["n2"]["state"] == "cordoned" and by_name["n2"]["lease"] == ""
        with browser() as chromium, tab(chromium, offline=True) as frozen:
            frozen.page.goto(f"{page.as_uri()}#/run/run/nodes")
            frozen.page.wait_for_selector("table")
            shown = frozen.page.locator("table").inner_text()
            assert "2 × NVIDIA H100" in shown and f"{session.lease:x}" in shown and "ticket 4711, by anna, since 20" in shown and frozen.problems == []
            assert frozen.violations() == []
    finally:
        for each in (session, beside, store, cluster, other):
            each.close()
    etcd_server.kill()
    try:
        with RunLock(run):
            told = nodes(OpenRun("run", run))
        assert told["source"].startswith("the run's journal") and "coordination store cannot be read" in told["problem"] and len(told["nodes"]) == 4
    finally:
        etcd_server.start()

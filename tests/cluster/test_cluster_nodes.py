"""``tandem nodes``: the nodes of runs as a real etcd has them, and cordons of the cluster that a person sets and removes."""

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from etcd_server import EtcdServer
from pod_runs import RECIPE

from tandem.runtime.coordination.cordons import cluster_prefix, cordon
from tandem.runtime.coordination.etcd import EtcdStore
from tandem.runtime.coordination.membership import join
from tandem.runtime.coordination.session import Session
from tandem.runtime.health.node_report import REPORTS, NodeReport
from tandem.runtime.health.node_watch import HEALTH, NodeReading

Here = Callable[..., str]


def test_nodes_of_two_runs_are_listed_with_what_they_have_and_cordons_are_set_and_removed(here: Here, etcd_server: EtcdServer, tmp_path: Path) -> None:
    prefix = f"/nodes-{time.time_ns()}"
    config = replace(etcd_server.config(), prefix=prefix)
    etcd = ("--coordination.store=etcd", f"--coordination.endpoints=[{etcd_server.url}]", f"--coordination.prefix={prefix}")
    first, second = (EtcdStore(config, f"{prefix}/{run}/") for run in ("a", "b"))
    session, other = Session(first, 10.0), Session(second, 10.0)
    join(session, "n1", {"agent": "x", "machine": "host-1"})
    join(session, "n2", {"agent": "y", "machine": "host-2"})
    join(other, "n1", {"agent": "z", "machine": "host-3"})
    first.put(HEALTH + "n1", json.dumps(NodeReading("n1", 1.0, [{"name": "NVIDIA H100"}, {"name": "NVIDIA H100"}]).to_json()).encode())
    second.put(REPORTS + "n1", NodeReport("n1", devices=("NVIDIA A10",)).to_json().encode())
    cordon(first, "n2", "its pod was lost", "a")

    def listed() -> dict[tuple[str, str], dict[str, object]]:
        return {(each["run"], each["node"]): each for each in json.loads(here("nodes", "list", RECIPE, "--json", *etcd))["nodes"]}

    found = listed()
    assert {key: each["state"] for key, each in found.items()} == {("a", "n1"): "joined", ("a", "n2"): "cordoned", ("b", "n1"): "joined"}
    assert found["a", "n1"]["devices"] == ["NVIDIA H100", "NVIDIA H100"] and found["b", "n1"]["devices"] == ["NVIDIA A10"]
    assert found["a", "n1"]["lease"] == session.lease and found["a", "n2"]["reason"] == "its pod was lost" and found["a", "n2"]["by"] == "a"
    assert "is cordoned for all runs" in here("nodes", "cordon", RECIPE, "host-3", "--reason", "ticket 4711", *etcd)
    here("nodes", "cordon", RECIPE, "n9", "--reason", "not there yet", *etcd)
    found = listed()
    assert found["b", "n1"]["state"] == "cordoned" and found["b", "n1"]["reason"] == "ticket 4711" and found["a", "n1"]["state"] == "joined"
    assert found["", "n9"]["reason"] == "not there yet"
    lines = here("nodes", "list", RECIPE, *etcd).splitlines()
    assert f"node n1: joined (run a, lease {session.lease}, on host-1, 2 x NVIDIA H100)" in lines
    assert any(line.startswith("node n9: cordoned, by ") and line.endswith(": not there yet (all runs)") for line in lines)
    for node in ("host-3", "n9"):
        assert here("nodes", "uncordon", RECIPE, node, *etcd) == f"node {node} takes pods again\n"
    assert "is not cordoned under" in here("nodes", "uncordon", RECIPE, "n9", *etcd)
    assert listed()["b", "n1"]["state"] == "joined"
    for each in (session, other):
        each.close()
    store = EtcdStore(config, cluster_prefix(config))
    assert store.list("") == []
    for each in (first, second, store):
        each.close()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("list", RECIPE), "share no cluster: coordination.store is not etcd"), (("list", RECIPE, "n1"), "'list' takes neither a node nor --reason"),
        (("cordon", RECIPE), "name the node to cordon"), (("cordon", RECIPE, "n1"), "say why with --reason"),
        (("uncordon", RECIPE, "n1", "--reason", "x"), "'uncordon' takes no --reason"),
        (("cordon", RECIPE, "a/b", "--reason", "x", "--coordination.store=etcd"), "is no name of a node"),
    ],
)  # fmt: skip
def test_what_cannot_be_meant_is_refused_in_one_line(arguments: tuple[str, ...], says: str, here: Here) -> None:
    assert says in here("nodes", *arguments)

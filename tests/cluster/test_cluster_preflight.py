"""The preflight names the node that is not fit: reports against cases worked by hand, and real nodes with a fault each."""

import itertools
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from network import Host, Network, why_not
from pod_runs import RECIPE
from wall_clock import WallClock

from tandem.cluster.health.links import rounds
from tandem.cluster.health.preflight import Outcome, check_nodes, check_outcome, preflight
from tandem.config.cluster import ClusterConfig
from tandem.runtime.coordination.embedded import EmbeddedStore
from tandem.runtime.health.compare import findings
from tandem.runtime.health.node_report import NodeReport, read_report
from tandem.types import RunError, UserError

ROOT = Path(__file__).parents[2]
VERSIONS = {"tandem": "1.0", "torch": "2.13", "driver": "550.90.07"}
GIB = 2**30


def fleet(count: int = 4, **changes: NodeReport) -> list[NodeReport]:
    """Returns reports of equal nodes n1, n2, ...; ``changes`` has those of some of them."""
    names = [f"n{number + 1}" for number in range(count)]
    one = NodeReport("", VERSIONS, ("H100",) * 2, {"matrix products of GPU 0": 700e12, "disk": 2e9}, {"disk": 50 * GIB, "shm": 9 * GIB, "memory": 90 * GIB})
    return [changes.get(name, replace(one, node=name)) for name in names]


def texts(reports: Sequence[NodeReport], missing: Mapping[str, str] | None = None, **limits: float) -> list[str]:
    return [each.text for each in findings(reports, missing or {}, ClusterConfig(**limits))]  # type: ignore[arg-type]


def one(**values: object) -> NodeReport:
    return replace(fleet()[2], **values)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wrong", "line"),
    [
        ({"speeds": {"matrix products of GPU 0": 350e12, "disk": 2e9}},
         "node n3 is slow: matrix products of GPU 0 3.5e+05 GFLOP/s, 50% of the median of 4 nodes (7e+05)"),
        ({"speeds": {"matrix products of GPU 0": 700e12, "disk": 0.4e9}}, "node n3 is slow: disk 400 MB/s, 20% of the median of 4 nodes (2e+03)"),
        ({"devices": ("H100",)}, "node n3 has 1 x H100, and most nodes have 2 x H100; see 'nvidia-smi' there"),
        ({"versions": {**VERSIONS, "driver": "535.1"}}, "node n3 has NVIDIA driver 535.1 and n1 has 550.90.07; install the same version on all nodes"),
        ({"versions": {**VERSIONS, "tandem": "0.9"}}, "node n3 has Tandem 0.9 and n1 has 1.0; install the same version on all nodes"),
        ({"clock_offset_s": 61.0, "clock_error_s": 0.5},
         "the clock of node n3 is 61.0 s behind that of n1, more than cluster.max_clock_offset_s (1); start its time service (chronyd or ntpd)"),
        ({"clock_offset_s": 1.4, "clock_error_s": 0.5}, ""),
        ({"free_bytes": {"disk": GIB // 2, "shm": GIB}},
         "node n3 has 0.5 GiB free in its folder for temporary files, less than cluster.min_disk_gib (1); make room, or exclude the node"),
        ({"free_bytes": {"disk": 2 * GIB, "shm": 2**20}},
         "node n3 has 0.000977 GiB free in /dev/shm, less than cluster.min_shm_gib (0.0625); make room, or exclude the node"),
        ({"failed": {"disk": "No space left on device"}}, "node n3: disk: No space left on device"),
    ],
    ids=["product", "disk speed", "device", "driver", "version", "clock", "clock within its error", "disk", "shm", "failed"],
)  # fmt: skip
def test_each_fault_of_a_node_is_one_line_that_names_it(wrong: dict[str, object], line: str) -> None:
    assert texts(fleet()) == []
    assert texts(fleet(n3=one(**wrong))) == ([line] if line else [])


def test_two_nodes_have_no_median_and_a_share_of_0_compares_nothing() -> None:
    slow = replace(fleet()[1], speeds={"disk": 1.0})
    assert texts(fleet(2, n2=slow)) == [] and texts(fleet(3, n2=slow), min_speed=0.0) == []
    assert len(texts(fleet(3, n2=slow))) == 1


def test_nodes_of_two_kinds_are_compared_with_those_of_their_own() -> None:
    others = {f"n{number}": replace(fleet()[0], node=f"n{number}", devices=("L40S",), speeds={"disk": 1e8}) for number in (4, 5, 6)}
    links = {f"n{number}": 1e9 if number > 3 else 10e9 for number in range(1, 7)}
    reports = [
        replace(report, links={other: min(links[report.node], rate) for other, rate in links.items() if other != report.node})
        for report in fleet(6, **others)
    ]
    kinds = {f"n{number}": "0" if number <= 3 else "1" for number in range(1, 7)}
    assert findings(reports, {}, ClusterConfig(), kinds=kinds) == [] and findings(reports, {}, ClusterConfig()) != []
    # One of three is slow for its kind, in what it computes and in its links.
    reports[5] = replace(reports[5], speeds={"disk": 1e7}, links={**reports[5].links, "n4": 1e8, "n5": 1e8})
    slow = findings(reports, {}, ClusterConfig(), kinds=kinds)
    assert [each.node for each in slow] == ["n6", "n6"] and "10% of the median of 3 nodes" in slow[0].text and "slow with n4 (0.1 GB/s), n5" in slow[1].text


def test_bad_links_name_the_fewest_nodes_that_explain_them() -> None:
    names = ["n1", "n2", "n3", "n4"]

    def linked(bad: dict[frozenset[str], float]) -> list[NodeReport]:
        rates = {pair: bad.get(frozenset(pair), 10e9) for pair in itertools.permutations(names, 2)}
        return [replace(report, links={b: rate for (a, b), rate in rates.items() if a == report.node}) for report in fleet()]

    of_n3 = {frozenset(("n3", other)): 1e9 for other in names if other != "n3"}
    assert texts(linked({})) == []
    assert texts(linked(of_n3)) == [
        "node n3 is slow with n1 (1 GB/s), n2 (1 GB/s), n4 (1 GB/s), where the median of the nodes' fastest links is 10 GB/s; look at its network"
    ]
    # Of one pair, the node that has not the controller.
    assert texts(linked({frozenset(("n1", "n2")): 0.0})) == ["node n2 could not reduce with n1; look at its network"]


@pytest.mark.parametrize("count", [2, 3, 4, 7, 8])
def test_the_rounds_have_every_pair_once_and_no_node_twice_at_a_time(count: int) -> None:
    nodes = [f"n{number}" for number in range(count)]
    made = rounds(nodes)
    assert all(len({node for pair in pairs for node in pair}) == 2 * len(pairs) for pairs in made)
    assert sorted(tuple(sorted(pair)) for pairs in made for pair in pairs) == sorted(itertools.combinations(nodes, 2))


def test_in_a_large_fleet_every_node_has_eight_partners() -> None:
    partners = [node for pairs in rounds([str(number) for number in range(1000)]) for pair in pairs for node in pair]
    assert {partners.count(str(number)) for number in (0, 1, 500, 999)} == {8}


def test_spares_take_the_places_of_broken_nodes_and_mend_no_setup() -> None:
    nodes = ["n1", "n2", "n3", "n4"]

    def outcome(**changes: NodeReport) -> Outcome:
        found = findings(fleet(**changes), {}, ClusterConfig())
        return Outcome(fleet(**changes), found, [node for node in nodes if node not in {each.node for each in found}])

    broken = outcome(n3=one(devices=()))
    assert [each.node for each in check_outcome(broken, nodes, ClusterConfig(spares=1))] == ["n3"]
    with pytest.raises(UserError, match=r"^node n3 has no GPU.*: 3 of 4 nodes are fit and the run needs 4 \(cluster.spares is 0\); repair or exclude them"):
        check_outcome(broken, nodes, ClusterConfig())
    with pytest.raises(UserError, match="and the first one, n1, which has the controller"):
        check_outcome(outcome(n1=replace(fleet()[0], free_bytes={"disk": 0, "shm": GIB})), nodes, ClusterConfig(spares=2))
    with pytest.raises(UserError, match=r"^node n3 has Tandem 0.9 and n1 has 1.0; install the same version on all nodes$"):
        check_outcome(outcome(n3=one(versions={**VERSIONS, "tandem": "0.9"})), nodes, ClusterConfig(spares=2))
    with pytest.raises(UserError, match="node 'n2' is 2 times in the list of nodes; name each once"):
        check_nodes(["n1", "n2", "n2"])


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"node": 3, "devices": []}', '{"node": "a", "devices": [], "speeds": {"x": "fast"}}', b"\xff"])
def test_a_file_that_is_no_report_is_one_line(text: str | bytes) -> None:
    report = one(links={"n1": 3.0})
    assert read_report(report.to_json(), "it") == report
    with pytest.raises(RunError, match=r"^it is no report of a node; write it with 'tandem doctor --preflight --json'$"):
        read_report(text, "it")


# -- real nodes ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def network() -> Iterator[Network]:
    if why := why_not():
        pytest.skip(why)
    made = Network()
    yield made
    made.close()


@pytest.mark.full
def test_of_four_real_nodes_a_small_shared_memory_a_cut_wire_and_a_wrong_clock_are_found(network: Network, tmp_path: Path) -> None:
    hosts = [network.add(f"n{number}", number) for number in range(1, 5)]
    # As a container runtime gives it.
    hosts[1].shm_mib = 8
    run = tmp_path / "run"
    (run / "pod").mkdir(parents=True)
    (run / "config.yaml").write_text(yaml.safe_dump(yaml.safe_load(RECIPE.read_text())))
    clock = WallClock(tmp_path / "clock", -7200.0)
    config = ClusterConfig(min_speed=0.0, min_shm_gib=0.02, min_disk_gib=0.0, preflight_timeout_s=240)
    store = EmbeddedStore(run / "pod" / "store.sqlite")

    def begin(host: Host, number: int) -> "subprocess.Popen[str]":
        wrong = clock.environment if number == 4 else {}
        environment = {**os.environ, **wrong, "SLURMD_NODENAME": f"n{number}", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "tandem.cluster.health.on_node", str(run), hosts[0].address, "--cluster.preflight_timeout_s=240"]
        return subprocess.Popen(host.inside(*command), env=environment, cwd=ROOT, text=True, stderr=subprocess.PIPE)

    hosts[2].cut(hosts[1].address, hosts[3].address)
    nodes = [begin(host, number) for number, host in enumerate(hosts, start=1)]
    try:
        outcome = preflight(store, ["n1", "n2", "n3", "n4"], config, lambda: all(node.poll() is not None for node in nodes))
        assert all(node.wait(60) == 0 for node in nodes), [node.communicate() for node in nodes]
    finally:
        for node in nodes:
            node.kill()
            node.wait()
        left = store.list("")
        store.close()
    text = [each.text for each in outcome.found]
    assert len(text) == 3 and list(outcome.fit) == ["n1"] and left == [], outcome
    assert text[0].startswith("node n2 has 0.00") and "free in /dev/shm, less than cluster.min_shm_gib (0.02)" in text[0]
    assert text[1] == "node n3 could not reduce with n2, n4; look at its network"
    assert text[2].startswith("the clock of node n4 is 7") and " s behind that of n1" in text[2]
    reports = {report.node: report for report in outcome.reports}
    assert all(report.speeds[what] > 0 for report in reports.values() for what in ("matrix products", "memory", "disk"))
    assert all(reports["n1"].links[other] > 0 for other in ("n2", "n3", "n4")) and reports["n4"].links["n3"] == 0

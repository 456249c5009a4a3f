"""``tandem doctor`` measures a machine as a node, and says which of several is not fit."""

import json
from dataclasses import replace
from pathlib import Path

from tandem.runtime.health.node_report import read_report


def test_doctor_measures_this_machine_and_compares_its_report_with_others(command, tmp_path: Path) -> None:
    done = command("doctor", "--preflight", "--json")
    assert done.code == 0, done
    mine = replace(read_report(done.out, "it"), node="n1", failed={})
    assert min(mine.speeds.values()) > 0 and set(mine.speeds) == {"matrix products", "memory", "disk"}
    assert mine.free_bytes["memory"] > 0 and mine.versions["torch"]
    slow = replace(mine, node="n3", speeds={**mine.speeds, "memory": mine.speeds["memory"] / 3})
    paths = [tmp_path / f"{report.node}.json" for report in (mine, replace(mine, node="n2"), slow)]
    for path, report in zip(paths, (mine, replace(mine, node="n2"), slow), strict=True):
        path.write_text(report.to_json())
    done = command("doctor", "--compare", *map(str, paths))
    assert done.code == 1 and done.out.splitlines()[-1] == "2 of 3 nodes are fit" and "node n3 is slow: memory" in done.out, done
    done = command("doctor", "--compare", *map(str, paths[:2]))
    assert (done.code, done.out) == (0, "2 of 2 nodes are fit\n")
    assert "node 'n1' is 2 times in the list of nodes" in command("doctor", "--compare", str(paths[0]), str(paths[0])).err
    (tmp_path / "other.json").write_text(json.dumps({"node": 1}))
    for name, why in (("other.json", "is no report of a node"), ("missing.json", "cannot be read: No such file or directory")):
        done = command("doctor", "--compare", str(tmp_path / name))
        assert done.code in (1, 2) and why in done.err and done.err.count("\n") == 1, done
    assert command("doctor", "--json").err.startswith("tandem: --json is given without --preflight")

"""``tandem up observability``: what it writes, refuses and ends."""

import json
from pathlib import Path

import pytest
import yaml

from tandem.cli.main import main
from tandem.observability.compose import IMAGES
from tandem.observability.dashboards.all import DASHBOARDS
from tandem.runtime.rpc.listener import listen


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["up", "observability", *arguments]) == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1, line
    return line


def log_folders(folder: Path) -> list[str]:
    return ["--runs-folder", str(folder / "runs"), "--log-folder", str(folder / "logs")]


def test_emit_writes_files_that_name_only_what_is_there(tmp_path: Path) -> None:
    folder = tmp_path / "o"
    arguments = ["--folder", str(folder), "--targets-folder", str(tmp_path / "t"), "--port", "19090", *log_folders(tmp_path)]
    assert main(["up", "observability", "--emit", *arguments]) == 0
    compose = yaml.safe_load((folder / "docker-compose.yml").read_text())
    assert set(compose["services"]) == set(IMAGES)
    named = set()
    for service in compose["services"].values():
        for volume in service.get("volumes", ()):
            outside, inside = volume.split(":")[:2]
            if outside.startswith("./"):
                assert (folder / outside).exists(), volume
            elif not outside.startswith("/"):
                named.add(outside)
            elif service["image"] == IMAGES["alloy"]:
                assert outside == inside and outside in (str(tmp_path / "runs"), str(tmp_path / "logs"))
            else:
                assert outside == str(tmp_path / "t")
                files = yaml.safe_load((folder / "prometheus-docker.yml").read_text())["scrape_configs"][0]["file_sd_configs"][0]["files"]
                assert files == [f"{inside}/*.json"], "the configuration names it by the path inside"
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))
        of_host = service.get("network_mode") == "host"
        assert not of_host or "127.0.0.1" in json.dumps(service.get("command", service.get("environment"))), "nothing listens on another address"
    assert named == set(compose["volumes"])
    assert yaml.safe_load((folder / "prometheus.yml").read_text())["scrape_configs"][0]["file_sd_configs"][0]["files"] == [f"{tmp_path / 't'}/*.json"]
    sources = {each["uid"]: each["url"] for each in yaml.safe_load((folder / "grafana/datasources/tandem.yml").read_text())["datasources"]}
    assert sources["tandem"] == "http://127.0.0.1:19090"
    for dashboard in DASHBOARDS:
        written = json.loads((folder / f"dashboards/{dashboard.name}.json").read_text())
        panels = [panel for panel in written["panels"] if panel["type"] != "row"]
        assert [target["expr"] for panel in panels for target in panel["targets"]] == dashboard.queries()
        assert all(target["datasource"]["uid"] in sources for panel in panels for target in panel["targets"])
        assert len({panel["id"] for panel in written["panels"]}) == len(written["panels"])
        places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in written["panels"]}
        assert len(places) == len(written["panels"]), "no panel lies on another"


def test_what_cannot_work_is_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    targets = ["--targets-folder", str(tmp_path / "t")]
    assert "the folder" in refused(["--emit", "--folder", str(tmp_path / "file" / "x")], capsys)
    assert "--interval is 0" in refused(["--interval", "0"], capsys)
    assert "--retention is 'ever'" in refused(["--retention", "ever"], capsys)
    assert "--port is 70000" in refused(["--port", "70000"], capsys)
    assert "both 9093" in refused(["--port", "9093"], capsys)
    assert "--webhook is 'x'" in refused(["--webhook", "x"], capsys)
    monkeypatch.setattr("tandem.observability.programs.shutil.which", lambda name: f"/bin/{name}")
    assert "targets folder" in refused(["--targets-folder", str(tmp_path / "file" / "x")], capsys)
    with listen("127.0.0.1", 0) as taken:
        port = str(taken.getsockname()[1])
        assert f"--port {port} is taken" in refused([*targets, "--port", port], capsys)
        assert f"--alertmanager-port {port} is taken" in refused([*targets, "--port", "0", "--alertmanager-port", port], capsys)
    monkeypatch.setattr("tandem.observability.programs.shutil.which", lambda name: None)
    assert "Prometheus is not on the PATH; apt-get install prometheus" in refused(targets, capsys)
    assert not (tmp_path / "observability").exists()

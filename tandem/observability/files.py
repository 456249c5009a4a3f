"""Writes what Prometheus, Alertmanager and Grafana read to one folder."""

import json
from pathlib import Path

from tandem.observability.alerts import ALERTS
from tandem.observability.alloy import alloy_config
from tandem.observability.compose import ALLOY_FILE, CONFIGURATION, TARGETS, compose_files
from tandem.observability.dashboards.all import DASHBOARDS
from tandem.observability.dashboards.model import to_json
from tandem.observability.prometheus import alertmanager_config, prometheus_config
from tandem.observability.recording import RECORDS
from tandem.observability.rules import rules_file
from tandem.types import UserError

HEAD = "# Written by 'tandem up observability', which writes it again.\n"


def observability_files(
    targets_folder: Path, port: int, alertmanager_port: int, *, interval_s: float, webhook: str | None, runs_folder: Path, log_folder: Path,
    has_alertmanager: bool = True,
) -> dict[str, str]:  # fmt: skip
    """Returns the text of each file, by its path in the folder. ``runs_folder``: in which runs have their folders. ``log_folder``: of the
    logs of servers and gateways. ``has_alertmanager``: Prometheus sends alerts to ``alertmanager_port``."""
    written = {
        "prometheus.yml": prometheus_config(targets_folder, interval_s, f"127.0.0.1:{alertmanager_port}" if has_alertmanager else None),
        CONFIGURATION: prometheus_config(TARGETS, interval_s, f"127.0.0.1:{alertmanager_port}"),
        "alertmanager.yml": alertmanager_config(webhook),
        "rules/recording.yml": rules_file("tandem-recording", RECORDS),
        "rules/alerts.yml": rules_file("tandem-alerts", ALERTS),
        **compose_files(targets_folder, port, alertmanager_port, (runs_folder, log_folder)),
    }
    dashboards = {f"dashboards/{each.name}.json": json.dumps(to_json(each), indent=1) + "\n" for each in DASHBOARDS}
    alloy = {ALLOY_FILE: HEAD.replace("#", "//", 1) + alloy_config(runs_folder, log_folder)}
    return {name: HEAD + text for name, text in written.items()} | dashboards | alloy


def write_files(folder: Path, files: dict[str, str]) -> None:
    """Writes ``files`` to ``folder``. Raises ``UserError`` where that cannot be."""
    try:
        for name, text in files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"the folder '{folder}' cannot be written ({error.strerror}); name another one with --folder") from None

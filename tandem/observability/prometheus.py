"""The configuration of Prometheus and of Alertmanager."""

from pathlib import Path
from typing import Any

import yaml


def prometheus_config(targets_folder: Path, interval_s: float, alertmanager: str | None) -> str:
    """Returns ``prometheus.yml``, which has the rule files beside it: scrapes the targets folder each ``interval_s``. ``alertmanager``: its host and port, if
    there is one."""
    interval = f"{round(interval_s * 1000)}ms"
    config: dict[str, Any] = {
        "global": {"scrape_interval": interval, "scrape_timeout": f"{round(min(interval_s, 10.0) * 1000)}ms", "evaluation_interval": interval},
        "rule_files": ["rules/*.yml"],
        "scrape_configs": [
            {
                "job_name": "tandem",
                # A run names itself in its series, as in the targets folder.
                "honor_labels": True,
                "file_sd_configs": [{"files": [str(targets_folder / "*.json")], "refresh_interval": "5s"}],
            }
        ],
    }
    if alertmanager is not None:
        config["alerting"] = {"alertmanagers": [{"static_configs": [{"targets": [alertmanager]}]}]}
    return yaml.safe_dump(config, sort_keys=False)


def alertmanager_config(webhook: str | None) -> str:
    """Returns ``alertmanager.yml``: alerts of one run, or of one server, are one notification. ``webhook``: the address that gets them; without one they are
    only shown."""
    receiver: dict[str, Any] = {"name": "people"}
    if webhook is not None:
        receiver["webhook_configs"] = [{"url": webhook, "send_resolved": True}]
    route = {"receiver": "people", "group_by": ["alertname", "run", "instance"], "group_wait": "10s", "group_interval": "1m", "repeat_interval": "4h"}
    return yaml.safe_dump({"route": route, "receivers": [receiver]}, sort_keys=False)

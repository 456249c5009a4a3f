"""A ``docker compose`` file with Prometheus, Alertmanager, Grafana, Jaeger, Loki and Alloy, and what they read."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from tandem.observability.dashboards.model import DATASOURCE

IMAGES = {
    "prometheus": "prom/prometheus:v3.5.0",
    "alertmanager": "prom/alertmanager:v0.28.1",
    "grafana": "grafana/grafana:12.1.0",
    "jaeger": "jaegertracing/jaeger:2.9.0",
    "loki": "grafana/loki:3.5.3",
    "alloy": "grafana/alloy:v1.10.0",
}
COMPOSE_FILE = "docker-compose.yml"
CONFIGURATION = "prometheus-docker.yml"
"""Of the Prometheus in a container, which has the targets folder at another place."""
TARGETS = Path("/etc/tandem/targets")
ALLOY_FILE = "config.alloy"
DASHBOARD_FOLDER = "/etc/tandem/dashboards"
"""Of Grafana, in its container."""
LOKI, JAEGER = "tandem-loki", "tandem-jaeger"
"""Data sources of Grafana."""
_LOOPBACK = "127.0.0.1"


def compose_files(targets_folder: Path, port: int, alertmanager_port: int, log_folders: Sequence[Path]) -> dict[str, str]:
    """Returns the files by their paths in the folder. ``log_folders``: whose logs Alloy reads. Prometheus, Alertmanager, Grafana and Alloy have the machine's
    own network, where targets answer on 127.0.0.1; nothing listens on another address."""
    at = {name: f"http://{_LOOPBACK}:{number}" for name, number in (("prometheus", port), ("loki", 3100), ("jaeger", 16686))}
    services = _services(targets_folder, port, alertmanager_port, log_folders)
    volumes: dict[str, Any] = {name: {} for name in ("prometheus", "alertmanager", "grafana", "loki", "alloy")}
    return {
        COMPOSE_FILE: _yaml({"name": "tandem-observability", "services": services, "volumes": volumes}),
        "grafana/datasources/tandem.yml": datasources_file(**at), "grafana/dashboards/tandem.yml": dashboards_file(),
        "loki.yml": _yaml(LOKI_CONFIG),
    }


def datasources_file(*, prometheus: str, loki: str, jaeger: str) -> str:
    """Returns Grafana's file of data sources, at these addresses; a line of a log leads to its trace, and a trace to its lines."""
    sources = [
        {"name": "Prometheus", **DATASOURCE, "url": prometheus, "isDefault": True},
        {"name": "Loki", "type": "loki", "uid": LOKI, "url": loki, "jsonData": {"derivedFields": [_TRACE_OF_LINE]}},
        {"name": "Jaeger", "type": "jaeger", "uid": JAEGER, "url": jaeger, "jsonData": {"tracesToLogsV2": _LINES_OF_TRACE}},
    ]
    return _yaml({"apiVersion": 1, "datasources": sources})


def dashboards_file() -> str:
    """Returns Grafana's file that says where its dashboards are."""
    return _yaml({"apiVersion": 1, "providers": [{"name": "tandem", "type": "file", "options": {"path": DASHBOARD_FOLDER}}]})


def _services(targets_folder: Path, port: int, alertmanager_port: int, log_folders: Sequence[Path]) -> dict[str, Any]:
    common: dict[str, dict[str, Any]] = {name: {"image": image, "restart": "unless-stopped"} for name, image in IMAGES.items()}
    of_host = {"network_mode": "host"}
    return {
        "prometheus": {
            **common["prometheus"], **of_host,
            "command": ["--config.file=/etc/prometheus/prometheus.yml", "--storage.tsdb.path=/prometheus", f"--web.listen-address={_LOOPBACK}:{port}"],
            "volumes": [
                f"./{CONFIGURATION}:/etc/prometheus/prometheus.yml:ro", "./rules:/etc/prometheus/rules:ro", f"{targets_folder}:{TARGETS}:ro",
                "prometheus:/prometheus",
            ],
        },
        "alertmanager": {
            **common["alertmanager"], **of_host,
            "command": ["--config.file=/etc/alertmanager/alertmanager.yml", "--storage.path=/alertmanager", "--cluster.listen-address=",
                        f"--web.listen-address={_LOOPBACK}:{alertmanager_port}"],
            "volumes": ["./alertmanager.yml:/etc/alertmanager/alertmanager.yml:ro", "alertmanager:/alertmanager"],
        },
        "grafana": {
            **common["grafana"], **of_host,
            "environment": {"GF_SERVER_HTTP_ADDR": _LOOPBACK, "GF_SERVER_HTTP_PORT": "3000", "GF_ANALYTICS_REPORTING_ENABLED": "false"},
            "volumes": ["./grafana:/etc/grafana/provisioning:ro", f"./dashboards:{DASHBOARD_FOLDER}:ro", "grafana:/var/lib/grafana"],
        },
        "jaeger": {**common["jaeger"], "ports": [f"{_LOOPBACK}:{each}:{each}" for each in (16686, 4317, 4318)]},
        "loki": {
            **common["loki"], "command": ["-config.file=/etc/loki/loki.yml"], "ports": [f"{_LOOPBACK}:3100:3100"],
            "volumes": ["./loki.yml:/etc/loki/loki.yml:ro", "loki:/loki"],
        },
        "alloy": {
            **common["alloy"], **of_host,
            "command": ["run", f"--server.http.listen-addr={_LOOPBACK}:12345", "--storage.path=/var/lib/alloy/data", f"/etc/alloy/{ALLOY_FILE}"],
            # At their own paths, so that one configuration is for the container and for the machine.
            "volumes": [f"./{ALLOY_FILE}:/etc/alloy/{ALLOY_FILE}:ro", *(f"{folder}:{folder}:ro" for folder in log_folders), "alloy:/var/lib/alloy/data"],
        },
    }  # fmt: skip


# A '$' that Grafana does not replace by a variable of the environment is written twice.
_TRACE_OF_LINE = {
    "name": "trace", "matcherRegex": '"trace_id": "([0-9a-f]{32})"', "datasourceUid": JAEGER, "url": "$${__value.raw}", "urlDisplayLabel": "Trace",
}  # fmt: skip
_LINES_OF_TRACE = {
    "datasourceUid": LOKI, "customQuery": True, "query": '{job="tandem"} | trace_id = `$${__trace.traceId}`', "spanStartTimeShift": "-1m",
    "spanEndTimeShift": "1m",
}  # fmt: skip
LOKI_CONFIG: dict[str, Any] = {
    "auth_enabled": False,
    "server": {"http_listen_port": 3100},
    "common": {
        "path_prefix": "/loki", "replication_factor": 1, "ring": {"kvstore": {"store": "inmemory"}},
        "storage": {"filesystem": {"chunks_directory": "/loki/chunks", "rules_directory": "/loki/rules"}},
    },
    "schema_config": {
        "configs": [{"from": "2025-01-01", "store": "tsdb", "object_store": "filesystem", "schema": "v13", "index": {"prefix": "index_", "period": "24h"}}]
    },
}  # fmt: skip


def _yaml(data: Any) -> str:
    return yaml.safe_dump(data, sort_keys=False, width=160)

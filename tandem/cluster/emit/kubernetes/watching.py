"""What watches over an emitted topology on Kubernetes: Prometheus with rules and Alertmanager, Jaeger, Loki with the logs that Alloy sends it, and Grafana."""

import json

import yaml

from tandem.cluster.emit.kubernetes.objects import PART_OF, Place, Program, config_map, reached_from, reader
from tandem.cluster.launch.kubernetes.pod_template import Manifest
from tandem.observability.alerts import ALERTS
from tandem.observability.alloy import LABELS, METADATA
from tandem.observability.compose import DASHBOARD_FOLDER, IMAGES, LOKI_CONFIG, dashboards_file, datasources_file
from tandem.observability.dashboards.all import DASHBOARDS
from tandem.observability.dashboards.model import to_json
from tandem.observability.prometheus import alertmanager_config
from tandem.observability.recording import RECORDS
from tandem.observability.rules import rules_file

COLLECTOR = "http://jaeger:4318"
"""Where spans are sent, over OTLP."""
METRIC_PORTS = ("http", "metrics")
"""Names of the ports of containers that answer ``/metrics``."""
_DAYS, _GRAFANA = "15d", "grafana"


def watching(place: Place, traced: tuple[str, ...], storage: str) -> dict[str, list[Manifest]]:
    """Returns the objects of each file. ``traced``: components that send spans. ``storage``: of the volume of Prometheus, and of that of Loki."""
    return {
        "prometheus.yaml": _prometheus(place, storage), "jaeger.yaml": _jaeger(place, traced), "loki.yaml": _loki(place, storage),
        "dashboards.yaml": [*_dashboards(place), *_grafana(place)],
    }  # fmt: skip


def prometheus_file(place: Place) -> str:
    """Returns ``prometheus.yml``: each pod of Tandem in the namespace is scraped, at its port for metrics."""
    pod = "__meta_kubernetes_pod_"
    relabel = [
        {"source_labels": [f"{pod}label_app_kubernetes_io_part_of", f"{pod}label_app_kubernetes_io_name"], "regex": ".*tandem.*", "action": "keep"},
        {"source_labels": [f"{pod}container_port_name"], "regex": "|".join(METRIC_PORTS), "action": "keep"},
        {"source_labels": [f"{pod}phase"], "regex": "Failed|Succeeded", "action": "drop"},
        {"source_labels": [f"{pod}name"], "target_label": "instance"},
        {"source_labels": [f"{pod}node_name"], "target_label": "node"},
        {"source_labels": [f"{pod}label_app_kubernetes_io_component"], "target_label": "job"},
    ]
    scrape = {
        "job_name": "tandem",
        # A run names itself in its series.
        "honor_labels": True,
        "kubernetes_sd_configs": [{"role": "pod", "namespaces": {"names": [place.namespace]}}], "relabel_configs": relabel,
    }  # fmt: skip
    config = {
        "global": {"scrape_interval": "15s", "scrape_timeout": "10s", "evaluation_interval": "15s"},
        "rule_files": ["/etc/prometheus/recording.yml", "/etc/prometheus/alerts.yml"],
        "alerting": {"alertmanagers": [{"static_configs": [{"targets": ["alertmanager:9093"]}]}]}, "scrape_configs": [scrape],
    }  # fmt: skip
    return yaml.safe_dump(config, sort_keys=False, width=160)


def alloy_file(place: Place) -> str:
    """Returns ``config.alloy``: the output of every pod of Tandem in the namespace is read from the API and sent to Loki."""
    values = "{" + ", ".join(f'{name} = "{name}"' for name in ("time", *LABELS, *METADATA)) + "}"
    label, data = ("{" + ", ".join(f'{name} = "{name}"' for name in names) + "}" for names in (LABELS, METADATA))
    return f"""\
discovery.kubernetes "pods" {{
  role = "pod"
  namespaces {{
    names = [{json.dumps(place.namespace)}]
  }}
}}

discovery.relabel "pods" {{
  targets = discovery.kubernetes.pods.targets
  rule {{
    source_labels = ["__meta_kubernetes_pod_label_app_kubernetes_io_part_of", "__meta_kubernetes_pod_label_app_kubernetes_io_name"]
    regex         = ".*tandem.*"
    action        = "keep"
  }}
  rule {{
    source_labels = ["__meta_kubernetes_pod_label_app_kubernetes_io_component"]
    target_label  = "role"
  }}
  rule {{
    source_labels = ["__meta_kubernetes_pod_name"]
    target_label  = "pod"
  }}
  rule {{
    replacement  = "tandem"
    target_label = "job"
  }}
}}

loki.source.kubernetes "pods" {{
  targets    = discovery.relabel.pods.output
  forward_to = [loki.process.tandem.receiver]
}}

loki.process "tandem" {{
  forward_to = [loki.write.loki.receiver]

  stage.json {{
    expressions = {values}
  }}

  stage.labels {{
    values = {label}
  }}

  stage.structured_metadata {{
    values = {data}
  }}
}}

loki.write "loki" {{
  endpoint {{
    url = "http://loki:3100/loki/api/v1/push"
  }}
}}
"""


def _prometheus(place: Place, storage: str) -> list[Manifest]:
    files = {
        "prometheus.yml": prometheus_file(place), "recording.yml": rules_file("tandem-recording", RECORDS), "alerts.yml": rules_file("tandem-alerts", ALERTS),
    }  # fmt: skip
    pods = {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}
    prometheus = Program(
        "prometheus", IMAGES["prometheus"],
        ("--config.file=/etc/prometheus/prometheus.yml", "--storage.tsdb.path=/prometheus", f"--storage.tsdb.retention.time={_DAYS}"),
        {"web": 9090}, ("/-/ready", "web"), memory="4Gi", files={"prometheus": "/etc/prometheus"}, data="/prometheus", storage=storage, account="prometheus",
    )  # fmt: skip
    alertmanager = Program(
        "alertmanager", IMAGES["alertmanager"], ("--config.file=/etc/alertmanager/alertmanager.yml", "--storage.path=/tmp", "--cluster.listen-address="),
        {"web": 9093}, ("/-/ready", "web"), cpu="100m", memory="256Mi", files={"alertmanager": "/etc/alertmanager"},
    )  # fmt: skip
    return [
        *reader("prometheus", place, [pods]), config_map("prometheus", "prometheus", place, files), *prometheus.objects(place),
        config_map("alertmanager", "alertmanager", place, {"alertmanager.yml": alertmanager_config(None)}), *alertmanager.objects(place),
        reached_from("alertmanager", place, [(("prometheus",), (9093,))]),
    ]  # fmt: skip


def _jaeger(place: Place, traced: tuple[str, ...]) -> list[Manifest]:
    ports = {"ui": 16686, "otlp-grpc": 4317, "otlp-http": 4318}
    jaeger = Program("jaeger", IMAGES["jaeger"], (), ports, ("/", "ui"), memory="2Gi")
    policy = reached_from("jaeger", place, [(traced, (4317, 4318))])
    if "run" in traced:
        # The pods of runs have labels of their own.
        policy["spec"]["ingress"] = [{"from": [{"podSelector": {"matchLabels": {"app.kubernetes.io/name": "tandem"}}}], "ports": _ports(4317, 4318)}]
    policy["spec"]["ingress"] += reached_from("jaeger", place, [((_GRAFANA,), (16686,))])["spec"]["ingress"]
    return [*jaeger.objects(place), policy]


def _loki(place: Place, storage: str) -> list[Manifest]:
    logs = {"apiGroups": [""], "resources": ["pods", "pods/log"], "verbs": ["get", "list", "watch"]}
    loki = Program(
        "loki", IMAGES["loki"], ("-config.file=/etc/loki/loki.yml",), {"push": 3100}, ("/ready", "push"), files={"loki": "/etc/loki"}, data="/loki",
        storage=storage,
    )  # fmt: skip
    alloy = Program(
        "alloy", IMAGES["alloy"], ("run", "--server.http.listen-addr=0.0.0.0:12345", "--storage.path=/tmp/alloy", "/etc/alloy/config.alloy"), {"web": 12345},
        ("/-/ready", "web"), cpu="200m", memory="512Mi", files={"alloy": "/etc/alloy"}, account="alloy",
    )  # fmt: skip
    return [
        config_map("loki", "loki", place, {"loki.yml": yaml.safe_dump(LOKI_CONFIG, sort_keys=False)}), *loki.objects(place),
        reached_from("loki", place, [(("alloy", _GRAFANA), (3100,))]),
        *reader("alloy", place, [logs]), config_map("alloy", "alloy", place, {"config.alloy": alloy_file(place)}), *alloy.objects(place),
    ]  # fmt: skip


def _dashboards(place: Place) -> list[Manifest]:
    """Returns a ConfigMap for each dashboard, with the label by which Grafana's chart finds it."""
    found = []
    for each in DASHBOARDS:
        made = config_map(f"dashboard-{each.name}", "dashboards", place, {f"{each.name}.json": json.dumps(to_json(each))})
        made["metadata"]["labels"] = {**PART_OF, "grafana_dashboard": "1"}
        found.append(made)
    return found


def _grafana(place: Place) -> list[Manifest]:
    """Returns Grafana with its data sources and the dashboards in place. No pod reaches it: its first password is known to all, and ``kubectl port-forward`` is
    not held up by the policy. It keeps nothing that is not in these files."""
    sources = datasources_file(prometheus="http://prometheus:9090", loki="http://loki:3100", jaeger="http://jaeger:16686")
    place_of = {"datasources": sources, "dashboards": dashboards_file()}
    mounted = {f"{_GRAFANA}-{kind}": f"/etc/grafana/provisioning/{kind}" for kind in place_of}
    grafana = Program(
        _GRAFANA, IMAGES["grafana"], (), {"web": 3000}, ("/api/health", "web"), memory="512Mi",
        files={**mounted, **{f"dashboard-{each.name}": f"{DASHBOARD_FOLDER}/{each.name}" for each in DASHBOARDS}},
        environment={"GF_PATHS_DATA": "/tmp/grafana", "GF_PATHS_LOGS": "/tmp/grafana/log", "GF_ANALYTICS_REPORTING_ENABLED": "false"},
    )  # fmt: skip
    maps = [config_map(f"{_GRAFANA}-{kind}", _GRAFANA, place, {"tandem.yml": text}) for kind, text in place_of.items()]
    return [*maps, *grafana.objects(place), reached_from(_GRAFANA, place, [])]


def _ports(*numbers: int) -> list[Manifest]:
    return [{"protocol": "TCP", "port": number} for number in numbers]

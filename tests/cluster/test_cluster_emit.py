"""The files of a topology are what Kubernetes, Slurm, Ray, Envoy and Prometheus take, and what cannot be one is refused in one line."""

import importlib.util
import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml
from kubernetes_schemas import check

from tandem.cluster.emit.kubernetes.etcd import etcd
from tandem.cluster.emit.kubernetes.objects import Place
from tandem.cluster.emit.kubernetes.training import ROLE_RULES
from tandem.config.gateway import GatewayConfig
from tandem.config.load import build
from tandem.config.recipe import Recipe, load_config
from tandem.layout.parameters import parameter_count
from tandem.layout.published_models import PUBLISHED_MODELS
from tandem.observability.dashboards.all import DASHBOARDS
from tandem.observability.dashboards.model import to_json

Here = Callable[..., str]
ROOT = Path(__file__).parents[2]


def manifests(folder: Path) -> list[dict[str, Any]]:
    return [each for path in sorted(folder.glob("*.yaml")) for each in yaml.load_all(path.read_text(), yaml.CSafeLoader) if "kind" in each]


def of_kind(found: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [each for each in found if each["kind"] == kind]


def labels_of(manifest: dict[str, Any]) -> dict[str, str]:
    spec = manifest["spec"]
    template = spec["leaderWorkerTemplate"]["workerTemplate"] if manifest["kind"] == "LeaderWorkerSet" else spec["template"]
    return dict(template["metadata"]["labels"])


def test_published_models_have_the_parameters_that_their_cards_say() -> None:
    billions = {"llama-8b": 8.03, "llama-70b": 70.55, "llama-405b": 405.85, "qwen3-0.6b": 0.596, "qwen3-8b": 8.19, "qwen3-32b": 32.76}
    assert {name: parameter_count(each.shapes) / 1e9 for name, each in PUBLISHED_MODELS.items()} == pytest.approx(billions, rel=1e-3)


def test_the_two_drawings_are_the_defaults_and_every_object_of_kubernetes_is_valid(here: Here, tmp_path: Path) -> None:
    here("emit", "--topology", "inference", "--on", "kubernetes")
    here("emit", "--topology", "training", "--on", "kubernetes", "--rdma-resource", "rdma/hca_shared_devices_a", "--storage-class", "nfs")
    for topology in ("inference", "training"):
        found = manifests(tmp_path / topology)
        for each in found:
            check(each)
        selected = [labels_of(each) for kind in ("Deployment", "StatefulSet", "LeaderWorkerSet", "Job") for each in of_kind(found, kind)]
        for kind, path in (("Service", "selector"), ("PodDisruptionBudget", "selector"), ("NetworkPolicy", "podSelector")):
            for each in of_kind(found, kind):
                wanted = each["spec"][path].get("matchLabels", each["spec"][path])
                assert any(wanted.items() <= labels.items() for labels in selected), (kind, each["metadata"]["name"])
    (engines,) = of_kind(manifests(tmp_path / "inference"), "LeaderWorkerSet")
    (container,) = engines["spec"]["leaderWorkerTemplate"]["workerTemplate"]["spec"]["containers"]
    assert engines["spec"]["replicas"] == 8 and container["resources"]["limits"]["nvidia.com/gpu"] == "2"
    assert {"--tensor-parallel-size=2", "--device=cuda"} <= set(container["command"])
    kinds = {each["kind"] for each in manifests(tmp_path / "training")}
    assert {"LocalQueue", "ClusterQueue", "ResourceFlavor", "StatefulSet", "PersistentVolumeClaim", "Job", "NetworkPolicy", "PodDisruptionBudget"} <= kinds


def test_the_autoscaler_asks_for_metrics_that_exist_and_the_gateways_know_every_instance_that_there_may_be(here: Here, tmp_path: Path) -> None:
    here("emit", "--topology", "inference", "--on", "kubernetes", "--instances", "3", "--max-instances", "5")
    found = manifests(tmp_path / "inference")
    (scaled,) = of_kind(found, "ScaledObject")
    queries = [trigger["metadata"]["query"] for trigger in scaled["spec"]["triggers"]]
    # The queries of the dashboards name series that exist in a running system, as other tests check.
    shown = json.dumps([to_json(each) for each in DASHBOARDS])
    assert queries == ["max(tandem_gateway_oldest_waiting_seconds)", "sum(vllm:num_requests_running)"]
    assert "tandem_gateway_oldest_waiting_seconds" in shown and "vllm:num_requests_running" in shown
    assert (scaled["spec"]["minReplicaCount"], scaled["spec"]["maxReplicaCount"]) == (3, 5)
    (settings,) = [each for each in of_kind(found, "ConfigMap") if each["metadata"]["name"] == "gateway"]
    config = build(GatewayConfig, yaml.safe_load(settings["data"]["gateway.yaml"]))
    assert [backend.url for backend in config.backends] == [f"http://engine-{number}.engine:8000" for number in range(5)]


@pytest.mark.parametrize("topology", ["inference", "training"])
def test_grafana_reaches_its_data_sources_and_has_every_dashboard(here: Here, tmp_path: Path, topology: str) -> None:
    here("emit", "--topology", topology, "--on", "kubernetes")
    objects = manifests(tmp_path / topology)
    (pod,) = [each["spec"]["template"] for each in of_kind(objects, "Deployment") if each["metadata"]["name"] == "grafana"]
    maps = {each["metadata"]["name"]: each["data"] for each in of_kind(objects, "ConfigMap")}
    (container,) = pod["spec"]["containers"]
    files = {f"{mount['mountPath']}/{name}": text for mount in container["volumeMounts"] for name, text in maps.get(mount["name"], {}).items()}
    sources = yaml.safe_load(files["/etc/grafana/provisioning/datasources/tandem.yml"])["datasources"]
    (provider,) = yaml.safe_load(files["/etc/grafana/provisioning/dashboards/tandem.yml"])["providers"]
    dashboards = {path: json.loads(text) for path, text in files.items() if path.startswith(provider["options"]["path"])}
    assert sorted(each["title"] for each in dashboards.values()) == sorted(each.title for each in DASHBOARDS)
    asked = {target["datasource"]["uid"] for each in dashboards.values() for panel in each["panels"] for target in panel.get("targets", ())}
    assert asked <= {each["uid"] for each in sources}
    services = {each["metadata"]["name"]: each["spec"] for each in of_kind(objects, "Service")}
    for url in (urlsplit(each["url"]) for each in sources):
        assert url.port in [port["port"] for port in services[url.hostname]["ports"]], url
        for policy in of_kind(objects, "NetworkPolicy"):
            if policy["spec"]["podSelector"]["matchLabels"].items() <= services[url.hostname]["selector"].items():
                allowed = [rule for rule in policy["spec"]["ingress"] if url.port in [port["port"] for port in rule["ports"]]]
                labels = [peer["podSelector"]["matchLabels"] for rule in allowed for peer in rule["from"]]
                assert any(each.items() <= pod["metadata"]["labels"].items() for each in labels), url
    (own,) = [each for each in of_kind(objects, "NetworkPolicy") if each["metadata"]["name"] == "grafana"]
    assert own["spec"]["ingress"] == [], "no pod reaches it"


def test_the_emitted_run_is_a_jobset_that_is_valid_and_fits_the_queue(here: Here, tmp_path: Path) -> None:
    here("emit", "--topology", "training", "--on", "kubernetes", "--shared", str(tmp_path), "--gpu-nodes", "a,b,c", "--gpus-per-node", "4")
    folder = tmp_path / "training"
    planned = list(yaml.safe_load_all(here("train", folder / "recipe.yaml", "--on", "kubernetes", "--dry-run", f"--run.directory={tmp_path}/runs")))
    for each in planned:
        check(each)
    jobset = planned[0]
    (queue,) = of_kind(manifests(folder), "ClusterQueue")
    (local_queue,) = of_kind(manifests(folder), "LocalQueue")
    assert jobset["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == local_queue["metadata"]["name"]
    quotas = {each["name"]: each["nominalQuota"] for each in queue["spec"]["resourceGroups"][0]["flavors"][0]["resources"]}
    limits = [job["template"]["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"] for job in jobset["spec"]["replicatedJobs"]]
    assert limits[0] == limits[1] and set(limits[0]) == set(quotas) and quotas["nvidia.com/gpu"] == "12" and limits[0]["nvidia.com/gpu"] == "4"
    (submitted,) = [each for each in of_kind(manifests(folder), "ConfigMap") if each["metadata"]["name"] == "recipe"]
    assert submitted["data"]["recipe.yaml"] == (folder / "recipe.yaml").read_text()


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed, so the emitted configuration of Prometheus is NOT tested")
def test_prometheus_takes_its_configuration_and_rules(here: Here, tmp_path: Path) -> None:
    here("emit", "--topology", "inference", "--on", "kubernetes")
    (made,) = [each for each in of_kind(manifests(tmp_path / "inference"), "ConfigMap") if each["metadata"]["name"] == "prometheus"]
    # Debian's Prometheus is built without the discovery of Kubernetes; all else of the file is checked.
    config = yaml.safe_load(made["data"]["prometheus.yml"])
    (scrape,) = config["scrape_configs"]
    assert scrape.pop("kubernetes_sd_configs") == [{"role": "pod", "namespaces": {"names": ["tandem"]}}]
    for name, text in {**made["data"], "prometheus.yml": yaml.safe_dump(config)}.items():
        (tmp_path / name).write_text(text.replace("/etc/prometheus/", f"{tmp_path}/"))
    done = subprocess.run(["promtool", "check", "config", tmp_path / "prometheus.yml"], capture_output=True, text=True)
    assert done.returncode == 0 and "2 rule files found" in done.stdout, done.stdout + done.stderr


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed, so the emitted cluster file is NOT tested")
def test_ray_takes_the_cluster_files(here: Here, tmp_path: Path) -> None:
    import jsonschema
    import ray

    schema = json.loads((Path(ray.__file__).parent / "autoscaler" / "ray-schema.json").read_text())
    for topology in ("inference", "training"):
        here("emit", "--topology", topology, "--on", "ray")
        cluster = yaml.safe_load((tmp_path / topology / "cluster.yaml").read_text())
        jsonschema.validate(cluster, schema)
        assert cluster["provider"]["head_ip"] not in cluster["provider"]["worker_ips"]
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**cluster, "worker_ips": []}, schema)


def test_every_script_is_bash_every_recipe_is_one_and_every_gateway_file_too(here: Here, tmp_path: Path) -> None:
    for topology in ("inference", "training"):
        here("emit", "--topology", topology)
    here("emit", "--topology", "inference", "--on", "local", "--folder", "one", "--model", "qwen3-8b", "--tensor-parallel", "1")
    here("emit", "--topology", "training", "--on", "local", "--folder", "alone")
    scripts = [path for pattern in ("*.sh", "*.sbatch") for path in tmp_path.rglob(pattern)]
    assert len(scripts) >= 12
    for path in scripts:
        subprocess.run(["bash", "-n", path], check=True)
        assert path.stat().st_mode & 0o111
    recipes = list(tmp_path.rglob("recipe.yaml"))
    assert len(recipes) == 4 and all(isinstance(load_config(path, ()), Recipe) for path in recipes)
    settings = list(tmp_path.rglob("gateway-*.yaml"))
    assert len(settings) == 6 and all(build(GatewayConfig, yaml.safe_load(path.read_text())) for path in settings)


def test_a_run_on_data_has_ranks_on_every_gpu_of_the_nodes_that_are_no_spares_whatever_the_launcher(here: Here, tmp_path: Path) -> None:
    nodes = ("--gpu-nodes", "a,b,c", "--gpus-per-node", "2", "--shared", str(tmp_path))
    here("emit", "--topology", "training", "--recipe", "pretrain", *nodes)
    for launcher in ("slurm", "ray", "kubernetes"):
        folder = tmp_path / "training" / launcher
        emitted = yaml.safe_load((folder / "recipe.yaml").read_text())
        assert emitted["parallel"] == {"data": 4, "zero": 0} and emitted["cluster"] == {"spares": 1} and emitted[launcher]["nodes"] == 3, launcher
        assert "3 GPU nodes with data-parallel ranks" in (folder / "README.md").read_text()
    for each in (planned := list(yaml.safe_load_all(here("train", tmp_path / "training" / "kubernetes" / "recipe.yaml", "--on", "kubernetes", "--dry-run")))):
        check(each)
    assert sum(job["replicas"] * job["template"]["spec"]["parallelism"] for job in planned[0]["spec"]["replicatedJobs"]) == 3
    # What the recipe says itself is kept, and what the nodes cannot have is refused.
    (tmp_path / "own.yaml").write_text((ROOT / "recipes" / "pretrain.yaml").read_text().replace("data: 1\n", "data: 8\n"))
    here("emit", "--topology", "training", "--on", "slurm", "--recipe", tmp_path / "own.yaml", "--folder", "own", *nodes)
    assert yaml.safe_load((tmp_path / "own" / "recipe.yaml").read_text())["parallel"]["data"] == 8
    # A replica of more GPUs than a node has is on several.
    (tmp_path / "wide.yaml").write_text((ROOT / "recipes" / "pretrain.yaml").read_text().replace("data: 1\n", "data: 1\n  pipeline: 4\n"))
    here("emit", "--topology", "training", "--on", "slurm", "--recipe", tmp_path / "wide.yaml", "--folder", "wide", *nodes)
    wide = yaml.safe_load((tmp_path / "wide" / "recipe.yaml").read_text())["parallel"]
    assert (wide["data"], wide["pipeline"]) == (1, 4)
    (tmp_path / "own.yaml").write_text((tmp_path / "own.yaml").read_text().replace("data: 8\n", "data: 3\n"))
    assert here("emit", "--topology", "training", "--on", "slurm", "--recipe", tmp_path / "own.yaml", "--folder", "odd", *nodes).startswith(
        "'--gpu-nodes' is 3 and 'parallel.data' 3, which 2 nodes with ranks do not divide; set parallel.data to a multiple of 2"
    )  # fmt: skip


def test_the_documents_have_the_objects_and_the_role_that_are_emitted() -> None:
    text = (ROOT / "docs" / "cluster" / "kubernetes.md").read_text(encoding="utf-8")
    role = yaml.safe_load(next(block for block in text.split("```yaml\n")[1:] if block.startswith("apiVersion")).split("```")[0])
    assert role["rules"] == [dict(rule) for rule in ROLE_RULES]
    documented = list(yaml.safe_load_all((ROOT / "docs" / "kubernetes" / "etcd.yaml").read_text(encoding="utf-8")))
    emitted = {each["kind"]: each["spec"] for each in etcd(Place("tandem", "tandem"))}
    (stateful,) = [each for each in documented if each["kind"] == "StatefulSet"]
    assert stateful["spec"]["template"]["spec"]["containers"][0]["command"] == emitted["StatefulSet"]["template"]["spec"]["containers"][0]["command"]
    assert stateful["spec"]["replicas"] == emitted["StatefulSet"]["replicas"]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("inference --model lama-70b", "--model is 'lama-70b', which is neither a folder here nor a model whose size is known; did you mean 'llama-70b'?"),
        ("inference --tensor-parallel 3", "--tensor-parallel is 3: the model's num_attention_heads 64 is not divisible by 3"),
        ("inference --tensor-parallel 0", "--tensor-parallel is 0; 'llama-70b' can have 1, 2, 4, 8"),
        ("inference --tensor-parallel 16", "--tensor-parallel is 16, and a node has 8 GPUs (--gpus-per-node); the ranks of an instance are on one node"),
        ("inference --tensor-parallel 1", "--tensor-parallel is 1: the weights of 'llama-70b' take 131.4 GiB of each GPU in bfloat16, and 72.0 of 80 GiB can"),
        ("inference --model llama-405b --tensor-parallel 8", "--tensor-parallel is 8: the weights of 'llama-405b' take 94."),
        ("inference --instances 0", "--instances is 0; it must be between 1 and 1024"),
        ("inference --instances 8 --max-instances 4", "--max-instances is 4; it must be between --instances (8) and 1024"),
        ("inference --gateways 100000", "--gateways is 100000; it must be between 1 and 64"),
        ("inference --port 65530", "--port is 65530; it and the ports after it"),
        ("inference --on local", "--instances is 8 of 2 GPUs each, and one machine has 8 (--gpus-per-node); lower them"),
        ("inference --gpu-memory-gib nan", "--gpu-memory-gib is nan; give the memory of a GPU"),
        ("inference --gpus-per-node -1", "--gpus-per-node is -1; it must be between 0 and 1024"),
        ("inference --on kubernetes --namespace No_Name", "'kubernetes.namespace' is 'No_Name', which is not a name of Kubernetes"),
        ("inference --shared a/b", "--shared is 'a/b'; give the absolute path of a folder"),
        ("inference --folder a$b", "--folder is '"),
        ("inference --on slurm --time 90", "'slurm.time' is '90', which may be minutes"),
        ("inference --recipe sort", "--recipe is for the other topology than --topology inference; leave it out"),
        ("training --model llama-70b", "--model is for the other topology than --topology training; leave it out"),
        ("training --gpu-nodes a,b,a", "--gpu-nodes names 'a' twice; name each node once"),
        ("training --gpu-nodes a,head", "--gpu-nodes names 'head' and --head too; name each node once"),
        ("training --gpu-nodes a,,b", "--gpu-nodes has '', which is not the name of a host"),
        ("training --storage-nodes a,b,c", "--storage-nodes has 3 names; give one, with runs and models"),
        ("training --spares 3", "--spares is 3, and there are 4 GPU nodes; besides the first node"),
        ("training --recipe pretrain", "'parallel.data' is 24 and a step has 16 sequences; raise data.global_batch_size, so that every rank has one"),
        ("inference --on slurm --image x", "--image is for --on kubernetes of this topology, and --on is slurm; leave it out"),
        ("inference --on ray --shared /data", "--shared is for --on kubernetes of this topology, and --on is ray; leave it out"),
        ("training --on kubernetes --account lab", "--account is for --on slurm of this topology, and --on is kubernetes; leave it out"),
        ("training --on local --spares 1", "--spares is for --on slurm or ray or kubernetes of this topology, and --on is local; leave it out"),
        ("training --on slurm --jaeger head", "'traces.endpoint' is 'head'; give the address of a collector"),
        ("training --recipe sorted", "recipe 'sorted' does not exist; did you mean 'sort'"),
    ],
)
def test_what_cannot_be_a_topology_is_refused_and_leaves_nothing(here: Here, tmp_path: Path, arguments: str, line: str) -> None:
    assert here("emit", "--topology", *arguments.split()).startswith(line)
    assert list(tmp_path.iterdir()) == []


def test_the_account_the_time_limit_and_the_collector_are_in_the_files_of_a_run(here: Here, tmp_path: Path) -> None:
    here("emit", "--topology", "training", "--account", "lab", "--time", "1-00:00:00", "--jaeger", "http://head:4318")
    recipes = {name: yaml.safe_load((tmp_path / "training" / name / "recipe.yaml").read_text()) for name in ("slurm", "ray", "kubernetes")}
    assert (recipes["slurm"]["slurm"]["account"], recipes["slurm"]["slurm"]["time"]) == ("lab", "1-00:00:00")
    assert recipes["slurm"]["traces"] == recipes["ray"]["traces"] == {"endpoint": "http://head:4318"}
    assert recipes["kubernetes"]["traces"] == {"endpoint": "http://jaeger:4318"}, "that of the emitted Jaeger"
    assert "#SBATCH --account=lab" in (tmp_path / "training" / "slurm" / "preflight.sbatch").read_text().splitlines()


def test_nothing_is_overwritten(here: Here, tmp_path: Path) -> None:
    (tmp_path / "inference").mkdir()
    (tmp_path / "inference" / "mine").touch()
    assert here("emit", "--topology", "inference") == f"--folder is '{tmp_path}/inference', which is not empty, and nothing is overwritten; name a new folder"
    (tmp_path / "inference" / "mine").unlink()
    here("emit", "--topology", "inference")
    assert sorted(path.name for path in (tmp_path / "inference").iterdir()) == ["kubernetes", "ray", "slurm"]

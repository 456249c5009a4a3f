"""The objects of a run and of its etcd are objects of Kubernetes, and an image that its registry does not have is found out before."""

import json
import ssl
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import jsonschema
import pytest
import yaml
from certificates import certificate
from kubernetes_schemas import check

from tandem.cluster.launch.kubernetes.check_place import quantity
from tandem.cluster.launch.kubernetes.image import Image, check_image, parse_image
from tandem.cluster.launch.kubernetes.in_pod import CERTIFICATES
from tandem.cluster.launch.kubernetes.manifests import RunObjects, jobset, network_policy, secret
from tandem.config.kubernetes import KubernetesConfig
from tandem.types import UserError

ROOT = Path(__file__).parents[2]
RUN = RunObjects("tandem-sort-a1b2c3", Path("/shared/runs/sort"), Path("/shared"), 1000, "2Gi", has_metrics_port=True, shares_secret=True)


@pytest.mark.parametrize(
    "config",
    [
        KubernetesConfig(image="r.example.com/tandem:0.1.0", claim="shared"),
        KubernetesConfig(
            image="r.example.com/tandem:0.1.0", claim="shared", queue="train", priority_class="high", nodes=3, cpu="16", memory="64Gi", gpus=8,
            rdma_resource="rdma/hca_shared_devices_a", node_selector=("a.b/c=d",), tolerations=("dedicated=training:NoSchedule", "spot"),
            service_account="runs", image_pull_secret="registry", tls_secret="pods-tls",
        ),
        KubernetesConfig(image="r.example.com/tandem:0.1.0", claim="shared", priority_class="high", nodes=2),
    ],
    ids=["least", "all", "priority"],
)  # fmt: skip
def test_every_object_of_a_run_is_valid(config: KubernetesConfig) -> None:
    config.check()
    made = jobset(config, RUN)
    for manifest in (made, secret(RUN, {"a": "b"}), network_policy(RUN)):
        check(yaml.safe_load(yaml.safe_dump(manifest)))
    pods = [job["template"]["spec"]["template"]["spec"] for job in made["spec"]["replicatedJobs"]]
    assert sum(job["replicas"] for job in made["spec"]["replicatedJobs"]) == config.nodes
    for pod in pods:
        assert pod.get("priorityClassName") == (config.priority_class if config.priority_class and not config.queue else None)
        assert (str(CERTIFICATES) in [mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]]) == bool(config.tls_secret)
        assert "add" not in pod["containers"][0]["securityContext"]["capabilities"] or config.rdma_resource


def test_the_tiers_of_checkpoints_are_placed_so_that_the_pods_of_other_nodes_keep_theirs_when_one_is_lost() -> None:
    made = jobset(KubernetesConfig(image="a", claim="shared", nodes=3), replace(RUN, local_folders=("/nvme/tandem",)))
    check(yaml.safe_load(yaml.safe_dump(made)))
    # A pod that fails is replaced by its own job: the JobSet neither ends the others nor begins them again.
    assert made["spec"]["failurePolicy"] == {"maxRestarts": 0}
    for job in made["spec"]["replicatedJobs"]:
        spec = job["template"]["spec"]
        assert (spec["parallelism"], spec["completions"], spec["podReplacementPolicy"]) == (1, 1, "Failed") and spec["backoffLimit"] > 0
        assert {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]} in spec["podFailurePolicy"]["rules"]
        pod = spec["template"]["spec"]
        # Two keepers never share a node.
        [alone] = pod["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        assert alone["topologyKey"] == "kubernetes.io/hostname"
        # The disk is the node's own, and the run's folder, by which keepers are found, is shared.
        places = {mount["mountPath"]: next(volume for volume in pod["volumes"] if volume["name"] == mount["name"])
                  for mount in pod["containers"][0]["volumeMounts"]}  # fmt: skip
        assert "emptyDir" in places["/nvme/tandem"] and places["/shared"]["persistentVolumeClaim"] == {"claimName": "shared"}


def test_a_field_that_kubernetes_does_not_know_is_found() -> None:
    made = jobset(KubernetesConfig(image="a", claim="b"), RUN)
    with pytest.raises(jsonschema.ValidationError):
        check({**made, "spec": {**made["spec"], "maxRestarts": 1}})
    pod = made["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    pod["restartPolice"] = "Never"
    with pytest.raises(Exception, match="restartPolice"):
        check(made)


def test_the_three_members_of_etcd_are_valid() -> None:
    manifests = list(yaml.safe_load_all((ROOT / "docs" / "kubernetes" / "etcd.yaml").read_text(encoding="utf-8")))
    assert [each["kind"] for each in manifests] == ["Service", "PodDisruptionBudget", "StatefulSet"]
    for manifest in manifests:
        check(manifest)


def test_the_role_in_the_document_is_valid() -> None:
    text = (ROOT / "docs" / "cluster" / "kubernetes.md").read_text(encoding="utf-8")
    check(yaml.safe_load(next(block for block in text.split("```yaml\n")[1:] if block.startswith("apiVersion")).split("```")[0]))


def test_quantities_and_references_are_read_as_kubernetes_does() -> None:
    assert [quantity(text) for text in ("8", "500m", "64Gi", "1.5k", "2T", "x")] == [8, 0.5, 64 * 2**30, 1500, 2e12, 0]
    assert parse_image("tandem") == Image("registry-1.docker.io", "library/tandem", "latest")
    assert parse_image("docker.io/lab/tandem:1") == Image("registry-1.docker.io", "lab/tandem", "1")
    assert parse_image("localhost:5000/tandem:1") == Image("localhost:5000", "tandem", "1")
    assert parse_image(f"r.example.com/a/b:1@sha256:{'0' * 64}") == Image("r.example.com", "a/b", f"sha256:{'0' * 64}")
    with pytest.raises(UserError, match="is not the name of an image"):
        parse_image("r.example.com/UPPER:1")


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[tuple[str, ssl.SSLContext]]:
    """A registry that gives anybody a token and has ``tandem:1``; ``private`` it shows nobody."""
    authority = certificate(tmp_path, "ca")
    certificate(tmp_path, "server", authority)

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            if "private" in self.path or self.headers.get("Authorization") != "Bearer t":
                self.send_response(401)
                realm = f'realm="https://127.0.0.1:{server.server_port}/token",service="r",scope="repository:tandem:pull"'
                self.send_header("WWW-Authenticate", f"Bearer {realm}")
            else:
                self.send_response(200 if self.path == "/v2/tandem/manifests/1" else 404)
            self.end_headers()

        def do_GET(self) -> None:
            data = json.dumps({"token": "t"}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "server.crt", tmp_path / "server.key")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield f"127.0.0.1:{server.server_port}", ssl.create_default_context(cafile=str(tmp_path / "ca.crt"))
    server.shutdown()
    server.server_close()
    thread.join()


def test_an_image_that_its_registry_does_not_have_is_refused_and_one_that_is_not_shown_is_not(registry: tuple[str, ssl.SSLContext]) -> None:
    host, context = registry
    check_image(f"{host}/tandem:1", context)
    check_image(f"{host}/private:1", context)
    check_image("127.0.0.1:1/tandem:1", context)
    with pytest.raises(UserError, match=f"is '{host}/tandem:2', which registry {host} does not have; push it, or correct the name"):
        check_image(f"{host}/tandem:2", context)

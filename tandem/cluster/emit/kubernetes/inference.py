"""The inference topology on Kubernetes: Envoy, gateways, and engines in a LeaderWorkerSet that grows and shrinks with the age of the queue.

An engine instance is one pod, because its tensor-parallel ranks are on one node. The LeaderWorkerSet gives it a name that stays (``engine-0.engine``), so the
gateways' file has all instances that there may ever be; those that are not there are not ready, and are found when they come.
"""

from typing import Any

from tandem.cluster.emit.gateways import envoy_file, gateway_file, gateway_settings
from tandem.cluster.emit.kubernetes.objects import (
    Place,
    Program,
    config_map,
    disruption_budget,
    labels,
    metadata,
    namespace,
    reached_from,
)
from tandem.cluster.emit.kubernetes.watching import COLLECTOR, watching
from tandem.cluster.emit.topology import InferenceTopology
from tandem.cluster.launch.kubernetes.pod_template import (
    Manifest,
    container_security,
    environment,
    health,
    placement,
    pod_security,
    resources,
    volumes,
)
from tandem.config.engine import EngineArgs
from tandem.config.kubernetes import KubernetesConfig

PORT = 8000
"""Of each engine."""
GATEWAY_PORT, ENVOY_PORT = 8080, 8000
_DRAIN_S = 600
_GRACE_S = _DRAIN_S + 30
_START_S = 3600
"""In which an engine loads, from a cold volume or the Hub."""
_SHARED_MEMORY = "16Gi"
_PRIVATE = ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10")
QUEUE_AGE_S, BUSY_SHARE = 5, 0.7
"""The autoscaler adds instances when a request waits longer, or when engines have more than this share of ``max_num_seqs`` at once."""
_IMAGE = "envoyproxy/envoy:v1.35.3"


def inference(topology: InferenceTopology, place: Place, config: KubernetesConfig, claim: Manifest, storage: str) -> dict[str, list[Manifest]]:
    """Returns the objects of each file. ``config``: what each engine asks for. ``claim``: of the volume with models.
    ``storage``: of the volumes of Prometheus and Loki."""
    level = "privileged" if config.rdma_resource else "restricted"
    return {
        "namespace.yaml": [namespace(place, level)], "storage.yaml": [claim],
        "engines.yaml": [_engines(topology, place, config), disruption_budget("engine", place), _engines_reached(place)],
        "autoscaling.yaml": [_engine_autoscaler(topology, place), _gateway_autoscaler(topology, place)],
        "gateways.yaml": _gateways(topology, place),
        "envoy.yaml": _envoy(topology, place),
        **watching(place, ("engine", "gateway"), storage),
    }


def _engines(topology: InferenceTopology, place: Place, config: KubernetesConfig) -> Manifest:
    group = {
        # One pod an instance: a leader without workers.
        "size": 1, "restartPolicy": "RecreateGroupOnPodRestart",
        "workerTemplate": {"metadata": {"labels": labels("engine")}, "spec": _engine_pod(topology, config)},
    }  # fmt: skip
    rollout = {"type": "RollingUpdate", "rollingUpdateConfiguration": {"maxUnavailable": 1, "maxSurge": 0}}
    spec = {"replicas": topology.instances, "rolloutStrategy": rollout, "startupPolicy": "LeaderCreated", "leaderWorkerTemplate": group}
    return {"apiVersion": "leaderworkerset.x-k8s.io/v1", "kind": "LeaderWorkerSet", "metadata": metadata("engine", "engine", place), "spec": spec}


def _engine_pod(topology: InferenceTopology, config: KubernetesConfig) -> Manifest:
    model, parallel = topology.model, topology.tensor_parallel
    mounted, mounts = volumes(config.claim, config.mount_path, _SHARED_MEMORY)
    command = [
        "tandem", "serve", model.source, "--host=0.0.0.0", f"--port={PORT}", f"--served-model-name={model.name}", f"--tensor-parallel-size={parallel}",
        f"--otlp-traces-endpoint={COLLECTOR}", f"--drain-timeout={_DRAIN_S}",
        *(["--device=cuda", "--dtype=bfloat16"] if topology.node.gpus else [f"--threads={topology.cpus}"]),
    ]  # fmt: skip
    # Models of the Hub are loaded once, to the shared volume. A token for gated ones is in the Secret, if there is one.
    token = [{"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hugging-face", "key": "token", "optional": True}}}]
    container = {
        "name": "engine", "image": config.image, "command": command,
        "env": [*environment(HF_HOME=f"{config.mount_path}/huggingface"), *token],
        "ports": [{"name": "http", "containerPort": PORT}],
        "startupProbe": health("/startup", "http", failures=_START_S // 10), "readinessProbe": health("/readiness", "http", period_s=5),
        "livenessProbe": health("/liveness", "http"),
        "resources": resources(config, _SHARED_MEMORY), "securityContext": container_security(locks_memory=bool(config.rdma_resource)), "volumeMounts": mounts,
    }  # fmt: skip
    return {
        **placement(config), "terminationGracePeriodSeconds": _GRACE_S, "securityContext": pod_security(config.user_id), "containers": [container],
        "volumes": mounted,
    }  # fmt: skip


def _engines_reached(place: Place) -> Manifest:
    return reached_from("engine", place, [(("gateway", "prometheus"), (PORT,))])


def _engine_autoscaler(topology: InferenceTopology, place: Place) -> Manifest:
    """Returns KEDA's ScaledObject: the age of the oldest request that waits adds instances; how full the engines are keeps them."""
    prometheus = f"http://prometheus.{place.namespace}:9090"
    busy = int(BUSY_SHARE * EngineArgs(model="").max_num_seqs)
    queries = (
        # The age is that of one queue: twice the target needs twice the instances.
        ("max(tandem_gateway_oldest_waiting_seconds)", str(QUEUE_AGE_S), "Value"),
        # Engines that are busy are not taken away because no request waits for them.
        ("sum(vllm:num_requests_running)", str(busy), "AverageValue"),
    )
    triggers = [
        {"type": "prometheus", "metricType": kind, "metadata": {"serverAddress": prometheus, "query": query, "threshold": threshold}}
        for query, threshold, kind in queries
    ]
    behavior = {
        # An engine loads for minutes: it is added at once, and taken away late, one at a time.
        "scaleUp": {"stabilizationWindowSeconds": 0, "policies": [{"type": "Percent", "value": 100, "periodSeconds": 60}]},
        "scaleDown": {"stabilizationWindowSeconds": 600, "policies": [{"type": "Pods", "value": 1, "periodSeconds": 120}]},
    }  # fmt: skip
    target = {"apiVersion": "leaderworkerset.x-k8s.io/v1", "kind": "LeaderWorkerSet", "name": "engine"}
    spec: dict[str, Any] = {
        "scaleTargetRef": target, "pollingInterval": 5, "minReplicaCount": topology.instances, "maxReplicaCount": topology.most_instances,
        # Without metrics as many as there are.
        "fallback": {"failureThreshold": 3, "replicas": topology.instances, "behavior": "currentReplicas"},
        "advanced": {"horizontalPodAutoscalerConfig": {"behavior": behavior}}, "triggers": triggers,
    }  # fmt: skip
    return {"apiVersion": "keda.sh/v1alpha1", "kind": "ScaledObject", "metadata": metadata("engine", "engine", place), "spec": spec}


def _gateways(topology: InferenceTopology, place: Place) -> list[Manifest]:
    engines = [f"http://engine-{number}.engine:{PORT}" for number in range(topology.most_instances)]
    settings = gateway_settings(engines, GATEWAY_PORT, _PRIVATE, jaeger=COLLECTOR)
    gateway = Program(
        "gateway", place.image, (), {"http": GATEWAY_PORT}, ("/readiness", "http"), cpu="2", memory="2Gi", replicas=topology.gateways,
        files={"gateway": "/etc/tandem"}, command=("tandem", "gateway", "/etc/tandem/gateway.yaml"), environment={"HOME": "/tmp", "USER": "tandem"},
        grace_s=_GRACE_S,
    )  # fmt: skip
    front, deployment = gateway.objects(place)
    # Envoy is told of every gateway, and looks itself which are ready.
    front["spec"] |= {"clusterIP": "None", "publishNotReadyAddresses": True}
    return [
        config_map("gateway", "gateway", place, {"gateway.yaml": gateway_file(settings)}), front, deployment, disruption_budget("gateway", place),
        reached_from("gateway", place, [(("envoy", "prometheus"), (GATEWAY_PORT,))]),
    ]  # fmt: skip


def _gateway_autoscaler(topology: InferenceTopology, place: Place) -> Manifest:
    metric = {"type": "Resource", "resource": {"name": "cpu", "target": {"type": "Utilization", "averageUtilization": 70}}}
    spec = {
        "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": "gateway"}, "minReplicas": topology.gateways,
        "maxReplicas": 4 * topology.gateways, "metrics": [metric],
    }  # fmt: skip
    return {"apiVersion": "autoscaling/v2", "kind": "HorizontalPodAutoscaler", "metadata": metadata("gateway", "gateway", place), "spec": spec}


def _envoy(topology: InferenceTopology, place: Place) -> list[Manifest]:
    settings = gateway_settings([f"http://engine-0.engine:{PORT}"], GATEWAY_PORT, _PRIVATE)
    program = Program(
        "envoy", _IMAGE, ("-c", "/etc/envoy/envoy.yaml", "--drain-time-s", "30"), {"clients": ENVOY_PORT}, ("/readiness", "clients"), cpu="1", replicas=2,
        files={"envoy": "/etc/envoy"}, command=("envoy",), grace_s=_GRACE_S,
    )  # fmt: skip
    front, deployment = program.objects(place)
    front["spec"]["ports"] = [{"name": "clients", "port": 80, "targetPort": "clients"}]
    text = envoy_file(settings, [f"http://gateway:{GATEWAY_PORT}"], ENVOY_PORT)
    return [config_map("envoy", "envoy", place, {"envoy.yaml": text}), front, deployment, disruption_budget("envoy", place)]

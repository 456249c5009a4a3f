"""The objects of a run: a JobSet with a controller and the pods that join it, their Secret, and a NetworkPolicy. They belong to the JobSet and are deleted with
it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.cluster.launch.job import SAVED
from tandem.cluster.launch.kubernetes.api import OF_JOBSET
from tandem.cluster.launch.kubernetes.in_pod import CALLS_PORT, CERTIFICATES, METRICS_PORT, NAME, SECRETS, WEIGHTS_PORT
from tandem.cluster.launch.kubernetes.pod_template import (
    Manifest,
    container_security,
    environment,
    health,
    only_from,
    placement,
    pod_security,
    resources,
    secret_volume,
    volumes,
)
from tandem.cluster.launch.record import CREDENTIAL, PASSWORD
from tandem.config.kubernetes import KubernetesConfig

CONTROLLER, PODS = "controller", "pods"
CONTAINER = "run"
_KEPT_S = 24 * 3600
"""How long a JobSet is kept after its end, for who looks at its pods."""
_MODULE = "tandem.cluster.launch.kubernetes"


@dataclass(frozen=True, slots=True)
class RunObjects:
    """What the objects of a run depend on. ``name``: of the JobSet and all that belongs to it. ``directory`` and ``folder``: of the run and of the command
    that placed it, on the shared volume. ``user``: user and group of the processes. ``shared_memory``: of ``/dev/shm``, as a quantity. ``has_metrics_port``:
    the recipe has no section ``metrics`` of its own. ``shares_secret``: pods may join. ``local_folders``: of each node, which are no part of another volume."""

    name: str
    directory: Path
    folder: Path
    user: int
    shared_memory: str
    has_metrics_port: bool
    shares_secret: bool
    local_folders: tuple[str, ...] = ()


def jobset(config: KubernetesConfig, run: RunObjects) -> Manifest:
    """Returns the JobSet."""
    replicated = [_replicated(CONTROLLER, 1, config, run)]
    if config.nodes > 1:
        replicated.append(_replicated(PODS, config.nodes - 1, config, run))
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": run.name, "labels": {**_labels(run), **_queue(config)}, "annotations": {"tandem/run": str(run.directory)}},
        "spec": {
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            # The run has ended when its controller has, whatever the other pods do.
            "successPolicy": {"operator": "All", "targetReplicatedJobs": [CONTROLLER]},
            # Jobs replace their pods themselves, while the others go on.
            "failurePolicy": {"maxRestarts": 0},
            "ttlSecondsAfterFinished": _KEPT_S,
            "replicatedJobs": replicated,
        },
    }


def secret(run: RunObjects, values: dict[str, str]) -> Manifest:
    """Returns the Secret with the credential of the run's pods and the password of its etcd."""
    metadata = {"name": run.name, "labels": _labels(run)}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "type": "Opaque", "immutable": True, "stringData": values}


def network_policy(run: RunObjects) -> Manifest:
    """Returns the NetworkPolicy: the run's pods reach each other at any port, and all pods of the cluster the metrics."""
    labels = {OF_JOBSET: run.name}
    policy = only_from(labels, run.name, [({"podSelector": {"matchLabels": labels}}, ()), ({"namespaceSelector": {}}, (METRICS_PORT,))])
    return {**policy, "metadata": {"name": run.name, "labels": _labels(run)}}


def belonging_to(manifest: Manifest, owner: dict[str, Any]) -> Manifest:
    """Returns ``manifest`` as a part of the JobSet ``owner``, with which it is deleted."""
    reference = {"apiVersion": owner["apiVersion"], "kind": owner["kind"], "name": owner["metadata"]["name"], "uid": owner["metadata"]["uid"]}
    return {**manifest, "metadata": {**manifest["metadata"], "ownerReferences": [reference]}}


def new_secrets(credential: str, password: str) -> dict[str, str]:
    return {CREDENTIAL: credential, PASSWORD: password}


def _replicated(part: str, replicas: int, config: KubernetesConfig, run: RunObjects) -> Manifest:
    """Returns a replicated job: ``replicas`` jobs of one pod each, each of which replaces its pod by itself."""
    rules: list[Manifest] = [
        # It has saved the run, or was evicted: another pod continues it.
        {"action": "Ignore", "onExitCodes": {"containerName": CONTAINER, "operator": "In", "values": [SAVED]}},
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
    ]
    if part == CONTROLLER:
        # The run has failed, or was refused: so it would again.
        rules.insert(0, {"action": "FailJob", "onExitCodes": {"containerName": CONTAINER, "operator": "In", "values": [1, 2]}})
    return {
        "name": part,
        "replicas": replicas,
        "template": {
            "metadata": {"labels": _labels(run)},
            "spec": {
                "parallelism": 1, "completions": 1, "completionMode": "Indexed", "backoffLimit": config.max_restarts,
                "podFailurePolicy": {"rules": rules},
                "podReplacementPolicy": "Failed",
                "template": {"metadata": {"labels": {**_labels(run), "app.kubernetes.io/component": part}}, "spec": _pod(part, config, run)},
            },
        },
    }  # fmt: skip


def _pod(part: str, config: KubernetesConfig, run: RunObjects) -> Manifest:
    mounted, mounts = volumes(config.claim, config.mount_path, run.shared_memory)
    if run.shares_secret:
        for volume, mount in (
            secret_volume("secrets", run.name, str(SECRETS)),
            *([secret_volume("tls", config.tls_secret, str(CERTIFICATES))] if config.tls_secret else []),
        ):
            mounted.append(volume)
            mounts.append(mount)
    for number, path in enumerate(run.local_folders):
        # Of the pod, on its node's disk: what the loss of a node leaves is in the memory of the others, whose pods go on.
        mounted.append({"name": f"local-{number}", "emptyDir": {}})
        mounts.append({"name": f"local-{number}", "mountPath": path})
    # Kueue has priorities of its own.
    priority = {"priorityClassName": config.priority_class} if config.priority_class and not config.queue else {}
    alone = {"labelSelector": {"matchLabels": {OF_JOBSET: run.name}}, "topologyKey": "kubernetes.io/hostname"}
    return {
        **placement(config), **priority,
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": config.signal_s,
        "securityContext": pod_security(run.user),
        **({"affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [alone]}}} if config.nodes > 1 else {}),
        "containers": [_container(part, config, run, mounts)],
        "volumes": mounted,
    }  # fmt: skip


def _container(part: str, config: KubernetesConfig, run: RunObjects, mounts: list[Manifest]) -> Manifest:
    module, variables = ("job", []) if part == CONTROLLER else ("pod", _name_of_pod())
    ports = {"metrics": METRICS_PORT, "weights": WEIGHTS_PORT} if part == CONTROLLER else {"calls": CALLS_PORT}
    probes: Manifest = {}
    if part == CONTROLLER and run.has_metrics_port:
        # Not alive is for the run's own watchdog to say, which knows what it waits for.
        probes = {"readinessProbe": health("/metrics", "metrics")}
    elif part == PODS:
        probes = {"readinessProbe": health("/health", "calls")}
    return {
        "name": CONTAINER,
        "image": config.image,
        "command": ["python", "-m", f"{_MODULE}.{module}", str(run.directory)],
        "workingDir": str(run.folder),
        "env": [*environment(), *variables],
        "ports": [{"name": name, "containerPort": port} for name, port in ports.items()],
        **probes,
        "resources": resources(config, run.shared_memory),
        "securityContext": container_security(locks_memory=bool(config.rdma_resource)),
        # 'tandem status' shows the last lines of a container that has failed.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": mounts,
    }


def _name_of_pod() -> list[Manifest]:
    """Returns variables with a name that a pod has again when it is replaced."""
    index = "metadata.labels['jobset.sigs.k8s.io/job-index']"
    return [{"name": "JOB_INDEX", "valueFrom": {"fieldRef": {"fieldPath": index}}}, {"name": NAME, "value": "node-$(JOB_INDEX)"}]


def _labels(run: RunObjects) -> dict[str, str]:
    return {"app.kubernetes.io/name": "tandem", "app.kubernetes.io/instance": run.name}


def _queue(config: KubernetesConfig) -> dict[str, str]:
    if not config.queue:
        return {}
    priority = {"kueue.x-k8s.io/priority-class": config.priority_class} if config.priority_class else {}
    return {"kueue.x-k8s.io/queue-name": config.queue, **priority}

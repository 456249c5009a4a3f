"""The parts of pods that all manifests of Tandem share: who its processes are, what they may do, and what is mounted."""

from collections.abc import Mapping, Sequence
from typing import Any

from tandem.cluster.launch.kubernetes.in_pod import ADDRESS
from tandem.config.kubernetes import KubernetesConfig

Manifest = dict[str, Any]


def pod_security(user: int) -> Manifest:
    """Returns ``securityContext`` of a pod: the restricted Pod Security Standard, as ``user``."""
    return {
        "runAsNonRoot": True, "runAsUser": user, "runAsGroup": user, "fsGroup": user,
        # Without it every file of the shared volume gets a new group at each start.
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }  # fmt: skip


def container_security(*, locks_memory: bool = False) -> Manifest:
    """Returns ``securityContext`` of a container. ``locks_memory``: RDMA pins the memory of weights, which the restricted standard does not allow."""
    capabilities: Manifest = {"drop": ["ALL"], **({"add": ["IPC_LOCK"]} if locks_memory else {})}
    return {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": capabilities}


def resources(config: KubernetesConfig, shared_memory: str = "") -> Manifest:
    """Returns what each container of ``config`` asks for; limits are the same, so that nothing of it is lent to others. ``shared_memory``: the least memory
    that is asked for where ``config`` gives none, because what is in ``/dev/shm`` counts."""
    asked = {
        **({"cpu": config.cpu} if config.cpu else {}), **({"memory": config.memory} if config.memory else {}),
        **({config.gpu_resource: str(config.gpus)} if config.gpus else {}), **({config.rdma_resource: "1"} if config.rdma_resource else {}),
    }  # fmt: skip
    requests = asked if config.memory or not shared_memory else {**asked, "memory": shared_memory}
    return {"requests": requests, "limits": asked}


def placement(config: KubernetesConfig) -> Manifest:
    """Returns the part of a pod's ``spec`` that says on which nodes it may be, and with which account and image secret."""
    selector = dict(label.split("=", 1) for label in config.node_selector)
    return {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        **({"serviceAccountName": config.service_account} if config.service_account else {}),
        **({"imagePullSecrets": [{"name": config.image_pull_secret}]} if config.image_pull_secret else {}),
        **({"nodeSelector": selector} if selector else {}),
        **({"tolerations": [config.toleration(text) for text in config.tolerations]} if config.tolerations else {}),
    }


def environment(**more: str) -> list[Manifest]:
    """Returns the variables of a container: its address, a home that can be written, a name for its user, who has none in the image, and ``more``."""
    return [{"name": ADDRESS, "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}, {"name": "HOME", "value": "/tmp"}, {"name": "USER", "value": "tandem"},
            *({"name": name, "value": value} for name, value in more.items())]  # fmt: skip


def volumes(claim: str, mount_path: str, shared_memory: str) -> tuple[list[Manifest], list[Manifest]]:
    """Returns ``volumes`` and ``volumeMounts``: the shared folder, ``/dev/shm`` of a size, and a folder for temporary files. Empty: without it."""
    found: list[tuple[Manifest, Manifest]] = [({"name": "temporary", "emptyDir": {}}, {"name": "temporary", "mountPath": "/tmp"})]
    if shared_memory:
        memory = {"medium": "Memory", "sizeLimit": shared_memory}
        found.append(({"name": "shared-memory", "emptyDir": memory}, {"name": "shared-memory", "mountPath": "/dev/shm"}))
    if claim:
        found.append(({"name": "shared", "persistentVolumeClaim": {"claimName": claim}}, {"name": "shared", "mountPath": mount_path}))
    return [volume for volume, _ in found], [mount for _, mount in found]


def secret_volume(name: str, secret: str, path: str) -> tuple[Manifest, Manifest]:
    """Returns the volume and the mount of a Secret, for the pod's group alone."""
    return {"name": name, "secret": {"secretName": secret, "defaultMode": 0o440}}, {"name": name, "mountPath": path, "readOnly": True}


def health(path: str, port: int | str, *, period_s: int = 10, failures: int = 3) -> Manifest:
    return {"httpGet": {"path": path, "port": port}, "periodSeconds": period_s, "timeoutSeconds": 5, "failureThreshold": failures}


def only_from(labels: Mapping[str, str], name: str, sources: Sequence[tuple[Mapping[str, Any], Sequence[int]]]) -> Manifest:
    """Returns a NetworkPolicy: pods with ``labels`` are reached from pods of ``sources`` alone, a peer and its ports, all of them where none are given."""
    ingress = [{"from": [dict(peer)], **({"ports": [{"protocol": "TCP", "port": port} for port in ports]} if ports else {})} for peer, ports in sources]
    return {
        "apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": {"name": name, "labels": dict(labels)},
        "spec": {"podSelector": {"matchLabels": dict(labels)}, "policyTypes": ["Ingress"], "ingress": ingress},
    }  # fmt: skip

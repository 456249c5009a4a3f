"""A cluster of three etcd members: one may be lost."""

from tandem.cluster.emit.kubernetes.objects import USER, Place, disruption_budget, labels, metadata, reached_from, service
from tandem.cluster.launch.kubernetes.pod_template import Manifest, container_security, health, pod_security

IMAGE = "gcr.io/etcd-development/etcd:v3.5.21"
CLIENT_PORT, PEER_PORT = 2379, 2380
MEMBERS = 3
_NAME = "etcd"


def etcd(place: Place) -> list[Manifest]:
    """Returns the objects. Runs reach the members at ``endpoints()``."""
    template = {"metadata": {"labels": labels(_NAME)}, "spec": _pod()}
    volume = {"metadata": {"name": "data"}, "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "4Gi"}}}}
    spec = {
        "serviceName": _NAME, "replicas": MEMBERS, "podManagementPolicy": "Parallel", "selector": {"matchLabels": labels(_NAME)}, "template": template,
        "volumeClaimTemplates": [volume],
    }  # fmt: skip
    policy = reached_from(_NAME, place, [((_NAME,), (CLIENT_PORT, PEER_PORT))])
    runs = {"podSelector": {"matchLabels": {"app.kubernetes.io/name": "tandem"}}}
    policy["spec"]["ingress"].append({"from": [runs], "ports": [{"protocol": "TCP", "port": CLIENT_PORT}]})
    return [
        # Members find each other before they are ready.
        service(_NAME, _NAME, place, {"client": CLIENT_PORT, "peer": PEER_PORT}, headless=True),
        disruption_budget(_NAME, place),
        {"apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": metadata(_NAME, _NAME, place), "spec": spec},
        policy,
    ]


def endpoints() -> list[str]:
    """Returns the client URLs of the members, for ``coordination.endpoints``."""
    return [f"http://etcd-{number}.{_NAME}:{CLIENT_PORT}" for number in range(MEMBERS)]


def _pod() -> Manifest:
    cluster = ",".join(f"etcd-{number}=http://etcd-{number}.{_NAME}:{PEER_PORT}" for number in range(MEMBERS))
    options = {
        "name": "$(NAME)", "data-dir": "/data/etcd", "listen-client-urls": f"http://0.0.0.0:{CLIENT_PORT}",
        "advertise-client-urls": f"http://$(NAME).{_NAME}:{CLIENT_PORT}", "listen-peer-urls": f"http://0.0.0.0:{PEER_PORT}",
        "initial-advertise-peer-urls": f"http://$(NAME).{_NAME}:{PEER_PORT}", "initial-cluster": cluster, "initial-cluster-state": "new",
    }  # fmt: skip
    container = {
        "name": _NAME, "image": IMAGE, "command": [_NAME, *(f"--{name}={value}" for name, value in options.items())],
        "env": [{"name": "NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}],
        "ports": [{"name": "client", "containerPort": CLIENT_PORT}, {"name": "peer", "containerPort": PEER_PORT}],
        "readinessProbe": health("/health", "client"),
        "resources": {"requests": {"cpu": "1", "memory": "512Mi"}, "limits": {"memory": "2Gi"}},
        "securityContext": container_security(), "volumeMounts": [{"name": "data", "mountPath": "/data"}],
    }  # fmt: skip
    return {"automountServiceAccountToken": False, "securityContext": pod_security(USER), "containers": [container]}

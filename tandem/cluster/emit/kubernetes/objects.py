"""Objects of Kubernetes that several parts of an emitted topology have, over the pod template that runs on Kubernetes have too."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from tandem.cluster.launch.kubernetes.pod_template import Manifest, container_security, only_from, pod_security

USER = 1000
"""User and group of all processes."""
PART_OF = {"app.kubernetes.io/part-of": "tandem"}


@dataclass(frozen=True, slots=True)
class Place:
    """Where the objects are: their namespace, and the image of Tandem."""

    namespace: str
    image: str


def labels(component: str) -> dict[str, str]:
    """Returns the labels by which a component is selected."""
    return {**PART_OF, "app.kubernetes.io/component": component}


def metadata(name: str, component: str, place: Place) -> Manifest:
    return {"name": name, "namespace": place.namespace, "labels": labels(component)}


def namespace(place: Place, level: str) -> Manifest:
    """Returns the namespace. ``level``: of the Pod Security Standards that its pods obey."""
    enforced = {"pod-security.kubernetes.io/enforce": level}
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": place.namespace, "labels": {**PART_OF, **enforced}}}


def service(name: str, component: str, place: Place, ports: Mapping[str, int], *, headless: bool = False) -> Manifest:
    """Returns a Service for the pods of ``component``, at the ports of their containers with these names. ``headless``: its name has the addresses of all of
    them, also of those that are not ready."""
    listed = [{"name": key, "port": port, "targetPort": key} for key, port in ports.items()]
    own = {"clusterIP": "None", "publishNotReadyAddresses": True} if headless else {}
    spec = {**own, "selector": labels(component), "ports": listed}
    return {"apiVersion": "v1", "kind": "Service", "metadata": metadata(name, component, place), "spec": spec}


def config_map(name: str, component: str, place: Place, files: Mapping[str, str]) -> Manifest:
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata(name, component, place), "data": dict(files)}


def shared_claim(name: str, place: Place, storage_class: str, storage: str) -> Manifest:
    """Returns the claim that all nodes mount, with models and runs: the storage nodes are those of its class. ``storage_class``: empty for the default one."""
    named = {"storageClassName": storage_class} if storage_class else {}
    spec = {"accessModes": ["ReadWriteMany"], **named, "resources": {"requests": {"storage": storage}}}
    return {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": metadata(name, "storage", place), "spec": spec}


def disruption_budget(component: str, place: Place) -> Manifest:
    """Returns a PodDisruptionBudget: nodes are drained one pod of ``component`` at a time."""
    spec = {"maxUnavailable": 1, "selector": {"matchLabels": labels(component)}}
    return {"apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "metadata": metadata(component, component, place), "spec": spec}


@dataclass(frozen=True, slots=True)
class Program:
    """A program of others in a container of its own. ``files``: folders in which ConfigMaps are mounted, by the maps' names. ``data``: the folder with what it
    keeps, on a volume of ``storage``."""

    component: str
    image: str
    arguments: Sequence[str]
    ports: Mapping[str, int]
    probe: tuple[str, str]
    cpu: str = "500m"
    memory: str = "1Gi"
    replicas: int = 1
    files: Mapping[str, str] = field(default_factory=dict)
    data: str = ""
    storage: str = ""
    account: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    command: Sequence[str] = ()
    grace_s: int = 30

    def objects(self, place: Place) -> list[Manifest]:
        """Returns its Service and its Deployment; with ``data`` its StatefulSet, whose pod has the same volume again."""
        name = self.component
        template = {"metadata": {"labels": labels(name)}, "spec": self._pod()}
        common = {"replicas": self.replicas, "selector": {"matchLabels": labels(name)}, "template": template}
        found = [service(name, name, place, self.ports)]
        if not self.data:
            return [*found, {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": metadata(name, name, place), "spec": common}]
        claim = {"metadata": {"name": "data"}, "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": self.storage}}}}
        spec = {"serviceName": name, **common, "volumeClaimTemplates": [claim]}
        return [*found, {"apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": metadata(name, name, place), "spec": spec}]

    def _pod(self) -> Manifest:
        path, port = self.probe
        mounts = [{"name": name, "mountPath": folder, "readOnly": True} for name, folder in self.files.items()]
        volumes = [{"name": name, "configMap": {"name": name}} for name in self.files]
        if self.data:
            mounts.append({"name": "data", "mountPath": self.data})
        mounts.append({"name": "temporary", "mountPath": "/tmp"})
        volumes.append({"name": "temporary", "emptyDir": {}})
        container = {
            "name": self.component, "image": self.image,
            **({"command": list(self.command)} if self.command else {}), "args": list(self.arguments),
            **({"env": [{"name": name, "value": value} for name, value in self.environment.items()]} if self.environment else {}),
            "ports": [{"name": name, "containerPort": number} for name, number in self.ports.items()],
            "readinessProbe": {"httpGet": {"path": path, "port": port}, "periodSeconds": 5, "timeoutSeconds": 5},
            "resources": {"requests": {"cpu": self.cpu, "memory": self.memory}, "limits": {"memory": self.memory}},
            "securityContext": container_security(), "volumeMounts": mounts,
        }  # fmt: skip
        account = {"serviceAccountName": self.account} if self.account else {"automountServiceAccountToken": False}
        return {
            **account, "enableServiceLinks": False, "terminationGracePeriodSeconds": self.grace_s, "securityContext": pod_security(USER),
            "topologySpreadConstraints": spread(self.component), "containers": [container], "volumes": volumes,
        }  # fmt: skip


def spread(component: str) -> list[Manifest]:
    """Returns the constraint by which the pods of ``component`` are on different nodes where there are enough."""
    return [{"maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "ScheduleAnyway", "labelSelector": {"matchLabels": labels(component)}}]


def reader(name: str, place: Place, rules: Sequence[Mapping[str, Any]]) -> list[Manifest]:
    """Returns a ServiceAccount with a Role of ``rules`` in the namespace."""
    subject = {"kind": "ServiceAccount", "name": name, "namespace": place.namespace}
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name}
    about = metadata(name, name, place)
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": about},
        {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role", "metadata": about, "rules": [dict(rule) for rule in rules]},
        {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "RoleBinding", "metadata": about, "subjects": [subject], "roleRef": role},
    ]


def reached_from(component: str, place: Place, sources: Sequence[tuple[Sequence[str], Sequence[int]]]) -> Manifest:
    """Returns a NetworkPolicy: the pods of ``component`` are reached from those of other components alone, at the ports given with them."""
    peers = [({"podSelector": {"matchLabels": labels(each)}}, ports) for names, ports in sources for each in names]
    policy = only_from(labels(component), component, peers)
    return {**policy, "metadata": metadata(component, component, place)}


def manifest_file(objects: Sequence[Manifest], head: str) -> str:
    """Returns the text of a file with ``objects``."""
    return head + yaml.dump_all(objects, Dumper=_Dumper, sort_keys=False, width=160)


class _Dumper(yaml.SafeDumper):
    """Writes text of several lines as such, so that files in a ConfigMap can be read, and no aliases, which readers of manifests do not expect."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_Dumper.add_representer(
    str, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)
)  # fmt: skip

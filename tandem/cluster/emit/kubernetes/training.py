"""The training topology on Kubernetes: Kueue queues runs, which are JobSets; etcd is where their pods meet; a shared volume has checkpoints.

``tandem train`` makes the JobSet of a run. Here it is given in a Job of the cluster, whose ServiceAccount may make it.
"""

from tandem.cluster.emit.kubernetes.etcd import etcd
from tandem.cluster.emit.kubernetes.objects import Place, config_map, labels, metadata, namespace, reader, shared_claim
from tandem.cluster.emit.kubernetes.watching import watching
from tandem.cluster.launch.kubernetes.pod_template import Manifest, container_security, environment, pod_security, volumes
from tandem.config.kubernetes import KubernetesConfig

RUNS = "runs"
"""The ServiceAccount that may make JobSets."""
_KUEUE = "kueue.x-k8s.io/v1beta1"
ROLE_RULES = (
    {"apiGroups": ["jobset.x-k8s.io"], "resources": ["jobsets"], "verbs": ["create", "get", "delete"]},
    {"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "deletecollection"]},
    {"apiGroups": [""], "resources": ["secrets"], "verbs": ["create"]},
    {"apiGroups": ["networking.k8s.io"], "resources": ["networkpolicies"], "verbs": ["create"]},
    {"apiGroups": [""], "resources": ["persistentvolumeclaims", "serviceaccounts"], "verbs": ["get"]},
    {"apiGroups": ["kueue.x-k8s.io"], "resources": ["localqueues", "workloads"], "verbs": ["get", "list"]},
)
"""What ``tandem train --on kubernetes`` and the commands after it ask the API for."""


def training(place: Place, config: KubernetesConfig, recipe: str, storage_class: str, shared_storage: str, storage: str) -> dict[str, list[Manifest]]:
    """Returns the objects of each file. ``recipe``: the text of the recipe that is submitted, with section ``kubernetes`` ``config``. ``shared_storage``: of
    the volume with runs, models and checkpoints; ``storage``: of those of Prometheus and Loki."""
    return {
        "namespace.yaml": [namespace(place, "privileged" if config.rdma_resource else "restricted")],
        "storage.yaml": [shared_claim(config.claim, place, storage_class, shared_storage)],
        "queues.yaml": _queues(place, config),
        "etcd.yaml": etcd(place),
        "access.yaml": [*reader(RUNS, place, ROLE_RULES), *_cluster_reader(place)],
        **watching(place, ("run",), storage),
        "submit.yaml": [config_map("recipe", "submit", place, {"recipe.yaml": recipe}), _submit(place, config)],
    }


def _queues(place: Place, config: KubernetesConfig) -> list[Manifest]:
    """Returns the queues of Kueue, with room for one run on all GPU nodes."""
    of_node = {
        "cpu": config.cpu, "memory": config.memory, **({config.gpu_resource: str(config.gpus)} if config.gpus else {}),
        **({config.rdma_resource: "1"} if config.rdma_resource else {}),
    }  # fmt: skip
    quotas = [{"name": name, "nominalQuota": _times(amount, config.nodes)} for name, amount in of_node.items()]
    group = {"coveredResources": list(of_node), "flavors": [{"name": "gpu-nodes", "resources": quotas}]}
    selector = dict(label.split("=", 1) for label in config.node_selector)
    cluster = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": place.namespace}}, "resourceGroups": [group]}
    return [
        {"apiVersion": _KUEUE, "kind": "ResourceFlavor", "metadata": {"name": "gpu-nodes"}, "spec": {"nodeLabels": selector} if selector else {}},
        {"apiVersion": _KUEUE, "kind": "ClusterQueue", "metadata": {"name": "tandem"}, "spec": cluster},
        {"apiVersion": _KUEUE, "kind": "LocalQueue", "metadata": metadata(config.queue, "queue", place), "spec": {"clusterQueue": "tandem"}},
    ]


def _times(amount: str, count: int) -> str:
    number = amount.rstrip("GiMk")
    return f"{int(number) * count}{amount[len(number) :]}"


def _cluster_reader(place: Place) -> list[Manifest]:
    """Returns the ClusterRole for the checks of nodes, quotas and priorities."""
    name = f"tandem-{RUNS}-{place.namespace}"
    rules = [
        {"apiGroups": [""], "resources": ["nodes"], "verbs": ["list"]},
        {"apiGroups": [""], "resources": ["namespaces"], "verbs": ["get"]},
        {"apiGroups": ["kueue.x-k8s.io"], "resources": ["clusterqueues", "workloadpriorityclasses"], "verbs": ["get"]},
        {"apiGroups": ["scheduling.k8s.io"], "resources": ["priorityclasses"], "verbs": ["get"]},
    ]
    about = {"name": name, "labels": labels(RUNS)}
    return [
        {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole", "metadata": about, "rules": rules},
        {
            "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRoleBinding", "metadata": about,
            "subjects": [{"kind": "ServiceAccount", "name": RUNS, "namespace": place.namespace}],
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": name},
        },
    ]  # fmt: skip


def _submit(place: Place, config: KubernetesConfig) -> Manifest:
    """Returns the Job that gives ``tandem train`` on the shared volume. The command checks the cluster first, and ends when the run is placed."""
    mounted, mounts = volumes(config.claim, config.mount_path, "")
    mounted.append({"name": "recipe", "configMap": {"name": "recipe"}})
    mounts.append({"name": "recipe", "mountPath": "/etc/tandem", "readOnly": True})
    container = {
        "name": "submit", "image": place.image, "command": ["tandem", "train", "/etc/tandem/recipe.yaml", "--on", "kubernetes"],
        "workingDir": config.mount_path, "env": environment(), "resources": {"requests": {"cpu": "1", "memory": "1Gi"}, "limits": {"memory": "2Gi"}},
        "securityContext": container_security(), "terminationMessagePolicy": "FallbackToLogsOnError", "volumeMounts": mounts,
    }  # fmt: skip
    pod = {
        "serviceAccountName": RUNS, "restartPolicy": "Never", "securityContext": pod_security(config.user_id), "containers": [container], "volumes": mounted,
    }  # fmt: skip
    template = {"metadata": {"labels": labels("submit")}, "spec": pod}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata("submit", "submit", place), "spec": {"backoffLimit": 0, "template": template}}

"""Looks at what a run asks for before it is placed: the claim, the queue, priorities, accounts, and nodes that are large enough. What the user may not look at
is left to the server's dry run."""

import contextlib
import difflib
import re
from collections.abc import Iterable, Mapping

from tandem.cluster.launch.kubernetes.api import Api, Forbidden, Missing, Object
from tandem.config.kubernetes import KubernetesConfig
from tandem.types import UserError

_SUFFIXES = {"m": 1e-3, "": 1.0, "k": 1e3, **{letter: 1000.0**power for power, letter in enumerate("MGTPE", 2)}}
_BINARY = {f"{letter}i": 1024.0**power for power, letter in enumerate("KMGTPE", 1)}


def check_place(api: Api, config: KubernetesConfig) -> None:
    """Raises ``UserError`` for what the cluster does not have, or has too little of."""
    for check in (_check_claim, _check_queue, _check_priority, _check_accounts, _check_nodes):
        with contextlib.suppress(Forbidden):
            check(api, config)


def quantity(text: object) -> float:
    """Returns a quantity of Kubernetes, such as ``500m`` or ``64Gi``, as a number."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(m|[KMGTPE]i|[kMGTPE])?", str(text))
    if match is None:
        return 0.0
    suffix = match[2] or ""
    return float(match[1]) * (_BINARY[suffix] if suffix.endswith("i") else _SUFFIXES[suffix])


def _check_claim(api: Api, config: KubernetesConfig) -> None:
    try:
        claim = api.claim(config.claim)
    except Missing:
        raise UserError(f"'kubernetes.claim' is '{config.claim}', and namespace {api.namespace} has no PersistentVolumeClaim of this name") from None
    modes, phase = claim["spec"].get("accessModes") or [], (claim.get("status") or {}).get("phase")
    if config.nodes > 1 and "ReadWriteMany" not in modes:
        raise UserError(f"'kubernetes.claim' is '{config.claim}', which is {', '.join(modes)}; pods on several nodes need a claim that is ReadWriteMany")
    if phase == "Lost" or claim["metadata"].get("deletionTimestamp"):
        raise UserError(f"'kubernetes.claim' is '{config.claim}', which {'has lost its volume' if phase == 'Lost' else 'is being deleted'}")


def _check_queue(api: Api, config: KubernetesConfig) -> None:
    if not config.queue:
        return
    try:
        queue = api.local_queue(config.queue)
    except Missing as error:
        if error.is_kind:
            raise UserError(f"'kubernetes.queue' is '{config.queue}', and this cluster has no Kueue; install it, or remove the key") from None
        there = [each["metadata"]["name"] for each in api.local_queues()]
        raise UserError(f"'kubernetes.queue' is '{config.queue}', which namespace {api.namespace} does not have; {_hint(config.queue, there)}") from None
    inactive = next((each for each in (queue.get("status") or {}).get("conditions") or [] if each["type"] == "Active" and each["status"] == "False"), None)
    if inactive is not None:
        raise UserError(f"queue '{config.queue}' is not active: {inactive.get('message', inactive.get('reason', ''))}; choose another kubernetes.queue")
    of_cluster = api.cluster_queue(queue["spec"]["clusterQueue"])
    if not of_cluster["spec"].get("cohort") and not of_cluster["spec"].get("cohortName"):
        for resource, (amount, key) in _asked(config).items():
            flavors = [flavor for group in of_cluster["spec"].get("resourceGroups") or [] for flavor in group["flavors"]]
            quotas = [quantity(each["nominalQuota"]) for flavor in flavors for each in flavor["resources"] if each["name"] == resource]
            if amount * config.nodes > sum(quotas):
                has = f"has {_shown(sum(quotas), resource)}" if quotas else "has none"
                asked = f"{config.nodes} nodes with 'kubernetes.{key}' {getattr(config, key)} are {_shown(amount * config.nodes, resource)} of {resource}"
                raise UserError(f"{asked}, and queue '{config.queue}' {has}, so the run would wait for ever; lower them, or choose another kubernetes.queue")


def _check_priority(api: Api, config: KubernetesConfig) -> None:
    if not config.priority_class:
        return
    kind = "WorkloadPriorityClass" if config.queue else "PriorityClass"
    try:
        api.priority_class(config.priority_class, of_kueue=bool(config.queue))
    except Missing:
        raise UserError(f"'kubernetes.priority_class' is '{config.priority_class}', and this cluster has no {kind} of this name") from None


def _check_accounts(api: Api, config: KubernetesConfig) -> None:
    for name, key, read in (
        (config.service_account, "service_account", api.service_account),
        (config.image_pull_secret, "image_pull_secret", api.secret),
        (config.tls_secret, "tls_secret", api.secret),
    ):
        if not name:
            continue
        try:
            found = read(name)
        except Missing:
            raise UserError(f"'kubernetes.{key}' is '{name}', which namespace {api.namespace} does not have") from None
        if key == "tls_secret" and (missing := [each for each in ("tls.crt", "tls.key", "ca.crt") if each not in (found.get("data") or {})]):
            raise UserError(f"'kubernetes.tls_secret' is '{name}', which has no {missing[0]}; pods need tls.crt, tls.key and ca.crt")


def _check_nodes(api: Api, config: KubernetesConfig) -> None:
    if config.cluster_autoscaler:
        return
    wanted = dict(label.split("=", 1) for label in config.node_selector)
    nodes = [node for node in api.nodes() if not node["spec"].get("unschedulable") and _has(node["metadata"].get("labels") or {}, wanted)]
    instead = "set kubernetes.cluster_autoscaler if the cluster makes nodes when pods wait"
    where = f" with {', '.join(config.node_selector)}" if wanted else ""
    if len(nodes) < config.nodes:
        raise UserError(f"'kubernetes.nodes' is {config.nodes}, and the cluster has {len(nodes)} nodes{where} that take pods; lower it, or {instead}")
    for resource, (amount, key) in _asked(config).items():
        sizes = [quantity((node["status"].get("allocatable") or {}).get(resource, "0")) for node in nodes]
        if amount > max(sizes):
            has = f"has more than {_shown(max(sizes), resource)}" if max(sizes) else "has any"
            raise UserError(f"'kubernetes.{key}' is {getattr(config, key)}, and no node{where} {has} ({resource}); lower it, or {instead}")
        if (fit := sum(size >= amount for size in sizes)) < config.nodes:
            raise UserError(f"'kubernetes.nodes' is {config.nodes}, and {fit} nodes{where} have {_shown(amount, resource)} {resource}; lower it, or {instead}")


def _asked(config: KubernetesConfig) -> Mapping[str, tuple[float, str]]:
    """Returns of each resource that a pod asks for how much, and the key that says so."""
    asked = {"cpu": (config.cpu, "cpu"), "memory": (config.memory, "memory"), config.gpu_resource: (config.gpus or "", "gpus")}
    if config.rdma_resource:
        asked[config.rdma_resource] = ("1", "rdma_resource")
    return {resource: (quantity(text), key) for resource, (text, key) in asked.items() if text}


def _shown(amount: float, resource: str) -> str:
    return f"{amount / 2**30:.1f} GiB" if resource == "memory" else f"{amount:g}"


def _has(labels: Mapping[str, str], wanted: Mapping[str, str]) -> bool:
    return all(labels.get(key) == value for key, value in wanted.items())


def _hint(name: str, there: Iterable[str]) -> str:
    names = sorted(there)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    return f"did you mean '{near[0]}'?" if near else f"there are {', '.join(names[:20])}" if names else "it has no queue"


def first_condition(found: Object, kind: str) -> Object | None:
    """Returns the condition of this type that is true."""
    conditions = (found.get("status") or {}).get("conditions") or []
    return next((each for each in conditions if each["type"] == kind and each["status"] == "True"), None)

"""Where a run is, from its JobSet, its pods and what Kueue has made of it: pure functions of objects of the API."""

from collections.abc import Sequence

from tandem.cluster.launch.kubernetes.api import Object
from tandem.cluster.launch.kubernetes.check_place import first_condition
from tandem.cluster.launch.kubernetes.manifests import CONTROLLER
from tandem.cluster.launch.launcher import Status

_PART = "jobset.sigs.k8s.io/replicatedjob-name"
_LONGEST = 300


def state_of(jobset: Object, pods: Sequence[Object], workloads: Sequence[Object]) -> Status:
    """Returns where the run of ``jobset`` is. ``stopped``: the JobSet has ended well, whatever the run's folder says of its steps."""
    name = f"JobSet {jobset['metadata']['namespace']}/{jobset['metadata']['name']}"
    failed = first_condition(jobset, "Failed")
    if failed is not None:
        return Status("failed", name, _ended(pods) or _line(failed.get("message", "")))
    if first_condition(jobset, "Completed") is not None:
        return Status("stopped", name)
    first = [pod for pod in pods if pod["metadata"].get("labels", {}).get(_PART) == CONTROLLER and pod["status"].get("phase") not in ("Succeeded", "Failed")]
    if jobset["metadata"].get("deletionTimestamp"):
        return Status("running", f"{name}{_on(pods)}", "it was cancelled, and saves its step") if pods else Status("stopped", name)
    for pod in first:
        if pod["status"].get("phase") == "Running":
            return Status("running", f"{name}{_on(pods)}", _others(pods))
        return Status("queued", name, _waits(pod))
    return Status("queued", name, _of_kueue(workloads) if is_suspended(jobset) else "no pod of it yet")


def is_suspended(jobset: Object) -> bool:
    """Returns whether the JobSet waits to be admitted, or was stopped by Kueue in favour of another."""
    return first_condition(jobset, "Suspended") is not None or bool(jobset["spec"].get("suspend"))


def _on(pods: Sequence[Object]) -> str:
    nodes = sorted({pod["spec"]["nodeName"] for pod in pods if pod["spec"].get("nodeName") and pod["status"].get("phase") == "Running"})
    return f" on {', '.join(nodes)}" if nodes else ""


def _others(pods: Sequence[Object]) -> str:
    """Returns why a pod waits that is to join the run."""
    waiting = [pod for pod in pods if pod["status"].get("phase") == "Pending"]
    return f"{len(waiting)} of {len(pods)} pods wait: {_waits(waiting[0])}" if waiting else ""


def _waits(pod: Object) -> str:
    """Returns why a pod does not run yet: its container, else its place."""
    for status in pod["status"].get("containerStatuses") or []:
        waiting = (status.get("state") or {}).get("waiting")
        if waiting and waiting.get("reason") not in (None, "ContainerCreating", "PodInitializing"):
            return _line(f"{waiting['reason']}: {waiting.get('message') or status.get('image', '')}")
    for condition in pod["status"].get("conditions") or []:
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return _line(f"{condition.get('reason', 'not scheduled')}: {condition.get('message', '')}")
    return f"pod {pod['metadata']['name']} is being started"


def _of_kueue(workloads: Sequence[Object]) -> str:
    """Returns why Kueue does not let the run begin."""
    for workload in workloads:
        for condition in (workload.get("status") or {}).get("conditions") or []:
            if condition["type"] in ("QuotaReserved", "Admitted") and condition["status"] == "False" and condition.get("message"):
                return _line(f"Kueue: {condition['message']}")
    return "it is suspended"


def _ended(pods: Sequence[Object]) -> str:
    """Returns what the container has said last of the newest pod that has failed."""
    failed = [pod for pod in pods if pod["status"].get("phase") == "Failed" and pod["metadata"].get("labels", {}).get(_PART) == CONTROLLER]
    for pod in sorted(failed, key=lambda each: str(each["metadata"].get("creationTimestamp", "")), reverse=True):
        for status in pod["status"].get("containerStatuses") or []:
            ended = (status.get("state") or {}).get("terminated") or {}
            said = str(ended.get("message") or "").strip().splitlines()
            about = said[-1].removeprefix("tandem: ") if said else f"exit status {ended.get('exitCode')}"
            return _line(f"{ended['reason']}. {about}" if ended.get("reason") not in (None, "Error") else about)
        if pod["status"].get("reason"):
            return _line(f"{pod['status']['reason']}: {pod['status'].get('message', '')}")
    return ""


def _line(text: object) -> str:
    return " ".join(str(text).split())[:_LONGEST].rstrip(" .:")

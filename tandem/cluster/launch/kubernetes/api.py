"""The calls of the Kubernetes API that the launcher makes, and one line for each answer that is none."""

import json
from collections.abc import Callable, Mapping
from typing import Any

from tandem.cluster.launch.kubernetes.connection import Connection
from tandem.types import RunError, UserError

Object = dict[str, Any]
"""An object of the API, in its JSON form."""

JOBSET = ("jobset.x-k8s.io", "v1alpha2", "jobsets")
LOCAL_QUEUE = ("kueue.x-k8s.io", "v1beta1", "localqueues")
CLUSTER_QUEUE = ("kueue.x-k8s.io", "v1beta1", "clusterqueues")
WORKLOAD = ("kueue.x-k8s.io", "v1beta1", "workloads")
WORKLOAD_PRIORITY = ("kueue.x-k8s.io", "v1beta1", "workloadpriorityclasses")
OF_JOBSET = "jobset.sigs.k8s.io/jobset-name"
OF_WORKLOAD = "kueue.x-k8s.io/job-uid"

_TIMEOUT_S = (10.0, 30.0)
_MANAGER = "tandem"


class Forbidden(UserError):
    """The user may not make this call."""


class Missing(UserError):
    """There is no such object. ``is_kind``: the cluster does not know its kind either."""

    def __init__(self, message: str, is_kind: bool) -> None:
        super().__init__(message)
        self.is_kind = is_kind


class Api:
    """The API of ``connection``, in ``namespace``. Every call raises ``UserError`` or ``RunError`` in one line."""

    def __init__(self, connection: Connection, namespace: str) -> None:
        from kubernetes import client

        self.context, self.namespace, self._server = connection.context, namespace, str(connection.client.configuration.host)
        self._client = connection.client
        self._core, self._custom = client.CoreV1Api(connection.client), client.CustomObjectsApi(connection.client)
        self._network, self._scheduling = client.NetworkingV1Api(connection.client), client.SchedulingV1Api(connection.client)

    def create(self, manifest: Object, *, dry_run: bool = False) -> Object:
        """Returns ``manifest`` as the server has made it; ``dry_run``: as it would, after all of its checks."""
        options = {"field_manager": _MANAGER, "field_validation": "Strict", **({"dry_run": "All"} if dry_run else {})}
        kind, name = manifest["kind"], manifest["metadata"]["name"]
        if kind == "JobSet":
            return self._call(f"create JobSet {name}", self._custom.create_namespaced_custom_object, *_place(JOBSET, self.namespace), manifest, **options)
        make = {"Secret": self._core.create_namespaced_secret, "NetworkPolicy": self._network.create_namespaced_network_policy}[kind]
        return self._call(f"create {kind} {name}", make, self.namespace, manifest, **options)

    def jobset(self, name: str) -> Object | None:
        """Returns a JobSet; ``None`` if there is none of this name."""
        try:
            return self._call(f"read JobSet {name}", self._custom.get_namespaced_custom_object, *_place(JOBSET, self.namespace), name)
        except Missing as error:
            if error.is_kind:
                raise
            return None

    def delete_jobset(self, name: str, *, at_once: bool = False) -> None:
        """Ends a JobSet: its pods are asked to, and it is there until they have. ``at_once``: they are killed. One that is gone is none to end."""
        try:
            self._call(f"delete JobSet {name}", self._custom.delete_namespaced_custom_object, *_place(JOBSET, self.namespace), name,
                       propagation_policy="Foreground")  # fmt: skip
        except Missing:
            return
        if at_once:
            # After the JobSet, which so does not replace them.
            self._call(f"delete the pods of {name}", self._core.delete_collection_namespaced_pod, self.namespace, label_selector=f"{OF_JOBSET}={name}",
                       grace_period_seconds=0)  # fmt: skip

    def pods(self, jobset: str) -> list[Object]:
        """Returns the pods of a JobSet."""
        return list(self._call(f"list the pods of {jobset}", self._core.list_namespaced_pod, self.namespace, label_selector=f"{OF_JOBSET}={jobset}")["items"])

    def workloads(self, uid: str) -> list[Object]:
        """Returns what Kueue has made of the JobSet with this uid."""
        place, label = _place(WORKLOAD, self.namespace), f"{OF_WORKLOAD}={uid}"
        return list(self._call("list workloads", self._custom.list_namespaced_custom_object, *place, label_selector=label)["items"])

    def claim(self, name: str) -> Object:
        return self._call(f"read PersistentVolumeClaim {name}", self._core.read_namespaced_persistent_volume_claim, name, self.namespace)

    def secret(self, name: str) -> Object:
        return self._call(f"read Secret {name}", self._core.read_namespaced_secret, name, self.namespace)

    def service_account(self, name: str) -> Object:
        return self._call(f"read ServiceAccount {name}", self._core.read_namespaced_service_account, name, self.namespace)

    def nodes(self) -> list[Object]:
        return list(self._call("list nodes", self._core.list_node)["items"])

    def local_queue(self, name: str) -> Object:
        return self._call(f"read LocalQueue {name}", self._custom.get_namespaced_custom_object, *_place(LOCAL_QUEUE, self.namespace), name)

    def local_queues(self) -> list[Object]:
        return list(self._call("list LocalQueues", self._custom.list_namespaced_custom_object, *_place(LOCAL_QUEUE, self.namespace))["items"])

    def cluster_queue(self, name: str) -> Object:
        return self._call(f"read ClusterQueue {name}", self._custom.get_cluster_custom_object, *CLUSTER_QUEUE, name)

    def priority_class(self, name: str, *, of_kueue: bool) -> Object:
        if of_kueue:
            return self._call(f"read WorkloadPriorityClass {name}", self._custom.get_cluster_custom_object, *WORKLOAD_PRIORITY, name)
        return self._call(f"read PriorityClass {name}", self._scheduling.read_priority_class, name)

    def _call(self, what: str, function: Callable[..., Any], *arguments: Any, **options: Any) -> Object:
        from kubernetes.client.exceptions import ApiException
        from urllib3.exceptions import HTTPError, NewConnectionError, TimeoutError

        try:
            found = function(*arguments, _request_timeout=_TIMEOUT_S, **options)
        except ApiException as error:
            raise _refusal(what, self._server, int(error.status or 0), error.body) from None
        except (HTTPError, OSError) as error:
            reason = getattr(error, "reason", None) or error
            if isinstance(reason, TimeoutError) and not isinstance(reason, NewConnectionError):
                raise RunError(f"the API server {self._server} did not answer in time ({what}); try again") from None
            raise UserError(f"the API server {self._server} is not reached ({what}: {' '.join(str(reason).split())[:300]})") from None
        return dict(self._client.sanitize_for_serialization(found))


def _refusal(what: str, server: str, status: int, body: object) -> Exception:
    """Returns the error for an answer with ``status``, whose ``body`` is a Status object, or text of a proxy."""
    try:
        found = json.loads(body if isinstance(body, str | bytes) else "")
    except ValueError:
        found = None
    facts: Mapping[str, Any] = found if isinstance(found, Mapping) else {}
    text = " ".join(str(facts.get("message") or f"status {status}").split())[:600]
    if status == 401:
        return UserError(f"the API server {server} does not take these credentials (401, {what}); log in again ('kubectl get pods' must work)")
    if status == 403 and "exceeded quota" not in text and "admission webhook" not in text and "violates PodSecurity" not in text:
        return Forbidden(f"you may not {what}: {text}; docs/cluster/kubernetes.md has the role that is needed")
    if status == 404:
        details = facts.get("details")
        return Missing(f"Kubernetes cannot {what}: {text}", is_kind=not (isinstance(details, Mapping) and details.get("name")))
    if status >= 500 or status == 429:
        return RunError(f"the API server {server} could not {what} ({status}: {text}); try again")
    return UserError(f"Kubernetes refused to {what}: {text}")


def _place(kind: tuple[str, str, str], namespace: str) -> tuple[str, str, str, str]:
    group, version, plural = kind
    return group, version, namespace, plural

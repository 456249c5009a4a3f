"""Section ``kubernetes``: what a run asks Kubernetes for."""

import re
from dataclasses import dataclass
from pathlib import PurePosixPath

from tandem.config.limits import check_at_least_one
from tandem.types.errors import UserError

_NAMES = ("namespace", "queue", "priority_class", "claim", "service_account", "image_pull_secret", "tls_secret")
_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
_QUANTITIES = ("cpu", "memory", "shared_memory")
_QUANTITY = re.compile(r"\d+(\.\d+)?(m|[kMGTPE]|[KMGTPE]i)?")
_LABEL = re.compile(r"([a-z0-9]([a-z0-9.-]*[a-z0-9])?/)?[A-Za-z0-9]([\w.-]{0,61}[A-Za-z0-9])?")
_VALUE = re.compile(r"([A-Za-z0-9]([\w.-]{0,61}[A-Za-z0-9])?)?")
_TOLERATION = re.compile(r"(?P<key>[^=:]+)(=(?P<value>[^:]*))?(:(?P<effect>NoSchedule|PreferNoSchedule|NoExecute))?")
_TAKEN = ("/", "/tmp", "/dev/shm")
_MOST_NODES, _MOST_SECONDS = 10_000, 7 * 24 * 3600


@dataclass(frozen=True, slots=True)
class KubernetesConfig:
    """What `--on kubernetes` asks Kubernetes for; no other launcher reads it. See `cluster/kubernetes.md`."""

    context: str = ""
    """Context of the kubeconfig. Empty: its current one; without a kubeconfig, the cluster in which the command runs."""
    namespace: str = ""
    """Namespace. Empty: that of the context."""
    image: str = ""
    """Image with Tandem, as `registry.example.com/tandem:0.1.0`."""
    claim: str = ""
    """PersistentVolumeClaim (ReadWriteMany) with the run's folder, the model and every file that the recipe names."""
    mount_path: str = "/shared"
    """Path at which the claim is mounted in the pods. Where the command is given, the same volume has the same path."""
    queue: str = ""
    """LocalQueue of Kueue. Empty: the pods are not queued by Kueue."""
    priority_class: str = ""
    """Priority: a WorkloadPriorityClass where `queue` is set, else a PriorityClass."""
    nodes: int = 1
    """Nodes. The first has the controller, the trainer and an engine; every further one is a pod that joins the run. No two of them share a node."""
    cpu: str = ""
    """CPUs of each pod, as `16`, requested and the limit. Empty: none is asked for."""
    memory: str = ""
    """Memory of each pod, as `128Gi`, requested and the limit; `shared_memory` counts. Empty: none is asked for."""
    gpus: int = 0
    """GPUs of each pod."""
    gpu_resource: str = "nvidia.com/gpu"
    """The name that the device plugin gives to GPUs."""
    rdma_resource: str = ""
    """The name that the RDMA device plugin gives to its devices, as `rdma/hca_shared_devices_a`: each pod asks for one and may lock memory. Empty: none."""
    shared_memory: str = ""
    """Size of `/dev/shm`, as `32Gi`. Empty: what the run's weight buffers are estimated to need, and 1 GiB."""
    node_selector: tuple[str, ...] = ()
    """Labels that the nodes must have, as `[nvidia.com/gpu.product=H100]`. A resumed run needs the kind of processor that it began on."""
    tolerations: tuple[str, ...] = ()
    """Taints of nodes that the pods tolerate, as `[dedicated=training:NoSchedule]`."""
    service_account: str = ""
    """ServiceAccount of the pods, whose token they do not get. Empty: the namespace's default."""
    image_pull_secret: str = ""
    """Secret with which the image is pulled."""
    tls_secret: str = ""
    """Secret of type `kubernetes.io/tls` with `ca.crt`, as cert-manager makes it, for `pods.tls_cert_file` and the like. Empty: calls and weights between pods
    show the run's secret and are not encrypted."""
    user_id: int = 0
    """User and group of the processes. 0: those of the command, who owns the run's folder."""
    signal_s: int = 600
    """Seconds that a pod has to end (`terminationGracePeriodSeconds`) once it is evicted, preempted or cancelled: the run finishes its step, saves it and
    stops."""
    max_restarts: int = 20
    """How often pods that were killed are replaced. Evicted ones, and those that have saved the run, do not count."""
    cluster_autoscaler: bool = False
    """Nodes are made for pods that wait: a run is not refused for nodes and GPUs that are not there yet."""

    def check(self) -> None:
        """Raises ``UserError`` for names, quantities and paths that Kubernetes would not take."""
        check_at_least_one("kubernetes", self, "nodes", "signal_s")
        for name, most in (("nodes", _MOST_NODES), ("gpus", 1024), ("max_restarts", 10_000), ("user_id", 2**31 - 1), ("signal_s", _MOST_SECONDS)):
            if not 0 <= (value := getattr(self, name)) <= most:
                raise UserError(f"'kubernetes.{name}' is {value}; it must be between 0 and {most}")
        for name in _NAMES:
            if (text := getattr(self, name)) and not _NAME.fullmatch(text):
                raise UserError(f"'kubernetes.{name}' is {text!r}, which is not a name of Kubernetes; use small letters, digits, '-' and '.'")
        for name in _QUANTITIES:
            if (text := getattr(self, name)) and not (_QUANTITY.fullmatch(text) and float(re.match(r"[\d.]+", text)[0])):  # type: ignore[index]
                raise UserError(f"'kubernetes.{name}' is {text!r}, which is not a quantity of Kubernetes; write 16, 500m or 64Gi")
        for name in ("gpu_resource", "rdma_resource"):
            text = getattr(self, name)
            if (text or name == "gpu_resource") and not ("/" in text and _LABEL.fullmatch(text)):
                raise UserError(f"'kubernetes.{name}' is {text!r}, which is not a name of an extended resource; write it as nvidia.com/gpu")
        if self.image and (not self.image.isprintable() or not self.image.isascii() or " " in self.image or len(self.image) > 1024):
            raise UserError(f"'kubernetes.image' is {self.image!r}; write it as REGISTRY/NAME:TAG")
        path, is_word = PurePosixPath(self.mount_path), self.mount_path.isprintable() and ":" not in self.mount_path and len(self.mount_path) < 1024
        if not is_word or not path.is_absolute() or str(path) in _TAKEN or ".." in path.parts:
            raise UserError(f"'kubernetes.mount_path' is {self.mount_path!r}; give the absolute path of a folder, for example /shared")
        if not self.context.isprintable():
            raise UserError(f"'kubernetes.context' is {self.context!r}; give a name of 'kubectl config get-contexts'")
        for label in self.node_selector:
            key, equals, value = label.partition("=")
            if not equals or not _LABEL.fullmatch(key) or not _VALUE.fullmatch(value):
                raise UserError(f"'kubernetes.node_selector' has {label!r}; write each label as KEY=VALUE")
        for text in self.tolerations:
            match = _TOLERATION.fullmatch(text)
            if match is None or not _LABEL.fullmatch(match["key"]) or not _VALUE.fullmatch(match["value"] or ""):
                raise UserError(f"'kubernetes.tolerations' has {text!r}; write each taint as KEY=VALUE:EFFECT, for example dedicated=training:NoSchedule")

    def toleration(self, text: str) -> dict[str, str]:
        """Returns an item of ``tolerations`` in the API's form."""
        match = _TOLERATION.fullmatch(text)
        assert match is not None, "check() has seen it"
        value = {"operator": "Exists"} if match["value"] is None else {"operator": "Equal", "value": match["value"]}
        return {"key": match["key"], **value, **({"effect": match["effect"]} if match["effect"] else {})}

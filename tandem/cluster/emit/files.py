"""All files of an emitted topology, for each launcher, and their folder."""

import re
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tandem.cluster.emit import machines, training
from tandem.cluster.emit.kubernetes.inference import inference as on_kubernetes
from tandem.cluster.emit.kubernetes.objects import USER, Place, manifest_file, shared_claim
from tandem.cluster.emit.kubernetes.training import training as training_on_kubernetes
from tandem.cluster.emit.kubernetes.watching import COLLECTOR
from tandem.cluster.emit.machines import SlurmPlace
from tandem.cluster.emit.ray import ray_inference
from tandem.cluster.emit.readme import readme
from tandem.cluster.emit.topology import InferenceTopology, TrainingTopology
from tandem.cluster.launch.launcher import LauncherName
from tandem.config.kubernetes import KubernetesConfig
from tandem.config.slurm import SlurmConfig
from tandem.types import UserError

Files = dict[str, str]
QUEUE = "train"
_EXECUTABLE = ("sh", "sbatch")
_PATH = re.compile(r"(/[\w.-]+)+", re.ASCII)


@dataclass(frozen=True, slots=True)
class Site:
    """What a place has, and the topologies do not say. ``shared``: the folder that all machines have. ``jaeger``: address of a collector of traces; empty:
    none. ``storage``: of the volumes of Prometheus and Loki, ``shared_storage``: of the shared volume, as quantities of Kubernetes."""

    shared: str = "/shared"
    namespace: str = "tandem"
    image: str = "tandem:0.1.0"
    claim: str = "shared"
    storage_class: str = ""
    shared_storage: str = "10Ti"
    storage: str = "200Gi"
    rdma_resource: str = ""
    node_selector: tuple[str, ...] = ()
    partition: str = ""
    account: str = ""
    time: str = ""
    jaeger: str = ""

    def check(self) -> None:
        """Raises ``UserError`` for what could not be in a script."""
        if not _PATH.fullmatch(self.shared) or self.shared == "/":
            raise UserError(f"--shared is {self.shared!r}; give the absolute path of a folder, of letters, digits, '.', '_' and '-', for example /shared")
        SlurmConfig(partition=self.partition, account=self.account, time=self.time).check()

    @property
    def place(self) -> Place:
        return Place(self.namespace, self.image)

    def kubernetes(self, **more: Any) -> KubernetesConfig:
        """Returns what pods ask for, checked. Raises ``UserError``."""
        config = KubernetesConfig(
            namespace=self.namespace, image=self.image, claim=self.claim, mount_path=self.shared, user_id=USER, rdma_resource=self.rdma_resource,
            node_selector=self.node_selector, **more,
        )  # fmt: skip
        config.check()
        return config


@dataclass(frozen=True, slots=True)
class Emitted:
    """``launchers``: for which files are written, each in a folder of its own if there are several."""

    topology: InferenceTopology | TrainingTopology
    launchers: Sequence[LauncherName]
    folder: Path
    site: Site = field(default_factory=Site)

    def files(self) -> Files:
        """Returns the text of each file, by its path in the folder. Raises ``UserError`` for what cannot be."""
        self.topology.check()
        self.site.check()
        if not _PATH.fullmatch(str(self.folder)):
            raise UserError(f"--folder is {str(self.folder)!r}, which scripts could not name; use letters, digits, '.', '_' and '-'")
        found: Files = {}
        for launcher in self.launchers:
            folder = self.folder / launcher if len(self.launchers) > 1 else self.folder
            made = self._inference(self.topology, launcher, folder) if isinstance(self.topology, InferenceTopology) else self._training(
                self.topology, launcher, folder
            )  # fmt: skip
            found |= {str((folder / name).relative_to(self.folder)): text for name, text in made.items()}
        return found

    def _inference(self, topology: InferenceTopology, launcher: LauncherName, folder: Path) -> Files:
        site = self.site
        if launcher == "kubernetes":
            asked = site.kubernetes(gpus=topology.tensor_parallel if topology.node.gpus else 0, cpu=str(topology.cpus), memory=f"{topology.memory_gib}Gi")
            claim = shared_claim(site.claim, site.place, site.storage_class, site.shared_storage)
            files = _manifests(on_kubernetes(topology, site.place, asked, claim, site.storage))
        elif launcher == "slurm":
            files = machines.slurm(topology, SlurmPlace(site.partition, site.account, site.time), folder, site.jaeger)
        elif launcher == "ray":
            files = ray_inference(topology, site.jaeger, folder)
        else:
            self._check_one_machine(topology)
            files = machines.local(topology, site.jaeger)
        facts = {
            "gateways": topology.gateways, "instances": topology.instances, "model": topology.model.name, "namespace": site.namespace, "port": topology.port,
            "parallel": topology.tensor_parallel if topology.node.gpus else 0,
        }  # fmt: skip
        return {**files, "README.md": readme("inference", launcher, facts)}

    def _training(self, topology: TrainingTopology, launcher: LauncherName, folder: Path) -> Files:
        site, shared = self.site, Path(self.site.shared)
        if launcher == "kubernetes":
            cpus, memory_gib = training.whole_node(topology)
            asked = site.kubernetes(nodes=len(topology.gpu_nodes), gpus=topology.node.gpus, cpu=str(cpus), memory=f"{memory_gib}Gi", queue=QUEUE)
            recipe = training.recipe_on_kubernetes(topology, asked, COLLECTOR)
            files = _manifests(training_on_kubernetes(site.place, asked, recipe, site.storage_class, site.shared_storage, site.storage))
            files["recipe.yaml"] = recipe
        elif launcher == "slurm":
            files = training.slurm(topology, shared, SlurmPlace(site.partition, site.account, site.time), folder, site.jaeger)
        elif launcher == "ray":
            files = training.ray(topology, shared, folder, site.jaeger)
        else:
            files = training.local(topology, folder, site.jaeger)
        has = "data-parallel ranks" if training.is_on_data(topology) else "pods of trainer and rollout"
        facts = {"nodes": len(topology.gpu_nodes), "namespace": site.namespace, "has": has}
        return {**files, "README.md": readme("training", launcher, facts)}

    def _check_one_machine(self, topology: InferenceTopology) -> None:
        needed = topology.instances * topology.tensor_parallel
        if topology.node.gpus and needed > topology.node.gpus:
            raise UserError(
                f"--instances is {topology.instances} of {topology.tensor_parallel} GPUs each, and one machine has {topology.node.gpus} (--gpus-per-node); "
                "lower them, or choose --on slurm, ray or kubernetes"
            )


def write_emitted(emitted: Emitted) -> list[str]:
    """Writes the files to their folder, which is all there or not at all; returns their names. Raises ``UserError`` for a folder that has something in it."""
    files, folder = emitted.files(), emitted.folder
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise UserError(f"--folder is '{folder}', which is not empty, and nothing is overwritten; name a new folder")
        folder.parent.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        try:
            fresh.chmod(0o755)
            for name, text in files.items():
                path = fresh / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, encoding="utf-8")
                if name.rpartition(".")[2] in _EXECUTABLE:
                    path.chmod(0o755)
            fresh.replace(folder)
        except BaseException:
            shutil.rmtree(fresh, ignore_errors=True)
            raise
    except OSError as error:
        raise UserError(f"--folder is '{folder}', which cannot be written ({error.strerror}); name another one") from None
    return sorted(files)


def _manifests(made: dict[str, list[dict[str, Any]]]) -> Files:
    return {name: manifest_file(objects, training.HEAD) for name, objects in made.items()}

"""Write the files of a whole topology for a launcher: head, storage and GPU nodes of training, or load balancer, gateways and engines of inference.

Nothing is started: the folder has what Kubernetes, Slurm, Ray or a shell are given, and a README that says in which order.

examples:
  tandem emit --topology inference                       eight engines of llama-70b, two GPUs each, for Slurm, Ray and Kubernetes
  tandem emit --topology inference --on kubernetes --model llama-70b --tensor-parallel 2 --instances 8 --image registry.example.com/tandem:0.1.0
  tandem emit --topology inference --on local --model runs/sort/model --tensor-parallel 1 --instances 2 --gpus-per-node 0
  tandem emit --topology training --on slurm --recipe recipe.yaml --gpu-nodes gpu1,gpu2,gpu3,gpu4 --storage-nodes nas1,nas2
  tandem emit --topology training --recipe pretrain.yaml       data-parallel ranks on all GPUs of the nodes that are no spares
  tandem emit --topology training --on kubernetes --gpu-nodes a,b --storage-class nfs --rdma-resource rdma/hca_shared_devices_a
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from tandem.cluster.launch.launcher import LAUNCHERS, LauncherName
from tandem.types import UserError

if TYPE_CHECKING:
    from tandem.cluster.emit.topology import InferenceTopology, NodeKind, TrainingTopology

_OF_INFERENCE = ("model", "tensor_parallel", "instances", "max_instances", "gateways", "port")
_OF_TRAINING = ("recipe", "head", "gpu_nodes", "storage_nodes", "spares")
_READ_BY: dict[str, tuple[LauncherName, ...]] = {
    **dict.fromkeys(("max_instances", "image", "namespace", "claim", "storage_class", "rdma_resource", "node_selector"), ("kubernetes",)),
    **dict.fromkeys(("partition", "account", "time"), ("slurm",)), **dict.fromkeys(("head", "storage_nodes"), ("slurm", "ray")),
    **dict.fromkeys(("gpu_nodes", "spares"), ("slurm", "ray", "kubernetes")), "jaeger": ("local", "slurm", "ray"),
}  # fmt: skip
"""The launchers whose files have what an option says; the other options are for all of them."""
_OF_SITE = ("shared", "namespace", "image", "claim", "storage_class", "rdma_resource", "partition", "account", "time", "jaeger")


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--topology", choices=("training", "inference"), required=True, help="which of the two")
    parser.add_argument(
        "--on", choices=(*LAUNCHERS, "all"), default="all", help="for which launcher (default: all with several machines, each in a folder of its own)"
    )
    parser.add_argument("--folder", metavar="DIR", help="a new folder for the files (default: the topology's name)")
    inference = parser.add_argument_group("inference")
    inference.add_argument("--model", metavar="MODEL", help="a folder, or a published model such as llama-70b (default: llama-70b)")
    inference.add_argument("--tensor-parallel", type=int, metavar="N", help="GPUs of each engine instance (default: 2)")
    inference.add_argument("--instances", type=int, metavar="N", help="engine instances (default: 8)")
    inference.add_argument("--max-instances", type=int, metavar="N", help="up to which Kubernetes scales them (default: twice --instances)")
    inference.add_argument("--gateways", type=int, metavar="N", help="gateways behind the load balancer (default: 2)")
    inference.add_argument("--port", type=int, metavar="PORT", help="of the load balancer; gateways and engines have the next ones (default: 8000)")
    training = parser.add_argument_group("training")
    training.add_argument("--recipe", metavar="RECIPE", help="a YAML file, or a recipe that comes with Tandem (default: sort)")
    training.add_argument("--head", metavar="HOST", help="the head node (default: head)")
    training.add_argument("--gpu-nodes", metavar="HOST,HOST", help="the GPU nodes; Kubernetes reads their number (default: gpu1,gpu2,gpu3,gpu4)")
    training.add_argument("--storage-nodes", metavar="HOST[,HOST]", help="for runs, and for copies of checkpoints (default: storage1,storage2)")
    training.add_argument("--spares", type=int, metavar="N", help="GPU nodes that are held back for one that fails (default: 1, with fewer than 3 nodes 0)")
    nodes = parser.add_argument_group("nodes")
    nodes.add_argument("--gpus-per-node", type=int, default=8, metavar="N", help="0: engines compute on CPUs (default: 8)")
    nodes.add_argument("--gpu-memory-gib", type=float, default=80.0, metavar="GIB", help="of each GPU (default: 80)")
    nodes.add_argument("--cpus-per-gpu", type=int, default=12, metavar="N", help="cores for each GPU, or of each engine without GPUs (default: 12)")
    nodes.add_argument("--memory-gib-per-gpu", type=int, default=120, metavar="GIB", help="memory of the node for each (default: 120)")
    site = parser.add_argument_group("site")
    site.add_argument("--shared", metavar="DIR", help="the folder that all machines have, or at which the claim is mounted (default: /shared)")
    site.add_argument("--image", metavar="IMAGE", help="of Tandem, for Kubernetes (default: tandem:VERSION)")
    site.add_argument("--namespace", metavar="NAME", help="of Kubernetes (default: tandem)")
    site.add_argument("--claim", metavar="NAME", help="the PersistentVolumeClaim with models and runs (default: shared)")
    site.add_argument("--storage-class", metavar="NAME", help="of that claim, ReadWriteMany (default: the cluster's)")
    site.add_argument("--rdma-resource", metavar="NAME", help="of the RDMA device plugin, one for each pod (default: none)")
    site.add_argument("--node-selector", action="append", metavar="KEY=VALUE", help="a label that the nodes with GPUs have; may be repeated")
    site.add_argument("--partition", metavar="NAME", help="of Slurm (default: gpu for training, else the cluster's)")
    site.add_argument("--account", metavar="NAME", help="of Slurm")
    site.add_argument("--time", metavar="TIME", help="limit of the job of Slurm, days first")
    site.add_argument("--jaeger", metavar="URL", help="collector of traces, such as http://head:4318; on Kubernetes one is emitted (default: none)")


def run(options: argparse.Namespace) -> int:
    from tandem import __version__
    from tandem.cluster.emit.files import Emitted, Site, write_emitted

    other = _OF_TRAINING if options.topology == "inference" else _OF_INFERENCE
    if (name := next((each for each in other if getattr(options, each) is not None), None)) is not None:
        raise UserError(f"--{name.replace('_', '-')} is for the other topology than --topology {options.topology}; leave it out")
    shared: tuple[LauncherName, ...] = ("kubernetes",) if options.topology == "inference" else ("slurm", "ray", "kubernetes")
    for each, readers in {**_READ_BY, "shared": shared}.items():
        if options.on not in ("all", *readers) and getattr(options, each) is not None:
            raise UserError(f"--{each.replace('_', '-')} is for --on {' or '.join(readers)} of this topology, and --on is {options.on}; leave it out")
    topology = _inference(options) if options.topology == "inference" else _training(options)
    given = {name: value for name in _OF_SITE if (value := getattr(options, name)) is not None}
    site = Site(**{"image": f"tandem:{__version__}", **given, "node_selector": tuple(options.node_selector or ())})
    launchers = LAUNCHERS[1:] if options.on == "all" else (options.on,)
    folder = Path(options.folder or options.topology).expanduser().absolute()
    names = write_emitted(Emitted(topology, launchers, folder, site))
    print(f"wrote {len(names)} files to {folder}; {'each README.md' if len(launchers) > 1 else 'README.md'} there says how they are started")
    return 0


def _inference(options: argparse.Namespace) -> "InferenceTopology":
    from tandem.cluster.emit.topology import InferenceTopology, served_model

    given = {name: value for name in ("tensor_parallel", "instances", "gateways", "port") if (value := getattr(options, name)) is not None}
    most = {"most_instances": options.max_instances if options.max_instances is not None else 2 * given.get("instances", 8)}
    return InferenceTopology(served_model(options.model or "llama-70b"), node=_node(options), **given, **most)


def _training(options: argparse.Namespace) -> "TrainingTopology":
    from tandem.cluster.emit.topology import TrainingTopology

    given = {name: value for name in ("recipe", "head", "spares") if (value := getattr(options, name)) is not None}
    for name in ("gpu_nodes", "storage_nodes"):
        if (text := getattr(options, name)) is not None:
            given[name] = tuple(each.strip() for each in text.split(","))
    if "spares" not in given and len(given.get("gpu_nodes", ())) in (1, 2):
        given["spares"] = 0
    return TrainingTopology(node=_node(options), **given)


def _node(options: argparse.Namespace) -> "NodeKind":
    from tandem.cluster.emit.topology import NodeKind

    return NodeKind(options.gpus_per_node, options.gpu_memory_gib, options.cpus_per_gpu, options.memory_gib_per_gpu)

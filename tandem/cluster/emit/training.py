"""The training topology: the recipe of a run on all GPU nodes and, without Kubernetes, the head node, the storage nodes, and the scheduler's own files."""

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from shlex import quote
from typing import Any

import yaml

from tandem.cluster.emit.head import ETCD_PORT, ETCD_USER, PASSWORD, head_script
from tandem.cluster.emit.kubernetes.etcd import endpoints
from tandem.cluster.emit.machines import SlurmPlace
from tandem.cluster.emit.scripts import script
from tandem.cluster.emit.topology import TrainingTopology
from tandem.cluster.launch.several_nodes import for_nodes, section
from tandem.config.bundled import recipe_file
from tandem.config.kubernetes import KubernetesConfig
from tandem.config.load import apply_overrides, read_yaml
from tandem.config.recipe import ON_DATA, recipe_of

HEAD = "# Written by 'tandem emit'.\n"
_RAY_PORT = 6379


def recipe_text(topology: TrainingTopology, sections: dict[str, dict[str, Any]]) -> str:
    """Returns the text of the topology's recipe with ``sections``, which have those of its file in them. Raises ``UserError`` for one that cannot be on several
    nodes."""
    merged = {**read_yaml(recipe_file(topology.recipe))}
    for name, values in sections.items():
        merged[name] = {**section(merged, name), **values}
    if len(topology.gpu_nodes) > 1 and is_on_data(topology):
        merged["parallel"] = _parallel_on_data(topology, section(merged, "parallel"))
        # With what the launcher will add, so that what it could not place is refused now.
        named = {**merged, "run": {"name": "run", **section(merged, "run")}}
        more, _ = for_nodes(named, Path("run"), lambda data: (len(topology.gpu_nodes), "--gpu-nodes"), etcd_is_here=False)
        recipe_of(apply_overrides(named, more))
    else:
        recipe_of(merged)
    return HEAD + yaml.safe_dump(merged, sort_keys=False, width=160)


def is_on_data(topology: TrainingTopology) -> bool:
    """Returns whether the run of ``topology`` trains on data: then each GPU node that is no spare has ranks, and none draws samples."""
    return section(read_yaml(recipe_file(topology.recipe)), "algorithm").get("name") in ON_DATA


def _parallel_on_data(topology: TrainingTopology, own: Mapping[str, Any]) -> dict[str, Any]:
    """Returns section ``parallel`` for all GPUs of the nodes that train; ``own`` is kept where it says how many data-parallel ranks there are."""
    if own.get("data", 1) != 1 or own.get("layout") == "auto":
        return dict(own)
    replica = math.prod(size for name in ("tensor", "context", "pipeline") if isinstance(size := own.get(name, 1), int))
    nodes, gpus = len(topology.gpu_nodes) - topology.spares, topology.node.gpus
    if 0 < gpus < replica:
        # Its stages are on several nodes.
        return {**own, "data": max(1, nodes * gpus // replica)}
    return {**own, "data": nodes * max(1, gpus // max(1, replica))}


def shared_sections(topology: TrainingTopology, shared: Path, jaeger: str) -> dict[str, dict[str, Any]]:
    """Returns the sections of a recipe that are the same under Slurm and Ray. ``jaeger``: address of a collector of traces; empty: none."""
    several = len(topology.gpu_nodes) > 1
    more = shared / "checkpoints"
    return {
        "run": {"directory": str(shared / "runs")},
        # On the volume of the first storage node, and copied to that of the next one.
        **({"checkpoint": {"upload": str(more)}} if len(topology.storage_nodes) > 1 else {}),
        "metrics": {"host": "0.0.0.0", "targets_folder": str(shared / "targets")}, **_traces(jaeger),
        **({
            "coordination": {
                "store": "etcd", "endpoints": [f"http://{topology.head}:{ETCD_PORT}"], "user": ETCD_USER, "password_file": str(shared / "head" / PASSWORD),
            },
            "cluster": {"spares": topology.spares},
        } if several else {}),
    }  # fmt: skip


def _traces(jaeger: str) -> dict[str, dict[str, Any]]:
    return {"traces": {"endpoint": jaeger}} if jaeger else {}


def slurm(topology: TrainingTopology, shared: Path, place: SlurmPlace, folder: Path, jaeger: str) -> dict[str, str]:
    """Returns the files of the topology under Slurm, at ``place``. ``folder``: in which they will be; ``jaeger``: as of ``shared_sections``."""
    node, name = topology.node, place.partition or "gpu"
    asked = {key: value for key, value in (("account", place.account), ("time", place.time)) if value}
    cpus, memory_gib = whole_node(topology)
    sections = shared_sections(topology, shared, jaeger) | {
        "slurm": {"partition": name, "nodes": len(topology.gpu_nodes), **asked, **({"gpus_per_node": str(node.gpus)} if node.gpus else {})}
    }  # fmt: skip
    listed = ",".join(topology.gpu_nodes)
    gres = f" Gres=gpu:{node.gpus}" if node.gpus else ""
    nodes = [
        "# A part of slurm.conf, on the head node and on all others: Include nodes.conf", *(["GresTypes=gpu"] if node.gpus else []),
        f"NodeName={listed} CPUs={cpus} RealMemory={memory_gib * 1000}{gres}",
        f"PartitionName={name} Nodes={listed} Default=YES MaxTime=UNLIMITED State=UP", "",
    ]  # fmt: skip
    preflight = script(
        "#SBATCH --job-name=tandem-preflight", f"#SBATCH --partition={name}", f"#SBATCH --nodes={len(topology.gpu_nodes)}", "#SBATCH --ntasks-per-node=1",
        *([f"#SBATCH --account={place.account}"] if place.account else []),
        "#SBATCH --exclusive", f"#SBATCH --output={shared}/logs/preflight-%j.out", *([f"#SBATCH --gpus-per-node={node.gpus}"] if node.gpus else []), "",
        "# Measures every GPU node, and says which is not fit. A run does the same before it begins; this is for the administrator.",
        f'reports={shared}/logs/preflight-"$SLURM_JOB_ID"', 'mkdir -p "$reports"',
        "srun --kill-on-bad-exit=0 bash -c 'tandem doctor --preflight --json > \"$0/$SLURMD_NODENAME.json\"' \"$reports\"",
        'tandem doctor --compare "$reports"/*.json',
    )  # fmt: skip
    submit = script("# Submits the run, from the head node.", "set -eu", f"cd {shared}", f'tandem train {quote(str(folder / "recipe.yaml"))} --on slurm "$@"')
    return {
        "nodes.conf": "\n".join(nodes), **({"gres.conf": f"NodeName={listed} Name=gpu File=/dev/nvidia[0-{node.gpus - 1}]\n"} if node.gpus else {}),
        "head.sh": head_script(topology.head, shared), "preflight.sbatch": preflight, "submit.sh": submit,
        "recipe.yaml": recipe_text(topology, sections), **storage(topology, shared),
    }  # fmt: skip


def ray(topology: TrainingTopology, shared: Path, folder: Path, jaeger: str) -> dict[str, str]:
    """Returns the files of the topology on Ray. ``folder``: in which they will be; ``jaeger``: as of ``shared_sections``."""
    node = topology.node
    sections = shared_sections(topology, shared, jaeger) | {
        "ray": {"address": f"{topology.head}:{_RAY_PORT}", "nodes": len(topology.gpu_nodes), **({"num_gpus": node.gpus} if node.gpus else {})}
    }  # fmt: skip
    submit = script("# Submits the run, on the head node.", "set -eu", f"cd {shared}", f'tandem train {quote(str(folder / "recipe.yaml"))} --on ray "$@"')
    return {
        "cluster.yaml": ray_cluster("tandem-training", topology.head, topology.gpu_nodes), "head.sh": head_script(topology.head, shared),
        "submit.sh": submit, "recipe.yaml": recipe_text(topology, sections), **storage(topology, shared),
    }  # fmt: skip


def local(topology: TrainingTopology, folder: Path, jaeger: str) -> dict[str, str]:
    """Returns the files of the topology on one machine, which is head, storage and GPU node at once."""
    one = replace(topology, gpu_nodes=topology.gpu_nodes[:1], spares=0)
    sections = {"run": {"directory": str(folder / "runs")}, "metrics": {"targets_folder": str(folder / "targets")}, **_traces(jaeger)}
    submit = script("# Trains in this terminal.", "set -eu", f"cd {quote(str(folder))}", 'tandem train recipe.yaml "$@"')
    return {"submit.sh": submit, "recipe.yaml": recipe_text(one, sections)}


def recipe_on_kubernetes(topology: TrainingTopology, config: KubernetesConfig, collector: str) -> str:
    """Returns the recipe that the emitted Job submits, with section ``kubernetes`` ``config``. ``collector``: where spans are sent."""
    several, default = config.nodes > 1, KubernetesConfig()
    asked = {name: _plain(value) for name in KubernetesConfig.__dataclass_fields__ if (value := getattr(config, name)) != getattr(default, name)}
    asked["mount_path"] = config.mount_path
    sections: dict[str, dict[str, Any]] = {
        "run": {"directory": f"{config.mount_path}/runs"}, "kubernetes": asked, "traces": {"endpoint": collector},
        **({"coordination": {"store": "etcd", "endpoints": endpoints()}, "cluster": {"spares": topology.spares}}
           if several else {}),
    }  # fmt: skip
    return recipe_text(topology, sections)


def _plain(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value


def ray_cluster(name: str, head: str, workers: tuple[str, ...]) -> str:
    """Returns the file of ``ray up``, for hosts that are there: a head without cores of its own, and all that ``workers`` have."""
    start = "ray start --disable-usage-stats"
    cluster = {
        "cluster_name": name, "max_workers": len(workers),
        "provider": {"type": "local", "head_ip": head, "worker_ips": list(workers)}, "auth": {"ssh_user": "tandem"},
        # A cluster runs what its users send it: only who has the token is let in.
        "initialization_commands": [], "setup_commands": [], "head_setup_commands": [], "worker_setup_commands": [],
        "head_start_ray_commands": [
            "ray stop", f"RAY_AUTH_MODE=token {start} --head --port={_RAY_PORT} --num-cpus=0 --num-gpus=0 --autoscaling-config=~/ray_bootstrap_config.yaml",
        ],
        "worker_start_ray_commands": ["ray stop", f"RAY_AUTH_MODE=token {start} --address=$RAY_HEAD_IP:{_RAY_PORT}"],
    }  # fmt: skip
    return HEAD + "# Start it with: ray up cluster.yaml. The token of 'ray get-auth-token --generate' must be on every host before.\n" + yaml.safe_dump(
        cluster, sort_keys=False, width=160
    )  # fmt: skip


def storage(topology: TrainingTopology, shared: Path) -> dict[str, str]:
    """Returns the files of the storage nodes: what each exports over NFS, and how the other nodes mount it."""
    paths = [shared, shared / "checkpoints"]
    mounted = [(host, path) for host, path in zip(topology.storage_nodes, paths, strict=False)]
    exports = [f"# /etc/exports of {host}\n{path} *(rw,sync,no_subtree_check)\n" for host, path in mounted]
    table = ["# /etc/fstab of the head node and of all GPU nodes", *(f"{host}:{path} {path} nfs4 rw,hard,noatime,_netdev 0 0" for host, path in mounted), ""]
    return {**{f"storage/{host}.exports": text for (host, _), text in zip(mounted, exports, strict=True)}, "storage/fstab": "\n".join(table)}


def whole_node(topology: TrainingTopology) -> tuple[int, int]:
    """Returns the cores and the memory in GiB of a GPU node."""
    count = max(1, topology.node.gpus)
    return topology.node.cpus * count, topology.node.memory_gib * count

"""What the two topologies of the design consist of, as plain data, and what cannot be one.

inference: clients, a load balancer (Envoy), gateways, engine instances (tensor-parallel), with Prometheus, Jaeger and Loki.
training: a head node, storage nodes for checkpoints, and GPU nodes with pods of trainer and rollout.
"""

import difflib
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tandem.estimate.model_bytes import weight_bytes
from tandem.layout.published_models import PUBLISHED_MODELS
from tandem.layout.shapes import ModelShapes
from tandem.layout.sharding import ShardSpec
from tandem.types import UserError

TopologyName = Literal["training", "inference"]
MOST_INSTANCES, MOST_NODES, MOST_GATEWAYS = 1024, 10_000, 64
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?")
_WEIGHTS_SHARE = 0.9
"""Of a GPU's memory, ``gpu_memory_utilization`` of an engine. Weights that leave nothing of it for the KV cache cannot be served."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """``source``: what ``tandem serve`` is given. ``name``: what clients ask for."""

    source: str
    name: str
    shapes: ModelShapes


@dataclass(frozen=True, slots=True)
class NodeKind:
    """The nodes that have GPUs. ``gpus``: of each; 0: engines compute on CPUs. ``cpus`` and ``memory_gib``: for each GPU, or for each engine without any."""

    gpus: int = 8
    gpu_memory_gib: float = 80.0
    cpus: int = 12
    memory_gib: int = 120

    def check(self) -> None:
        """Raises ``UserError`` for a node that there cannot be."""
        counts = (("--gpus-per-node", self.gpus, 1024), ("--cpus-per-gpu", self.cpus, 4096), ("--memory-gib-per-gpu", self.memory_gib, 2**20))
        for option, value, most in counts:
            least = 0 if option == "--gpus-per-node" else 1
            if not least <= value <= most:
                raise UserError(f"{option} is {value}; it must be between {least} and {most}")
        if not 0 < self.gpu_memory_gib <= 2**20:
            raise UserError(f"--gpu-memory-gib is {self.gpu_memory_gib:g}; give the memory of a GPU in GiB, for example 80")


@dataclass(frozen=True, slots=True)
class InferenceTopology:
    """``instances`` of an engine of ``tensor_parallel`` ranks behind ``gateways``. ``port``: of the load balancer; on one machine the next ones are those of
    the gateways and engines. ``most_instances``: up to which an autoscaler goes."""

    model: ServedModel
    tensor_parallel: int = 2
    instances: int = 8
    most_instances: int = 16
    gateways: int = 2
    node: NodeKind = field(default_factory=NodeKind)
    port: int = 8000

    @property
    def instances_per_node(self) -> int:
        return max(1, self.node.gpus // self.tensor_parallel)

    @property
    def nodes(self) -> int:
        """Returns how many nodes the instances need."""
        return math.ceil(self.instances / self.instances_per_node)

    @property
    def cpus(self) -> int:
        """Returns the cores of an instance."""
        return self.node.cpus * (self.tensor_parallel if self.node.gpus else 1)

    @property
    def memory_gib(self) -> int:
        """Returns the memory of an instance beside its GPUs."""
        return self.node.memory_gib * (self.tensor_parallel if self.node.gpus else 1)

    def gateway_port(self, number: int) -> int:
        return self.port + 1 + number

    def engine_port(self, number: int) -> int:
        return self.port + 1 + self.gateways + number

    def check(self) -> None:
        """Raises ``UserError``, in one line, for what could not be started anywhere."""
        self.node.check()
        for option, value, most in (("--instances", self.instances, MOST_INSTANCES), ("--gateways", self.gateways, MOST_GATEWAYS)):
            if not 1 <= value <= most:
                raise UserError(f"{option} is {value}; it must be between 1 and {most}")
        if not self.instances <= self.most_instances <= MOST_INSTANCES:
            raise UserError(f"--max-instances is {self.most_instances}; it must be between --instances ({self.instances}) and {MOST_INSTANCES}")
        if self.port < 1 or self.engine_port(self.instances) >= 2**16:
            raise UserError(f"--port is {self.port}; it and the ports after it, one for each gateway and instance, must be between 1 and 65535")
        _check_shards(self.model, self.tensor_parallel)
        if not self.node.gpus:
            return
        if self.tensor_parallel > self.node.gpus:
            raise UserError(
                f"--tensor-parallel is {self.tensor_parallel}, and a node has {self.node.gpus} GPUs (--gpus-per-node); the ranks of an instance are on one "
                "node: lower it, or name larger nodes"
            )
        self._check_memory()

    def _check_memory(self) -> None:
        room = _WEIGHTS_SHARE * self.node.gpu_memory_gib * 2**30
        needed = weight_bytes(self.model.shapes, "bfloat16", self.tensor_parallel)
        if needed < room:
            return
        fits = next((n for n in _divisors(self.model.shapes, self.node.gpus) if weight_bytes(self.model.shapes, "bfloat16", n) < room), None)
        fix = f"set --tensor-parallel {fits}" if fits else "name GPUs with more memory, or nodes with more GPUs"
        raise UserError(
            f"--tensor-parallel is {self.tensor_parallel}: the weights of '{self.model.name}' take {needed / 2**30:.1f} GiB of each GPU in bfloat16, and "
            f"{room / 2**30:.1f} of {self.node.gpu_memory_gib:g} GiB can be used; {fix}"
        )


@dataclass(frozen=True, slots=True)
class TrainingTopology:
    """``recipe``: a file, or the name of one that comes with Tandem. ``head``, ``gpu_nodes`` and ``storage_nodes``: names of hosts, where the launcher does not
    choose them. ``spares``: of the GPU nodes, how many are held back."""

    recipe: str = "sort"
    head: str = "head"
    gpu_nodes: tuple[str, ...] = ("gpu1", "gpu2", "gpu3", "gpu4")
    storage_nodes: tuple[str, ...] = ("storage1", "storage2")
    spares: int = 1
    node: NodeKind = field(default_factory=NodeKind)

    def check(self) -> None:
        """Raises ``UserError``, in one line, for what could not be started anywhere."""
        self.node.check()
        named = {"--head": (self.head,), "--gpu-nodes": self.gpu_nodes, "--storage-nodes": self.storage_nodes}
        if len(self.storage_nodes) > 2:
            raise UserError(f"--storage-nodes has {len(self.storage_nodes)} names; give one, with runs and models, and another for copies of checkpoints")
        seen: dict[str, str] = {}
        for option, names in named.items():
            if not 1 <= len(names) <= MOST_NODES:
                raise UserError(f"{option} has {len(names)} names; give 1 to {MOST_NODES}, divided by commas")
            for name in names:
                if not _HOST.fullmatch(name):
                    raise UserError(f"{option} has '{name}', which is not the name of a host; use letters, digits, '-' and '.'")
                if name in seen:
                    also = "twice" if seen[name] == option else f"and {seen[name]} too"
                    raise UserError(f"{option} names '{name}' {also}; name each node once")
                seen[name] = option
        if self.spares and not 0 <= self.spares <= len(self.gpu_nodes) - 2:
            raise UserError(
                f"--spares is {self.spares}, and there are {len(self.gpu_nodes)} GPU nodes; besides the first node, with the controller, one must hold a pod: "
                "lower it"
            )


_BY_HAND = ", and files are emitted for these alone; start a server of another with 'tandem serve FOLDER --model-impl transformers'"


def served_model(given: str) -> ServedModel:
    """Returns the model of a folder, or a published one by its short name or its name on the Hub. Raises ``UserError`` for another."""
    if given in PUBLISHED_MODELS:
        published = PUBLISHED_MODELS[given]
        return ServedModel(published.source, given, published.shapes)
    by_source = {each.source.lower(): each for each in PUBLISHED_MODELS.values()}
    if (found := by_source.get(given.lower())) is not None:
        return ServedModel(found.source, found.source, found.shapes)
    folder = Path(given).expanduser()
    if folder.is_dir():
        from tandem.model.family import family_of_config
        from tandem.model.huggingface.model_config import read_json, read_shapes

        # A module of transformers computes in one process, and these engines have tensor-parallel ranks.
        family_of_config(read_json(folder / "config.json"), str(folder / "config.json"), _BY_HAND)
        return ServedModel(str(folder.resolve()), folder.resolve().name, read_shapes(folder))
    near = difflib.get_close_matches(given.lower(), PUBLISHED_MODELS, n=1, cutoff=0.6)
    hint = f"did you mean '{near[0]}'?" if near else f"there are {', '.join(PUBLISHED_MODELS)}"
    raise UserError(f"--model is '{given}', which is neither a folder here nor a model whose size is known; {hint}")


def _check_shards(model: ServedModel, tensor_parallel: int) -> None:
    try:
        ShardSpec(0, tensor_parallel).check(model.shapes)
    except ValueError as error:
        sizes = ", ".join(map(str, _divisors(model.shapes, 1024)))
        if tensor_parallel < 1:
            raise UserError(f"--tensor-parallel is {tensor_parallel}; '{model.name}' can have {sizes}") from None
        raise UserError(f"--tensor-parallel is {tensor_parallel}: {error}; '{model.name}' can have {sizes}") from None


def _divisors(shapes: ModelShapes, most: int) -> list[int]:
    """Returns the numbers of tensor-parallel ranks up to ``most`` that ``shapes`` can have."""
    found = []
    for size in range(1, min(most, shapes.num_attention_heads) + 1):
        try:
            ShardSpec(0, size).check(shapes)
        except ValueError:
            continue
        found.append(size)
    return found

"""The ranks that train one model together, as seen by one of them: passed to all code that communicates."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from tandem.layout.mesh import GroupName, Mesh, MeshShape
from tandem.layout.sharding import ShardSpec
from tandem.model.parallel.model_parallel import ModelParallel
from tandem.runtime.collectives.communicator import GROUPS, Communicator
from tandem.runtime.records.tracing import Tracer

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Ranks:
    """``mesh``: this rank's coordinates. ``groups``: a communicator for each of this rank's groups. ``deterministic`` and ``sequence``: how
    tensor parallelism shards a model (``ShardSpec``, ``ModelParallel``). ``device``: this rank's compute device.

    Use of the groups: the model's layers communicate over ``tensor``, ``context`` and ``expert`` (by ``model_parallel``); pipeline stages
    over ``pipeline``; gradients and ZeRO over ``tokens`` and, for experts, ``expert_data``; the loss over ``data``; the gradient norm and
    global agreement over ``world``. ``data`` and ``world`` exchange small values in host memory, the others tensors on ``device``
    (``communicator.HOST_GROUPS``)."""

    mesh: Mesh
    groups: Mapping[GroupName, Communicator]
    deterministic: bool = False
    sequence: bool = False
    device: torch.device = CPU

    @property
    def is_first(self) -> bool:
        """Whether this rank writes what is written once: metric rows, the journal, the model."""
        return self.mesh.rank == 0

    @property
    def world(self) -> Communicator:
        return self.groups["world"]

    @property
    def data(self) -> Communicator:
        """The ranks over which a global batch is divided."""
        return self.groups["data"]

    def model_parallel(self) -> ModelParallel | None:
        """Returns the parallelism of a ``Decoder``; ``None`` if every rank holds and computes a whole model."""
        tensor, context, expert = self.groups["tensor"], self.groups["context"], self.groups["expert"]
        if tensor.size == context.size == expert.size == 1:
            return None
        shard_spec = ShardSpec(tensor.rank, tensor.size, self.deterministic, expert.rank, expert.size)
        return ModelParallel(shard_spec, tensor, context, expert, self.sequence)

    def trace(self, tracer: Tracer) -> None:
        """Records the waits for all collectives of this rank with ``tracer``."""
        for group in self.groups.values():
            group.tracer = tracer

    def all_values(self, values: Sequence[float], name: str) -> list[list[float]]:
        """Returns every rank's ``values`` (the same count on each), in float64, by world rank."""
        own = torch.tensor(values, dtype=torch.float64)
        return [list(map(float, row)) for row in self.world.all_gather(own, name).tolist()]

    def sums(self, values: Sequence[float], name: str) -> list[float]:
        """Returns the sums of ``values`` over the ranks that share a batch, correctly rounded; the same on every rank."""
        own = torch.tensor(values, dtype=torch.float64)
        return [math.fsum(column) for column in zip(*self.data.all_gather(own, name).tolist(), strict=True)]

    def agreed(self, value: int, name: str) -> int:
        """Returns rank 0's ``value``."""
        shared = torch.tensor([value])
        self.world.broadcast(shared, 0, name)
        return int(shared)


def alone(device: torch.device | str = "cpu") -> Ranks:
    """Returns the ranks of a single process."""
    mesh = Mesh(MeshShape(), 0)
    return Ranks(mesh, {name: Communicator(name, 0, 1, None, 0.0) for name in GROUPS}, device=torch.device(device))

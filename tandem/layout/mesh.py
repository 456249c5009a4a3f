"""The device mesh: the coordinates of each rank along the axes of parallelism. Imports no torch.

Ranks are numbered with ``tensor`` innermost, then ``context``, ``data`` and ``pipeline``: neighbours communicate most, and a node holds
neighbours. ``expert`` is not an axis of its own: experts are sharded over runs of ``expert`` neighbours among the ranks that see different
tokens (``data`` times ``context``), as in Megatron-Core.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

Axis = Literal["pipeline", "data", "context", "tensor"]
AXES: tuple[Axis, ...] = ("pipeline", "data", "context", "tensor")
"""Outermost first."""
GroupName = Literal["pipeline", "data", "context", "tensor", "tokens", "expert", "expert_data", "world"]
"""The axes, and further groups: ``tokens`` (data times context: the ranks that hold the same weights and see different tokens), ``expert``
(those that shard the experts of a layer), ``expert_data`` (those of ``tokens`` that hold the same experts), ``world``."""


@dataclass(frozen=True, slots=True)
class MeshShape:
    """The number of ranks along each axis. ``expert`` divides ``data * context``."""

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1

    @property
    def world(self) -> int:
        return self.data * self.tensor * self.pipeline * self.context

    def check(self) -> None:
        """Raises ``ValueError`` for an invalid shape."""
        for name in (*AXES, "expert"):
            if getattr(self, name) < 1:
                raise ValueError(f"the mesh has {getattr(self, name)} ranks along '{name}'; it must be at least 1")
        if self.data * self.context % self.expert:
            raise ValueError(f"'expert' is {self.expert}; it must divide data x context = {self.data * self.context}")


@dataclass(frozen=True, slots=True)
class Mesh:
    """The mesh of ``shape``, as seen by ``rank``."""

    shape: MeshShape
    rank: int

    def __post_init__(self) -> None:
        self.shape.check()
        if not 0 <= self.rank < self.shape.world:
            raise ValueError(f"rank {self.rank} of {self.shape.world} does not exist")

    def coordinate(self, axis: Axis) -> int:
        """Returns this rank's coordinate along ``axis``."""
        return self.rank // self._stride(axis) % int(getattr(self.shape, axis))

    def group(self, name: GroupName) -> tuple[int, ...]:
        """Returns the ranks of this rank's group ``name``, ascending; a rank's index in it is its rank in the group."""
        if name == "world":
            return tuple(range(self.shape.world))
        if name in AXES:
            return self._varied({name})
        tokens = self._varied({"data", "context"})
        if name == "tokens":
            return tokens
        place, size = tokens.index(self.rank), self.shape.expert
        if name == "expert":
            return tokens[place // size * size : (place // size + 1) * size]
        return tokens[place % size :: size]

    def _stride(self, axis: Axis) -> int:
        return math.prod(int(getattr(self.shape, inner)) for inner in AXES[AXES.index(axis) + 1 :])

    def _varied(self, axes: set[str]) -> tuple[int, ...]:
        """Returns the ranks that differ from this one only along ``axes``."""
        ranks = [0]
        for axis in AXES:
            places = range(int(getattr(self.shape, axis))) if axis in axes else (self.coordinate(axis),)
            ranks = [rank + place * self._stride(axis) for rank in ranks for place in places]
        return tuple(ranks)


def smaller(shape: MeshShape) -> MeshShape | None:
    """Returns ``shape`` with the largest valid smaller number of data-parallel ranks; ``None`` if there is none."""
    for data in range(shape.data - 1, 0, -1):
        if data * shape.context % shape.expert == 0:
            return replace(shape, data=data)
    return None


def crossing(shape: MeshShape, nodes: Sequence[int]) -> list[Axis]:
    """Returns the axes along which some group has ranks on several nodes, innermost first. ``nodes[rank]``: the node of a rank. Raises
    ``ValueError`` for the wrong number of nodes."""
    if len(nodes) != shape.world:
        raise ValueError(f"{len(nodes)} ranks have a node and the mesh has {shape.world}")
    meshes = [Mesh(shape, rank) for rank in range(shape.world)]

    def crosses(axis: Axis) -> bool:
        # Each group once, by its first rank.
        return any(len({nodes[rank] for rank in mesh.group(axis)}) > 1 for mesh in meshes if mesh.coordinate(axis) == 0)

    return [axis for axis in reversed(AXES) if crosses(axis)]


def describe(shape: MeshShape, nodes: Sequence[int], node: str = "node") -> list[str]:
    """Describes the mesh in lines for a user: the axes, outermost first, and the ranks of each ``node``, as it is called."""
    axes = " x ".join(f"{axis} {getattr(shape, axis)}" for axis in AXES)
    lines = [f"mesh: {shape.world} ranks = {axes}" + (f", experts over {shape.expert}" if shape.expert > 1 else "")]
    if shape.world > 1:
        across = crossing(shape, nodes)
        for place in sorted(set(nodes)):
            lines.append(f"  {node} {place}: ranks {', '.join(str(rank) for rank in range(shape.world) if nodes[rank] == place)}")
        lines.append(f"  across {node}s: {', '.join(across) if across else 'nothing'}")
    return lines

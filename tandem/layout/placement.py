"""The placement of the ranks of section ``parallel`` on nodes. Imports no torch."""

from tandem.config.parallel import ParallelConfig
from tandem.layout.mesh import Mesh, MeshShape, crossing
from tandem.types.errors import UserError


def mesh_of(parallel: ParallelConfig) -> MeshShape:
    return MeshShape(parallel.data, parallel.tensor, parallel.pipeline, parallel.context, parallel.expert)


def ranks_of_pods(shape: MeshShape, pods: int) -> list[tuple[int, ...]]:
    """Returns the ranks of each of ``pods`` trainer pods, which divide the ``data`` axis: whole data-parallel replicas, neighbours in one pod. Raises
    ``ValueError`` if they do not divide it."""
    if shape.data % pods:
        raise ValueError(f"{pods} pods cannot divide {shape.data} data-parallel replicas")
    each, ranks = shape.data // pods, range(shape.world)
    return [tuple(rank for rank in ranks if Mesh(shape, rank).coordinate("data") // each == pod) for pod in range(pods)]


def check_placement(parallel: ParallelConfig) -> None:
    """Raises ``UserError`` for a mesh that places tensor- or context-parallel ranks on several nodes, unless ``across_nodes`` is set."""
    if parallel.across_nodes:
        return
    for axis in crossing(mesh_of(parallel), parallel.nodes()):
        if axis in ("tensor", "context"):
            raise UserError(
                f"'parallel.{axis}' is {getattr(parallel, axis)}, and with parallel.ranks_per_node {parallel.ranks_per_node} its ranks would be on "
                f"several machines, between which every layer would wait; lower it, or set parallel.across_nodes to true"
            )

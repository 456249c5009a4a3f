"""The placement of the ranks of section ``parallel`` on nodes. Imports no torch."""

from tandem.config.parallel import ParallelConfig, pods_of_a_replica
from tandem.layout.mesh import Mesh, MeshShape, crossing
from tandem.types.errors import UserError


def mesh_of(parallel: ParallelConfig) -> MeshShape:
    return MeshShape(parallel.data, parallel.tensor, parallel.pipeline, parallel.context, parallel.expert)


def ranks_of_pods(shape: MeshShape, pods: int) -> list[tuple[int, ...]]:
    """Returns the ranks of each of ``pods`` trainer pods. They divide the ``data`` axis: whole data-parallel replicas, neighbours in one pod. Where there are
    several pods for each replica, they divide its stages: neighbouring ones in one pod, and the next ones in the next pod. Ranks that differ along ``tensor``
    or ``context`` are in one pod. Raises ``ValueError`` if they divide neither evenly."""
    node_of = pods_of_ranks(shape, pods)
    return [tuple(rank for rank in range(shape.world) if node_of[rank] == pod) for pod in range(pods)]


def pods_of_ranks(shape: MeshShape, pods: int) -> list[int]:
    """Returns the pod of each rank, as of ``ranks_of_pods``, and raises as it does."""
    over = pods_of_a_replica(shape.data, shape.pipeline, pods)
    if not over:
        raise ValueError(f"{pods} pods cannot divide {shape.data} data-parallel replicas of {shape.pipeline} stages")
    meshes = [Mesh(shape, rank) for rank in range(shape.world)]
    # As many pods as there are parts of replicas, or fewer, each with several whole ones.
    parts = [mesh.coordinate("data") * over + mesh.coordinate("pipeline") * over // shape.pipeline for mesh in meshes]
    return [part * pods // (shape.data * over) for part in parts]


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

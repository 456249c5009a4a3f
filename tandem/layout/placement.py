"""The placement of the ranks of section ``parallel`` on nodes. Imports no torch."""

from tandem.config.parallel import ParallelConfig
from tandem.layout.mesh import MeshShape, crossing
from tandem.types.errors import UserError


def mesh_of(parallel: ParallelConfig) -> MeshShape:
    return MeshShape(parallel.data, parallel.tensor, parallel.pipeline, parallel.context, parallel.expert)


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

"""The slices of published weights that a rank of a tensor-parallel engine needs."""

from tandem.layout.shapes import ModelShapes, published_parameters
from tandem.layout.shard_offsets import ShardOffsets
from tandem.layout.sharding import ShardSpec, is_held, shard_slices
from tandem.types.errors import RunError
from tandem.weight_transfer.parts import Wanted


def wanted_by(shapes: ModelShapes, shard_spec: ShardSpec) -> Wanted:
    """Returns a function that gives the slices of the rank of ``shard_spec``. The function raises ``RunError`` for a tensor that the
    model does not have in this shape."""
    expected = dict(published_parameters(shapes))

    def wanted_offsets(name: str, shape: tuple[int, ...]) -> ShardOffsets | None:
        if expected.get(name) != shape:
            raise RunError(f"the published weights have '{name}' {list(shape)}; the engine's model has {expected.get(name)}")
        if not is_held(shapes, name, shard_spec):
            return None
        slices = shard_slices(shapes, name, shape, shard_spec)
        return ShardOffsets(tuple(s.start for s in slices), tuple(s.stop for s in slices))

    return wanted_offsets

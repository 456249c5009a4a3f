"""The slices of published weights that a rank of a tensor-parallel engine needs."""

from functools import cache

from tandem.layout.eagle3 import PUBLISHED, Eagle3Shapes, published_head
from tandem.layout.parameters import published_parameters
from tandem.layout.shapes import ModelShapes
from tandem.layout.shard_offsets import ShardOffsets, whole_offsets
from tandem.layout.sharding import ShardSpec, is_held, shard_slices
from tandem.types.errors import RunError
from tandem.weight_transfer.parts import Wanted


def wanted_by(shapes: ModelShapes, shard_spec: ShardSpec, head: Eagle3Shapes | None = None) -> Wanted:
    """Returns a function that gives the slices of the rank of ``shard_spec``, and all of a draft head of the shapes ``head``; an engine without one leaves it.
    The function raises ``RunError`` for a tensor that the model or its head does not have in this shape."""
    expected = dict(published_parameters(shapes)) | ({} if head is None else dict(published_head(head)))

    # Every version has the same tensors.
    @cache
    def wanted_offsets(name: str, shape: tuple[int, ...]) -> ShardOffsets | None:
        if head is None and name.startswith(PUBLISHED):
            return None
        if expected.get(name) != shape:
            raise RunError(f"the published weights have '{name}' {list(shape)}; the engine's model has {expected.get(name)}")
        if name.startswith(PUBLISHED):
            return whole_offsets(shape)
        if not is_held(shapes, name, shard_spec):
            return None
        slices = shard_slices(shapes, name, shape, shard_spec)
        return ShardOffsets(tuple(s.start for s in slices), tuple(s.stop for s in slices))

    return wanted_offsets

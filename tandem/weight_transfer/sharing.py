"""Whether engines compute with published weights where they are. Imports no torch."""

from typing import Literal

from tandem.layout.shapes import ModelShapes
from tandem.weight_transfer.manifest import segment_bytes
from tandem.weight_transfer.shared_memory import SMALL_BYTES, has_huge_pages


def can_share(shapes: ModelShapes, dtype: str, weights: Literal["auto", "shared", "copied"]) -> bool:
    """Returns whether a model's weights in ``dtype`` are shared where the recipe allows it, under its ``rollout.weights``: with ``auto``, if they are few or in
    huge pages, as an engine's own are, so that products are as fast with them."""
    if weights == "copied" or shapes.experts is not None:
        return False
    return weights == "shared" or segment_bytes(shapes, dtype) <= SMALL_BYTES or has_huge_pages()

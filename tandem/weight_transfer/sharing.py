"""Whether engines compute with published weights where they are, and which matrices they pack to memory of their own all the same. Imports no torch.

A quantized engine never shares: its codes and scales are made of the published numbers, and are no part of what is published.
"""

from typing import Literal

from tandem.layout.expert_shapes import STANDARD_NAMES
from tandem.layout.panels import PANEL_ROWS, ROUNDED_ROWS, is_in_panels, is_stackable, panels_of_rows, stacks_of
from tandem.layout.parameters import published_parameters
from tandem.layout.shapes import ModelShapes
from tandem.layout.shard_offsets import whole_offsets
from tandem.layout.sharding import ShardSpec, shard_slices
from tandem.weight_transfer.manifest import segment_bytes
from tandem.weight_transfer.shared_memory import SMALL_BYTES, has_huge_pages


def can_share(shapes: ModelShapes, dtype: str, weights: Literal["auto", "shared", "copied"]) -> bool:
    """Returns whether a model's weights in ``dtype`` are shared where the recipe allows it, under its ``rollout.weights``: with ``auto``, if they are few or in
    huge pages, as an engine's own are, so that products are as fast with them."""
    if weights == "copied":
        return False
    return weights == "shared" or segment_bytes(shapes, dtype) <= SMALL_BYTES or has_huge_pages()


def packed_privately(shapes: ModelShapes, ranks: int = 1) -> dict[str, str]:
    """Returns the fp32 matrices that an engine of deterministic ``ranks`` packs to memory of its own although it shares the weights, by name, each with the
    reason; the product's other matrices with it where an engine without ranks stacks them. All parts of the trainer's ranks are taken to be whole panels."""
    known = dict(published_parameters(shapes))
    private: dict[str, str] = {}
    for stacks in stacks_of(list(known), STANDARD_NAMES if shapes.experts is None else shapes.experts.names):
        names = [name for stack in stacks for name in stack]
        why = next((reason for name in names if (reason := _why_in_rows(known[name]))), "")
        if not why and not all(is_stackable([known[name] for name in stack]) for stack in stacks):
            why = f"its stack has a matrix that does not end with a panel of {PANEL_ROWS} rows"
        own = dict.fromkeys(names, why) if why else {name: reason for name in names if (reason := _why_cut(shapes, name, known[name], ranks))}
        # The products of all experts are one call.
        private |= {name: next(iter(own.values())) for name in names} if own and len(stacks) > 1 else own
    return private


def _why_in_rows(shape: tuple[int, ...]) -> str:
    return "" if is_in_panels("float32", shape, [whole_offsets(shape)]) else f"its {shape[0]} rows are not a multiple of {ROUNDED_ROWS}"


def _why_cut(shapes: ModelShapes, name: str, shape: tuple[int, ...], ranks: int) -> str:
    for rank in range(ranks):
        rows, _ = shard_slices(shapes, name, shape, ShardSpec(rank, ranks))
        if panels_of_rows(shape, rows.start, rows.stop) is None:
            return f"the rows {rows.start} to {rows.stop - 1} of rank {rank} cut a panel of {PANEL_ROWS}"
    return ""

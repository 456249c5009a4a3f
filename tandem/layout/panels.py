"""Matrices in the layout in which the engine's kernels on a CPU multiply with them: panels of 64 rows, each transposed. Imports no torch.

The engine stacks some matrices into one (q, k and v; gate and up). Where each begins with a panel of its own, the stack in panels is its matrices in panels
one behind the other, so that a published matrix is a matrix of its own for everybody else, and a part of the engine's for the engine.
"""

import itertools
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from tandem.layout.expert_shapes import STANDARD_NAMES, ExpertNames
from tandem.layout.shard_offsets import ShardOffsets

PANEL_ROWS = 64
ROUNDED_ROWS = 16
"""The last panel of a matrix is as wide as its rows rounded up to this; a matrix that would need padding is not published in panels."""

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_STACKS = (
    ("q_proj", "k_proj", "v_proj"), ("q_a_proj",), ("q_b_proj",), ("kv_a_proj_with_mqa",), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",),
)  # fmt: skip
"""Of latent attention, those that are no part of a product of heads."""
_NAME = re.compile(r"(?P<at>model\.layers\.\d+\.(?:self_attn|mlp)\.)(?P<module>\w+)\.weight")


Stacks = tuple[tuple[str, ...], ...]
"""The matrices of a product, each of some that the engine stacks: of a linear layer one, of a mixture one for each expert."""


def stacks_of(names: Sequence[str], experts: ExpertNames = STANDARD_NAMES) -> Iterator[Stacks]:
    """Yields the published matrices ``names`` that the engine multiplies with, product by product, each in its order: those of the layers with their routers
    and experts, which have the names ``experts``, and the output head, which may be the embedding table."""
    known = set(names)
    yield ((HEAD if HEAD in known else EMBEDDING,),)
    router = re.compile(rf"(model\.layers\.\d+\.){re.escape(experts.router)}\.weight")
    for name in names:
        match = _NAME.fullmatch(name)
        for stack in _STACKS if match else ():
            assert match is not None
            if match["module"] == stack[0]:
                stacked = (f"{match['at']}{module}.weight" for module in stack)
                yield (tuple(each for each in stacked if each in known),)
        if mixture := router.fullmatch(name):
            yield ((name,),)
            yield from expert_stacks(known, mixture[1], experts)


def expert_stacks(known: Collection[str], at: str, names: ExpertNames) -> tuple[Stacks, Stacks]:
    """Returns the matrices of gate and up, and those of down, of every expert in the layer ``at`` (``model.layers.N.``)."""
    count = next(expert for expert in itertools.count() if f"{at}{names.down.format(expert)}.weight" not in known)
    named = lambda name, expert: f"{at}{name.format(expert)}.weight"
    return tuple((named(names.gate, e), named(names.up, e)) for e in range(count)), tuple((named(names.down, e),) for e in range(count))


def panels_of_rows(shape: tuple[int, ...], start: int, stop: int) -> range | None:
    """Returns the elements of a matrix of ``shape`` in panels that are its rows ``start`` to ``stop - 1`` in panels; ``None`` if those begin or end in the
    middle of a panel."""
    if start % PANEL_ROWS or (stop % PANEL_ROWS and stop != shape[0]):
        return None
    return range(start * shape[1], stop * shape[1])


def place_in_panels(row: Any, column: Any, shape: tuple[int, int]) -> Any:
    """Returns where the element ``[row, column]`` of a matrix of ``shape`` is in its panels, in elements: integers, or arrays or tensors of them."""
    last = (shape[0] - 1) // PANEL_ROWS
    last_width = -(-(shape[0] - last * PANEL_ROWS) // ROUNDED_ROWS) * ROUNDED_ROWS
    panel = row // PANEL_ROWS
    width = PANEL_ROWS - (panel == last) * (PANEL_ROWS - last_width)
    return panel * (PANEL_ROWS * shape[1]) + column * width + row % PANEL_ROWS


def is_in_panels(dtype: str, shape: tuple[int, ...], parts: Sequence[ShardOffsets]) -> bool:
    """Returns whether a tensor can be in panels, and each of its ``parts`` is panels one behind the other."""
    if dtype != "float32" or len(shape) != 2 or shape[0] % ROUNDED_ROWS or not shape[1]:
        return False
    return all(
        part.start[0] % PANEL_ROWS == 0 and (part.stop[0] % PANEL_ROWS == 0 or part.stop[0] == shape[0])
        and (part.start[1], part.stop[1]) == (0, shape[1])
        for part in parts
    )  # fmt: skip


def is_stackable(shapes: Sequence[tuple[int, ...]]) -> bool:
    """Returns whether matrices of ``shapes`` in panels, one behind the other, are their stack in panels."""
    return all(rows % PANEL_ROWS == 0 for rows, *_ in shapes[:-1]) and len({tuple(columns) for _, *columns in shapes}) == 1


def is_stackable_in_rows(shapes: Sequence[tuple[int, ...]], item_bytes: int, alignment_bytes: int) -> bool:
    """Returns whether row-major matrices of ``shapes``, placed one after another at multiples of ``alignment_bytes``, are their stack."""
    return all(rows * columns * item_bytes % alignment_bytes == 0 for rows, columns in shapes[:-1]) and len({columns for _, columns in shapes}) == 1


def stacked_order(order: Sequence[str], stacks: Sequence[Sequence[str]]) -> list[str]:
    """Returns ``order`` with the members of each stack one behind the other, where the first of them was."""
    following: Mapping[str, Sequence[str]] = {stack[0]: stack for stack in stacks}
    moved = {name for stack in stacks for name in stack[1:]}
    return [name for first in order if first not in moved for name in following.get(first, (first,))]

"""Matrices in the layout in which the engine's kernels on a CPU multiply with them: panels of 64 rows, each transposed. Imports no torch.

The engine stacks some matrices into one (q, k and v; gate and up). Where each begins with a panel of its own, the stack in panels is its matrices in panels
one behind the other, so that a published matrix is a matrix of its own for everybody else, and a part of the engine's for the engine.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tandem.layout.shard_offsets import ShardOffsets

PANEL_ROWS = 64
ROUNDED_ROWS = 16
"""The last panel of a matrix is as wide as its rows rounded up to this; a matrix that would need padding is not published in panels."""

_STACKS = (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",))
_NAME = re.compile(r"(?P<at>model\.layers\.\d+\.(?:self_attn|mlp)\.)(?P<module>\w+)\.weight")


def stacks_of(names: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Yields the published matrices ``names`` that the engine multiplies with, in stacks, each in its order: those of the layers but experts, and the output
    head, which may be the embedding table."""
    known = set(names)
    yield ("lm_head.weight" if "lm_head.weight" in known else "model.embed_tokens.weight",)
    for name in names:
        match = _NAME.fullmatch(name)
        for stack in _STACKS if match else ():
            assert match is not None
            if match["module"] == stack[0]:
                yield tuple(f"{match['at']}{module}.weight" for module in stack)


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

"""Block tables: ``table[i]`` is the block of the KV cache that holds tokens ``16 i .. 16 i + 15`` of a sequence."""

from typing import NamedTuple

from tandem.kernels.api import BLOCK_TOKENS


class BlockChange(NamedTuple):
    """Entry ``column`` of the table in ``row`` becomes ``block``."""

    row: int
    column: int
    block: int


class BlockCopy(NamedTuple):
    """The content of block ``source`` is copied to block ``target`` before the step writes anything."""

    source: int
    target: int


RELEASED = -1
"""A table's entry for a block that was given back because its tokens lie behind the window of every layer."""


def blocks_for(tokens: int) -> int:
    """Returns the number of blocks that hold ``tokens`` tokens."""
    return -(-tokens // BLOCK_TOKENS)

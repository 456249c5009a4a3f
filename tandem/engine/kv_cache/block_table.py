"""Which blocks a sequence's tokens stand in: ``table[i]`` holds the tokens ``16 i .. 16 i + 15``."""

from typing import NamedTuple

from tandem.engine.kv_cache.block_pool import BlockAllocator
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
"""In a table: the block was given back, since its tokens lie behind the window of every layer."""


def blocks_for(tokens: int) -> int:
    """Blocks that ``tokens`` tokens stand in."""
    return -(-tokens // BLOCK_TOKENS)


def fork(allocator: BlockAllocator, table: list[int]) -> list[int]:
    """A second table over the same blocks."""
    for block in table:
        if block != RELEASED:
            allocator.retain(block)
    return list(table)


def release_behind(allocator: BlockAllocator, table: list[int], first: int) -> None:
    """Give back the blocks whose tokens all stand before position ``first``."""
    for column in range(first // BLOCK_TOKENS - 1, -1, -1):
        if table[column] == RELEASED:
            break
        allocator.release(table[column])
        table[column] = RELEASED


def needs_block(allocator: BlockAllocator, table: list[int], position: int) -> bool:
    """Whether the token at ``position`` needs a block before it can be written: its own is missing or shared."""
    column = position // BLOCK_TOKENS
    return column == len(table) or allocator.references(table[column]) > 1


def make_writable(allocator: BlockAllocator, table: list[int], position: int) -> tuple[int, int, BlockCopy | None]:
    """Give ``position`` a block of its own where ``needs_block`` says so; returns (column, block, copy). A shared
    block is copied where it already holds tokens before ``position``. The caller has looked at ``free_count``."""
    column = position // BLOCK_TOKENS
    block = allocator.allocate()
    if column == len(table):
        table.append(block)
        return column, block, None
    shared = table[column]
    allocator.release(shared)
    table[column] = block
    return column, block, BlockCopy(shared, block) if position % BLOCK_TOKENS else None

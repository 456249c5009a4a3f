"""Bytes of the checkpoints that keepers hold in the memory of nodes (``checkpoint.memory_every_steps``). Imports nothing, so that a keeper counts the same."""

KEPT = 2
"""Committed checkpoints in memory. A further one may be arriving."""
KEEPER_BYTES = 24 * 2**20
"""Measured: the process of a keeper that holds nothing, which imports no torch."""
ARRIVING_BYTES = 48 * 2**20
"""What arrives from one rank takes so much at most beside the files, in the buffers of its connections: two pieces of 16 MiB, each once more by half while its
buffer grows (measured: 38 to 43 MiB); no more than a checkpoint of a smaller size."""


def keeper_bytes(size_bytes: float, ranks: int = 1) -> int:
    """Returns the most bytes of one keeper of which each checkpoint has ``size_bytes``, of so many ``ranks``, those of another node included."""
    return KEEPER_BYTES + int((KEPT + 1) * size_bytes + min(size_bytes, ranks * ARRIVING_BYTES))


def keepers_bytes(checkpoint_bytes: int, nodes: int, ranks: int) -> int:
    """Returns the bytes of the keepers of ``nodes`` that are all on one machine, for checkpoints of ``checkpoint_bytes`` of which each node has its part, once
    more on another one. ``ranks``: of all nodes."""
    copies = 1 if nodes == 1 else 2
    return nodes * keeper_bytes(copies * checkpoint_bytes / nodes, copies * ranks // nodes)

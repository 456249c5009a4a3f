"""The chunks of the logits [T, V] that the LM head holds at a time, and their bytes. Imports no torch.

The kernels are chunked by these functions, and the memory predictions use the same ones.
"""

import math
from collections.abc import Iterator

ROW_TILE = 64
"""Chunks of whole rows are multiples of this many rows, in which kernels without a matrix product of their own accumulate a head's
gradient."""
K_BLOCK = 256
"""Products that the C++ matrix product accumulates in one chain (``kernels/cpu/gemm.h``). A sum split at multiples of it keeps its bits."""
FORWARD_LOGITS = 1 << 22
"""Logits that a forward pass on CPU holds at a time, unless ``LEAST_FORWARD_ROWS`` needs more."""
LEAST_FORWARD_ROWS = 128
"""The C++ kernels read the whole head from memory once for this many rows: half as many cost 10 % of the forward pass (measured)."""
BACKWARD_LOGITS = 1 << 22
"""Logits that a backward pass on CPU holds at a time: a rectangle of [T, V], at least ``K_BLOCK`` by ``K_BLOCK``."""
KEPT_LOGITS = 1 << 25
"""Up to this many logits are kept for the backward pass: computing them again is a third of the head's work."""
PACKED_FLOATS = 1 << 24
"""Heads up to this size are packed once for all rows of a forward pass; larger ones panel by panel in the kernel."""
GPU_LOGITS = 1 << 28
"""Logits that the Triton kernels hold at a time. Each chunk of rows adds its gradient to the head's once: smaller ones move more memory."""
GPU_LOGIT_BYTES = 4
"""Bytes per logit at most: its gradient takes its place."""
PARTS_OF_A_CHUNK = 4
"""Tensors as large as a chunk of logits that a tensor-parallel rank holds at a time, each in fp32."""


def keeps_logits(rows: int, vocabulary: int) -> bool:
    """Returns whether all logits [rows, vocabulary] are kept from the forward to the backward pass on CPU."""
    return rows * vocabulary <= KEPT_LOGITS


def forward_rows(vocabulary: int) -> int:
    """Returns the rows that a forward pass of the C++ kernels takes at a time."""
    return max(LEAST_FORWARD_ROWS, FORWARD_LOGITS // vocabulary // ROW_TILE * ROW_TILE)


def backward_rectangles(rows: int, vocabulary: int) -> Iterator[tuple[slice, slice]]:
    """Yields the rows and columns of [rows, vocabulary] that a backward pass of the C++ kernels takes at a time: nearly square, which
    minimises memory traffic per operation. For each row they are in the order of the columns, and for each column in the order of the
    rows."""
    tall = min(_blocks(rows + K_BLOCK - 1), _blocks(math.isqrt(BACKWARD_LOGITS)))
    wide = _blocks(BACKWARD_LOGITS // tall)
    if wide >= vocabulary:
        tall = _blocks(BACKWARD_LOGITS // vocabulary)
    for top in range(0, rows, tall):
        for left in range(0, vocabulary, wide):
            yield slice(top, min(top + tall, rows)), slice(left, min(left + wide, vocabulary))


def row_chunks(rows: int, vocabulary: int, logits: int) -> list[slice]:
    """Returns chunks of at most ``logits`` logits, at least ``ROW_TILE`` rows each, for kernels that take whole rows in both passes."""
    size = _chunk_rows(vocabulary, logits)
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]


def logits_bytes(rows: int, vocabulary: int, hidden: int) -> int:
    """Returns the bytes that the C++ kernels hold at most for the log-probabilities of ``rows`` tokens and their gradients, besides hidden
    states, the head and the gradients of both."""
    at_once = min(rows, forward_rows(vocabulary))
    packed = vocabulary * hidden if at_once < rows and vocabulary * hidden <= PACKED_FLOATS else 0
    # The first rectangle is the largest.
    backward = next((_area(rectangle) for rectangle in backward_rectangles(rows, vocabulary)), 0)
    if keeps_logits(rows, vocabulary):
        return 4 * (rows * vocabulary + max(packed, backward))
    return 4 * max(at_once * vocabulary + packed, backward)


def parallel_logits_bytes(rows: int, part: int) -> int:
    """Returns the same for a tensor-parallel rank that holds ``part`` ids of the vocabulary."""
    return 4 * PARTS_OF_A_CHUNK * min(rows, _chunk_rows(part, FORWARD_LOGITS)) * part


def gpu_logits_bytes(rows: int, vocabulary: int) -> int:
    """Returns the same for a GPU."""
    return GPU_LOGIT_BYTES * min(rows, _chunk_rows(vocabulary, GPU_LOGITS)) * vocabulary


def _chunk_rows(vocabulary: int, logits: int) -> int:
    return max(1, logits // vocabulary // ROW_TILE) * ROW_TILE


def _blocks(size: int) -> int:
    return max(K_BLOCK, size // K_BLOCK * K_BLOCK)


def _area(rectangle: tuple[slice, slice]) -> int:
    rows, columns = rectangle
    return int((rows.stop - rows.start) * (columns.stop - columns.start))

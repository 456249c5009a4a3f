"""CUDA graphs of decoding steps: one launch replaces hundreds.

A graph is captured for a *bucket*, a number of rows and of block-table columns, the second time that a step needs it: the first time the
step runs eagerly in the bucket's shapes, so that its kernels are compiled and loaded. Smaller batches are padded with the padding row.
"""

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tandem.kernels.api import SampledRows

_LOG = logging.getLogger(__name__)
_FEWEST_COLUMNS = 16
"""Minimum columns of a block table: 256 tokens."""

Step = Callable[[Tensor, int], SampledRows]
Replay = Callable[[], SampledRows]


class Bucket(NamedTuple):
    """Rows and block-table columns of a graph."""

    rows: int
    columns: int


def bucket_of(rows: int, columns: int, most_rows: int, most_columns: int) -> Bucket:
    """Returns the smallest bucket that holds ``rows`` and ``columns``: rows are rounded up to a power of two up to 8, to a multiple of 8 up to
    64, then to a multiple of 32; columns to a power of two. ``most_rows`` and ``most_columns`` limit both."""
    step = 32 if rows > 64 else 8
    padded = 1 << (rows - 1).bit_length() if rows <= 8 else -(-rows // step) * step
    wide = max(_FEWEST_COLUMNS, 1 << (columns - 1).bit_length())
    return Bucket(min(padded, most_rows), min(wide, most_columns))


class DecodeGraphs:
    """Graphs of ``step``, which must not move any tensor that outlives it.

    Args:
        step: Computes a decoding step of the rows ``index[R]`` with block tables of so many columns.
        padding: The row that pads a batch.
        most: The largest bucket.
        device: The device of the graphs.
        weights: Returns the objects whose addresses a graph contains. If any of them is replaced, all graphs are captured again.
        capture: Captures a step over fixed tensors without running it, and returns a function that replays it.
    """

    def __init__(
        self, step: Step, padding: int, most: Bucket, device: torch.device, weights: Callable[[], tuple[object, ...]],
        capture: Callable[[Replay], Replay] | None = None,
    ) -> None:
        self._step = step
        self._padding, self._most, self._device = padding, most, device
        self._weights = weights
        self._capture = capture or _CudaCapture(device)
        self._seen: tuple[object, ...] = ()
        self._static: dict[Bucket, Tensor] = {}
        self._graphs: dict[Bucket, Replay] = {}
        self._is_off = False

    def clear(self) -> None:
        """Deletes all graphs and frees their memory."""
        self._graphs.clear()
        self._static.clear()

    def run(self, index: Tensor, columns: int) -> SampledRows:
        """Computes one step of the rows ``index[R]``. The next step overwrites its output."""
        weights = self._weights()
        if len(weights) != len(self._seen) or any(new is not old for new, old in zip(weights, self._seen, strict=True)):
            self.clear()
            self._seen = weights
        if self._is_off:
            return self._step(index, columns)
        bucket = bucket_of(len(index), columns, self._most.rows, self._most.columns)
        if bucket not in self._static:
            self._static[bucket] = torch.full((bucket.rows,), self._padding, dtype=torch.int64, device=self._device)
        elif bucket not in self._graphs:
            self._make(bucket)
        if self._is_off:
            return self._step(index, columns)
        static = self._static[bucket]
        static[: len(index)].copy_(index)
        static[len(index) :].fill_(self._padding)
        drawn = self._graphs[bucket]() if bucket in self._graphs else self._step(static, bucket.columns)
        return SampledRows(*(values[: len(index)] for values in drawn))

    def _make(self, bucket: Bucket) -> None:
        static = self._static[bucket]
        try:
            self._graphs[bucket] = self._capture(lambda: self._step(static, bucket.columns))
        except RuntimeError as error:
            _LOG.warning("CUDA graphs: a decoding step cannot be captured (%s); continuing without graphs", str(error).splitlines()[0])
            self.clear()
            self._is_off = True


class _CudaCapture:
    """Captures graphs into one memory pool, since only one graph runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None

    def __call__(self, step: Replay) -> Replay:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self._device)
        # Other threads of a server may use the device meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            drawn = step()
        self._pool = self._pool or graph.pool()

        def replay() -> SampledRows:
            graph.replay()
            return drawn

        return replay

"""A rank's part of weights and summed gradients under ZeRO, kept in a pager's file (Rajbhandari et al., 2021, "ZeRO-Infinity", section 5):
weights are prefetched for the layer's all-gather, gradients are written behind their reduce-scatter."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

import torch
from torch import Tensor

from tandem.trainer.offload.pager import Pager
from tandem.trainer.offload.pages import GRADIENTS, WEIGHTS, Pages

WRITES = 2
"""Gradient parts that may be in flight to the file at once."""


class WritesBehind:
    """The writes in flight of all of a rank's parts; each holds its gradients in memory."""

    def __init__(self) -> None:
        self._futures: deque[Future[None]] = deque()

    def add(self, begin: Callable[[], "Future[None]"]) -> None:
        """Calls ``begin`` to start a write, after waiting for earlier ones."""
        self.wait(WRITES - 1)
        self._futures.append(begin())

    def wait(self, left: int = 0) -> None:
        """Waits until at most ``left`` writes are in flight. Raises the error of a failed write."""
        while len(self._futures) > left:
            self._futures.popleft().result()


class PagedPart:
    """A rank's part of a bucket: ``size`` elements, padding included; ``pages`` locates those of parameters in the file. Weights are in
    memory from ``start`` to ``take``, gradients while in flight. ``writes``: shared by all parts."""

    def __init__(self, pages: Pages, pager: Pager, size: int, dtype: torch.dtype, writes: WritesBehind) -> None:
        self._pages, self._pager, self._size, self._dtype, self._writes = pages, pager, size, dtype, writes
        self._reading: tuple[Tensor, Future[None]] | None = None
        self._fetching: tuple[Tensor, Future[None]] | None = None
        self._has_sum = False

    def start(self) -> None:
        """Starts to read the weights."""
        if self._reading is None:
            self._reading = self._begin_read(WEIGHTS)

    def take(self) -> Tensor:
        """Returns the weights [size], owned by the caller."""
        self.start()
        assert self._reading is not None
        (weights, reading), self._reading = self._reading, None
        reading.result()
        return weights

    def drop(self) -> None:
        """Discards prefetched weights, because those in the file are about to change."""
        if self._reading is not None:
            self._reading[1].result()
            self._reading = None

    def put(self, weights: Tensor) -> None:
        """Writes ``weights[size]`` as this rank's weights."""
        self.drop()
        self._pager.write(self._pages.tensor(WEIGHTS), weights[: self._pages.length])

    def clear(self) -> None:
        """Starts a step without gradients."""
        self._writes.wait()
        self._has_sum, self._fetching = False, None

    def add(self, gradient: Tensor) -> None:
        """Starts to add ``gradient[size]``, which this part owns from now on, to the step's sum."""
        own, adds = gradient[: self._pages.length], self._has_sum
        self._writes.add(lambda: self._pager.begin_write(self._pages.tensor(GRADIENTS), own, adds=adds))
        self._has_sum = True

    def start_sum(self) -> None:
        """Starts to read the sum of gradients."""
        self._writes.wait()
        if self._fetching is None:
            self._fetching = self._begin_read(GRADIENTS)

    def sum(self) -> Tensor:
        """Returns the sum of gradients [size], read from the file."""
        self.start_sum()
        assert self._fetching is not None
        (gradients, reading), self._fetching = self._fetching, None
        reading.result()
        return gradients

    def _begin_read(self, kind: str) -> "tuple[Tensor, Future[None]]":
        # Padding must be 0.
        values = torch.zeros(self._size, dtype=self._dtype)
        return values, self._pager.begin_read(self._pages.tensor(kind), values[: self._pages.length])

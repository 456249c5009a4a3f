"""A rank's part of weights and summed gradients that ZeRO has cut, in a pager's file (Rajbhandari et al., 2021, "ZeRO-Infinity",
section 5): read ahead of the all-gather that makes a layer whole, written behind the reduce-scatter of its gradients."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

import torch
from torch import Tensor

from tandem.trainer.offload.pager import Pager
from tandem.trainer.offload.pages import GRADIENTS, WEIGHTS, Pages

WRITES = 2
"""Parts of gradients that may be on their way to the file at once."""


class WritesBehind:
    """The writes of all of a rank's parts that are under way: each has its gradients in memory."""

    def __init__(self) -> None:
        self._futures: deque[Future[None]] = deque()

    def add(self, begin: Callable[[], "Future[None]"]) -> None:
        """``begin`` a write when there are few others."""
        self.wait(WRITES - 1)
        self._futures.append(begin())

    def wait(self, left: int = 0) -> None:
        """Until at most ``left`` are under way. Raises what a write has failed with."""
        while len(self._futures) > left:
            self._futures.popleft().result()


class PagedPart:
    """``size`` numbers of a bucket, padding included, of which ``pages`` has a place in the file for those of parameters. In memory are
    weights from ``start`` to ``take``, and gradients on their way. ``writes``: shared by all parts."""

    def __init__(self, pages: Pages, pager: Pager, size: int, dtype: torch.dtype, writes: WritesBehind) -> None:
        self._pages, self._pager, self._size, self._dtype, self._writes = pages, pager, size, dtype, writes
        self._reading: tuple[Tensor, Future[None]] | None = None
        self._fetching: tuple[Tensor, Future[None]] | None = None
        self._has_sum = False

    def start(self) -> None:
        """Begin to read the weights."""
        if self._reading is None:
            self._reading = self._begin_read(WEIGHTS)

    def take(self) -> Tensor:
        """The weights [size], the caller's from now on."""
        self.start()
        assert self._reading is not None
        (weights, reading), self._reading = self._reading, None
        reading.result()
        return weights

    def drop(self) -> None:
        """Forget weights that were read ahead: those in the file are about to change."""
        if self._reading is not None:
            self._reading[1].result()
            self._reading = None

    def put(self, weights: Tensor) -> None:
        """``weights[size]`` are those of this rank from now on."""
        self.drop()
        self._pager.write(self._pages.tensor(WEIGHTS), weights[: self._pages.length])

    def clear(self) -> None:
        """No gradient of this step is there yet."""
        self._writes.wait()
        self._has_sum, self._fetching = False, None

    def add(self, gradient: Tensor) -> None:
        """Begin to add ``gradient[size]``, which is this part's from now on, to what the step has."""
        own, adds = gradient[: self._pages.length], self._has_sum
        self._writes.add(lambda: self._pager.begin_write(self._pages.tensor(GRADIENTS), own, adds=adds))
        self._has_sum = True

    def start_sum(self) -> None:
        """Begin to read the gradients back."""
        self._writes.wait()
        if self._fetching is None:
            self._fetching = self._begin_read(GRADIENTS)

    def sum(self) -> Tensor:
        """The gradients [size], read anew."""
        self.start_sum()
        assert self._fetching is not None
        (found, reading), self._fetching = self._fetching, None
        reading.result()
        return found

    def _begin_read(self, kind: str) -> "tuple[Tensor, Future[None]]":
        # Padding stays 0.
        found = torch.zeros(self._size, dtype=self._dtype)
        return found, self._pager.begin_read(self._pages.tensor(kind), found[: self._pages.length])

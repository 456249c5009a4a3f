"""Keeps the weights and gradients of a decoder's layers in a pager's file (Rajbhandari et al., 2021, "ZeRO-Infinity", section 5).

A layer is prefetched for its forward and again for its backward pass while its neighbour computes; at most two layers are in memory. A
gradient is written to the file as soon as the backward pass has produced it, added to that of earlier micro-batches.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from typing import cast

import torch
from torch import Tensor, nn

from tandem.model.decoder import Decoder
from tandem.model.layer_pass import LayerFunction
from tandem.trainer.offload.pager import Pager
from tandem.trainer.offload.pages import GRADIENTS, WEIGHTS, Pages
from tandem.trainer.offload.reserved_memory import ReservedMemory
from tandem.trainer.parallel.before_backward import BeforeBackward


class PagedLayer:
    """One layer's weights: all its parameters are views of one flat tensor, which has memory only from ``prefetch`` or ``fetch`` to
    ``release``. ``is_filled``: the parameters have values, which are written to the file; otherwise the code that fills them writes to the
    file."""

    def __init__(self, pages: Pages, pager: Pager, is_filled: bool) -> None:
        self.pages, self._pager = pages, pager
        like = next(iter(pages.parameters.values()))
        self._memory = ReservedMemory(pages.length, like.dtype)
        self._whole = self._memory.tensor
        self._reading: Future[None] | None = None
        self.is_resident = True
        with torch.no_grad():
            for name, view in pages.views(self._whole):
                if is_filled:
                    view.copy_(pages.parameters[name])
                pages.parameters[name].data = view
            if is_filled:
                pager.write(pages.tensor(WEIGHTS), self._whole)
        self.release()

    def prefetch(self) -> None:
        """Starts to read the weights if they are not in memory."""
        if not self.is_resident and self._reading is None:
            self._reading = self._pager.begin_read(self.pages.tensor(WEIGHTS), self._whole)

    def fetch(self) -> None:
        """Brings the weights to memory."""
        self.prefetch()
        if self._reading is not None:
            self._reading.result()
            self._reading, self.is_resident = None, True

    def release(self) -> None:
        """Releases the memory."""
        if self._reading is not None:
            self._reading.result()
        self._memory.release()
        self._reading, self.is_resident = None, False


class ParameterOffload:
    """Installs hooks around the layers of ``model``. ``pages``: by layer index."""

    def __init__(self, model: Decoder, pages: Mapping[int, Pages], pager: Pager, is_filled: bool) -> None:
        self._pager = pager
        self.layers = {index: PagedLayer(held, pager, is_filled) for index, held in sorted(pages.items())}
        self._last = max(self.layers)
        self._in_backward: set[int] = set()
        self._arrived: dict[int, set[str]] = {index: set() for index in self.layers}
        self.with_gradient: set[str] = set()
        """Names of the parameters whose gradient in the file belongs to the current step."""
        self._writes: deque[tuple[int, Future[None]]] = deque()
        self._in_flight_bytes = 0
        self._most_in_flight_bytes = max(layer.pages.length for layer in self.layers.values()) * model.dtype.itemsize
        model.around_layer = self._around
        model.register_forward_pre_hook(lambda *_: self._before_all())
        for index, layer in self.layers.items():
            for name, parameter in layer.pages.parameters.items():
                parameter.register_post_accumulate_grad_hook(self._taker(index, name))

    def release(self) -> None:
        """Releases all weights in memory."""
        for layer in self.layers.values():
            layer.release()

    def zero_grad(self) -> None:
        self._wait_for_writes(0)
        self.with_gradient.clear()

    def norms(self, factor: float) -> Iterator[float]:
        """Yields the float64 norm of ``factor`` times each parameter's gradient, with one parameter in memory while the next one is
        read."""
        self._wait_for_writes(0)
        where = [(layer.pages, name) for layer in self.layers.values() for name in layer.pages.parameters if name in self.with_gradient]
        following: tuple[Tensor, Future[None]] | None = None
        for place in range(len(where)):
            gradient, reading = following or self._read_gradient(*where[place])
            following = self._read_gradient(*where[place + 1]) if place + 1 < len(where) else None
            reading.result()
            if factor != 1.0:
                gradient.mul_(factor)
            yield torch.linalg.vector_norm(gradient, dtype=torch.float64).item()

    def _read_gradient(self, pages: Pages, name: str) -> "tuple[Tensor, Future[None]]":
        gradient = torch.empty(pages.shapes[name], dtype=pages.parameters[name].dtype)
        return gradient, self._pager.begin_read(pages.tensor(GRADIENTS), gradient.view(-1), pages.starts[name])

    def _before_all(self) -> None:
        self._in_backward.clear()
        for index, layer in self.layers.items():
            if index:
                layer.release()
        self.layers[0].prefetch()

    def _around(self, index: int, layer: LayerFunction, x: Tensor | None, residual: Tensor) -> tuple[Tensor, Tensor]:
        is_again = index in self._in_backward
        self._fetch(index, index - 1 if is_again else index + 1)
        x, residual = layer(x, residual)
        if is_again:
            return x, residual
        if torch.is_grad_enabled():
            x, residual = cast("tuple[Tensor, Tensor]", BeforeBackward.apply(self._before_backward, index, x, residual))
        # The backward pass begins with the last layer, so it stays in memory.
        if index != self._last or not torch.is_grad_enabled():
            self.layers[index].release()
        return x, residual

    def _fetch(self, index: int, following: int) -> None:
        self.layers[index].fetch()
        if following in self.layers:
            self.layers[following].prefetch()

    def _before_backward(self, index: int) -> None:
        self._in_backward.add(index)
        self._arrived[index].clear()
        self._fetch(index, index - 1)

    def _taker(self, index: int, name: str) -> Callable[[nn.Parameter], None]:
        pages = self.layers[index].pages
        start, tensor = pages.starts[name], pages.tensor(GRADIENTS)

        def take(parameter: nn.Parameter) -> None:
            gradient = parameter.grad
            assert gradient is not None
            parameter.grad = None
            gradient = gradient.contiguous()
            self._wait_for_writes(max(0, self._most_in_flight_bytes - gradient.nbytes))
            writing = self._pager.begin_write(tensor, gradient, start, adds=name in self.with_gradient)
            self._writes.append((gradient.nbytes, writing))
            self._in_flight_bytes += gradient.nbytes
            self.with_gradient.add(name)
            self._arrived[index].add(name)
            if len(self._arrived[index]) == len(pages.parameters):
                # The backward pass reads this layer's weights no more.
                self.layers[index].release()

        return take

    def _wait_for_writes(self, left_bytes: int) -> None:
        """Waits until at most ``left_bytes`` of gradients are being written."""
        while self._writes and (self._in_flight_bytes > left_bytes or self._writes[0][1].done()):
            size, writing = self._writes.popleft()
            self._in_flight_bytes -= size
            writing.result()

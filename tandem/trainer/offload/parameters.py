"""The weights and gradients of a decoder's layers, in a pager's file (Rajbhandari et al., 2021, "ZeRO-Infinity", section 5).

A layer is read before its forward and again before its backward, while the one before it computes; at most two are in memory. A
gradient goes to the file as soon as the backward pass has it, added there to that of the micro-batches before.
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
    """One layer's weights: all its parameters are views of one flat tensor, whose memory is the system's but from ``start`` or ``come``
    to ``leave``. ``is_filled``: the parameters have values, which are written to the file; else whoever fills them writes there."""

    def __init__(self, pages: Pages, pager: Pager, is_filled: bool) -> None:
        self.pages, self._pager = pages, pager
        like = next(iter(pages.parameters.values()))
        self._memory = ReservedMemory(pages.length, like.dtype)
        self._whole = self._memory.tensor
        self._reading: Future[None] | None = None
        self.is_here = True
        with torch.no_grad():
            for name, view in pages.views(self._whole):
                if is_filled:
                    view.copy_(pages.parameters[name])
                pages.parameters[name].data = view
            if is_filled:
                pager.write(pages.tensor(WEIGHTS), self._whole)
        self.leave()

    def start(self) -> None:
        """Begin to read the weights, where they are not here."""
        if not self.is_here and self._reading is None:
            self._reading = self._pager.begin_read(self.pages.tensor(WEIGHTS), self._whole)

    def come(self) -> None:
        """Have the weights here."""
        self.start()
        if self._reading is not None:
            self._reading.result()
            self._reading, self.is_here = None, True

    def leave(self) -> None:
        """Hold nothing."""
        if self._reading is not None:
            self._reading.result()
        self._memory.release()
        self._reading, self.is_here = None, False


class ParameterOffload:
    """Stands around the layers of ``model``. ``pages`` by the number of the layer."""

    def __init__(self, model: Decoder, pages: Mapping[int, Pages], pager: Pager, is_filled: bool) -> None:
        self._pager = pager
        self.layers = {index: PagedLayer(held, pager, is_filled) for index, held in sorted(pages.items())}
        self._last = max(self.layers)
        self._in_backward: set[int] = set()
        self._arrived: dict[int, set[str]] = {index: set() for index in self.layers}
        self.with_gradient: set[str] = set()
        """Names of the parameters whose gradient in the file is of this step."""
        self._writes: deque[tuple[int, Future[None]]] = deque()
        self._in_flight_bytes = 0
        self._most_in_flight_bytes = max(layer.pages.length for layer in self.layers.values()) * model.dtype.itemsize
        model.around_layer = self._around
        model.register_forward_pre_hook(lambda *_: self._before_all())
        for index, layer in self.layers.items():
            for name, parameter in layer.pages.parameters.items():
                parameter.register_post_accumulate_grad_hook(self._taker(index, name))

    def rest(self) -> None:
        """Hold no weights."""
        for layer in self.layers.values():
            layer.leave()

    def zero_grad(self) -> None:
        self._wait_for_writes(0)
        self.with_gradient.clear()

    def norms(self, factor: float) -> Iterator[float]:
        """The norm of ``factor`` times each parameter's gradient, taken in float64, one parameter in memory while the next one is read."""
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
                layer.leave()
        self.layers[0].start()

    def _around(self, index: int, layer: LayerFunction, x: Tensor | None, residual: Tensor) -> tuple[Tensor, Tensor]:
        is_again = index in self._in_backward
        self._come(index, index - 1 if is_again else index + 1)
        x, residual = layer(x, residual)
        if is_again:
            return x, residual
        if torch.is_grad_enabled():
            x, residual = cast("tuple[Tensor, Tensor]", BeforeBackward.apply(self._before_backward, index, x, residual))
        # The backward pass begins with the last.
        if index != self._last or not torch.is_grad_enabled():
            self.layers[index].leave()
        return x, residual

    def _come(self, index: int, following: int) -> None:
        self.layers[index].come()
        if following in self.layers:
            self.layers[following].start()

    def _before_backward(self, index: int) -> None:
        self._in_backward.add(index)
        self._arrived[index].clear()
        self._come(index, index - 1)

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
                # Nothing reads its weights any more in this backward pass.
                self.layers[index].leave()

        return take

    def _wait_for_writes(self, left_bytes: int) -> None:
        """Until gradients of at most ``left_bytes`` are on their way to the file."""
        while self._writes and (self._in_flight_bytes > left_bytes or self._writes[0][1].done()):
            size, writing = self._writes.popleft()
            self._in_flight_bytes -= size
            writing.result()

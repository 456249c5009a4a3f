"""The layout of parameters and their moments in a pager."""

from collections.abc import Iterator, Sequence

from torch import Tensor, nn

from tandem.trainer.offload.pager import Pager
from tandem.trainer.parallel.flat_buffer import ALIGNED

WEIGHTS, GRADIENTS = "weights", "gradients"


class Pages:
    """Parameters laid out contiguously in ``length`` elements, and the pager's tensors that hold them: from ``first`` on, one for each of
    ``kinds``. Parameters begin at multiples of ``ALIGNED``, so that a vectorised update treats each element as in the whole parameter."""

    def __init__(self, parameters: Sequence[tuple[str, nn.Parameter]], kinds: Sequence[str], first: int) -> None:
        self.parameters, self.kinds, self.first = dict(parameters), tuple(kinds), first
        self.shapes = {name: p.shape for name, p in parameters}
        self.starts: dict[str, int] = {}
        self.length = 0
        for name, parameter in parameters:
            self.starts[name] = self.length
            self.length += -(-parameter.numel() // ALIGNED) * ALIGNED

    @property
    def tensors(self) -> tuple[int, ...]:
        """The indices of the pager's tensors, one for each kind."""
        return tuple(range(self.first, self.first + len(self.kinds)))

    def tensor(self, kind: str) -> int:
        return self.first + self.kinds.index(kind)

    def views(self, flat: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yields each parameter's view of ``flat[length]``, in its shape."""
        for name, start in self.starts.items():
            yield name, flat[start : start + self.shapes[name].numel()].view(self.shapes[name])

    def overlaps(self, where: slice) -> Iterator[tuple[str, slice, slice]]:
        """Yields the parameters that overlap ``where``: (name, slice within ``where``, slice within the flat parameter)."""
        for name, start in self.starts.items():
            begin, end = max(where.start, start), min(where.stop, start + self.shapes[name].numel())
            if begin < end:
                yield name, slice(begin - where.start, end - where.start), slice(begin - start, end - start)

    def mapped(self, pager: Pager, kind: str) -> dict[str, Tensor]:
        """Returns every parameter's elements of ``kind`` as views of the file."""
        return dict(self.views(pager.mapped(self.tensor(kind))))

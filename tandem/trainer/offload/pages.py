"""Where parameters and their moments lie in a pager."""

from collections.abc import Iterator, Sequence

from torch import Tensor, nn

from tandem.trainer.offload.pager import Pager
from tandem.trainer.parallel.flat_buffer import ALIGNED

WEIGHTS, GRADIENTS = "weights", "gradients"


class Pages:
    """Parameters end to end in ``length`` numbers, and which tensors of a pager have those numbers: from ``first`` on one for each of
    ``kinds``. Parameters begin at multiples of ``ALIGNED``, so that a vectorised update treats each number as in the whole parameter."""

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
        """The pager's tensors, one of each kind."""
        return tuple(range(self.first, self.first + len(self.kinds)))

    def tensor(self, kind: str) -> int:
        return self.first + self.kinds.index(kind)

    def views(self, flat: Tensor) -> Iterator[tuple[str, Tensor]]:
        """The parameters' places in ``flat[length]``, in their shapes."""
        for name, start in self.starts.items():
            yield name, flat[start : start + self.shapes[name].numel()].view(self.shapes[name])

    def overlaps(self, where: slice) -> Iterator[tuple[str, slice, slice]]:
        """The parameters that have numbers in ``where``: (name, which of ``where``, which of its own, flat)."""
        for name, start in self.starts.items():
            begin, end = max(where.start, start), min(where.stop, start + self.shapes[name].numel())
            if begin < end:
                yield name, slice(begin - where.start, end - where.start), slice(begin - start, end - start)

    def mapped(self, pager: Pager, kind: str) -> dict[str, Tensor]:
        """Every parameter's numbers of ``kind``, as views of the file."""
        return dict(self.views(pager.mapped(self.tensor(kind))))

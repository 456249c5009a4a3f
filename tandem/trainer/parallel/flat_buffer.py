"""The parameters of a layer in one flat buffer, partitioned equally over the ranks that replicate them.

Partition boundaries and parameters begin at multiples of ``ALIGNED`` elements, or more if an optimizer requires it: a vectorised update
treats an element as in the whole tensor, so the partition changes no bit.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from tandem.layout.mesh import GroupName
from tandem.runtime.collectives.communicator import Communicator

ALIGNED = 64


@dataclass(frozen=True, slots=True)
class Segment:
    """Elements ``first`` to ``last`` (exclusive) of the flat parameter ``name``, and the offset ``at`` of the first in a rank's part."""

    name: str
    first: int
    last: int
    at: int


class FlatBuffer:
    """Parameters by name, in their order in ``length`` elements, of which each of ``ranks`` has ``part``."""

    def __init__(self, label: str, parameters: Sequence[tuple[str, nn.Parameter]], ranks: Communicator, aligned: int = ALIGNED) -> None:
        self.label, self.parameters, self.ranks = label, dict(parameters), ranks
        self.starts: dict[str, int] = {}
        at = 0
        for name, parameter in parameters:
            self.starts[name] = at
            at += _up(parameter.numel(), aligned)
        self.part = _up(-(-at // ranks.size), aligned)
        self.length = self.part * ranks.size
        self.shapes = {name: parameter.shape for name, parameter in parameters}

    @property
    def like(self) -> Tensor:
        return next(iter(self.parameters.values()))

    def segments(self, rank: int | None = None) -> list[Segment]:
        """Returns the segments of parameters in the part of ``rank`` (default: this one), without padding."""
        begin = (self.ranks.rank if rank is None else rank) * self.part
        segments = []
        for name, start in self.starts.items():
            first = max(begin, start)
            last = min(begin + self.part, start + self.shapes[name].numel())
            if first < last:
                segments.append(Segment(name, first - start, last - start, first - begin))
        return segments

    def own_runs(self, name: str, first: int, last: int) -> Iterator[Segment]:
        """Yields what of elements ``first`` to ``last`` (not included) of parameter ``name`` the part of this rank has."""
        for segment in self.segments():
            begin, end = max(first, segment.first), min(last, segment.last)
            if segment.name == name and begin < end:
                yield Segment(name, begin, end, segment.at + begin - segment.first)

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Returns the parameters' views of ``flat[length]``, in their shapes."""
        return {name: flat[start : start + self.shapes[name].numel()].view(self.shapes[name]) for name, start in self.starts.items()}

    def filled(self, value: Callable[[str], Tensor | None], out: Tensor | None = None) -> Tensor:
        """Returns ``value(name)`` of every parameter in one tensor [ranks, part], in the memory of ``out[length]`` if given; missing values
        and padding are 0."""
        flat = self.like.new_zeros(self.length) if out is None else out
        end = 0
        for name, view in self.views(flat).items():
            given, start = value(name), self.starts[name]
            if out is not None:
                flat[end:start].zero_()
                end = start + view.numel()
            if given is not None:
                # It may be there already.
                if given.data_ptr() != view.data_ptr():
                    view.copy_(given)
            elif out is not None:
                view.zero_()
        if out is not None:
            flat[end:].zero_()
        return flat.view(self.ranks.size, self.part)


def flat_buffers(
    parameters: Iterable[tuple[str, nn.Parameter]], replicas: Callable[[str], GroupName], groups: Callable[[GroupName], Communicator],
    aligned: int = ALIGNED,
) -> list[FlatBuffer]:  # fmt: skip
    """Returns a ``FlatBuffer`` for each layer and group of replicas, in the order in which a backward pass completes their gradients: the
    head, the layers from the last, the embedding. Parameters without gradient are left out."""
    grouped: dict[tuple[float, str, GroupName], list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in parameters:
        if parameter.requires_grad:
            layer = layer_number(name)
            is_embedding = name.split(".")[0] == "embed_tokens"
            place = -float(layer) if layer is not None else float("inf") if is_embedding else -float("inf")
            label = f"layer {layer}" if layer is not None else "the embedding" if is_embedding else "the head"
            group = replicas(name)
            grouped.setdefault((place, label, group), []).append((name, parameter))
    return [FlatBuffer(label, held, groups(group), aligned) for (_, label, group), held in sorted(grouped.items(), key=lambda item: item[0])]


def layer_number(name: str) -> int | None:
    """Returns the layer of the parameter ``name``; ``None`` for the embedding and the head."""
    match = re.search(r"\blayers\.(\d+)\.", name)
    return int(match[1]) if match else None


def layer_of(flat: FlatBuffer) -> int | None:
    """Returns the layer of these parameters; ``None`` for the embedding and the head."""
    match = re.fullmatch(r"layer (\d+)", flat.label)
    return int(match[1]) if match else None


def _up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple

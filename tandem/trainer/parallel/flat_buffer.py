"""The parameters of a layer laid end to end, and cut in equal parts between the ranks that hold the same numbers.

Cuts and parameters begin at multiples of ``ALIGNED`` numbers, or of more where an optimizer asks for it: a vectorised update treats a
number as it would in the whole tensor, so the cut changes no bit of it.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from tandem.layout.mesh import GroupName
from tandem.runtime.collectives.communicator import Communicator

ALIGNED = 64


@dataclass(frozen=True, slots=True)
class Segment:
    """Numbers ``first`` to ``last`` (not included) of parameter ``name``, flat, and where they begin in a rank's part."""

    name: str
    first: int
    last: int
    at: int


class FlatBuffer:
    """Parameters by name, in the order in which they lie in ``length`` numbers, ``part`` of them for each of ``ranks``."""

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
        """What the part of ``rank`` (this one) has of each parameter; padding belongs to none."""
        begin = (self.ranks.rank if rank is None else rank) * self.part
        found = []
        for name, start in self.starts.items():
            first = max(begin, start)
            last = min(begin + self.part, start + self.shapes[name].numel())
            if first < last:
                found.append(Segment(name, first - start, last - start, first - begin))
        return found

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """The parameters' places in ``flat[length]``, in their shapes."""
        return {name: flat[start : start + self.shapes[name].numel()].view(self.shapes[name]) for name, start in self.starts.items()}

    def filled(self, value: Callable[[str], Tensor | None], out: Tensor | None = None) -> Tensor:
        """``value(name)`` of every parameter in one tensor [ranks, part], that of ``out[length]`` where given; 0 where there is none, and in
        padding."""
        flat = self.like.new_zeros(self.length) if out is None else out
        end = 0
        for name, view in self.views(flat).items():
            given, start = value(name), self.starts[name]
            if out is not None:
                flat[end:start].zero_()
                end = start + view.numel()
            if given is not None:
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
    """One ``FlatBuffer`` for each layer and group of replicas, in the order in which a backward pass completes their gradients: what
    stands behind the layers, the layers from the last, the embedding. Parameters without gradient are left out."""
    found: dict[tuple[float, str, GroupName], list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in parameters:
        if parameter.requires_grad:
            layer = layer_number(name)
            is_embedding = name.split(".")[0] == "embed_tokens"
            place = -float(layer) if layer is not None else float("inf") if is_embedding else -float("inf")
            label = f"layer {layer}" if layer is not None else "the embedding" if is_embedding else "the head"
            group = replicas(name)
            found.setdefault((place, label, group), []).append((name, parameter))
    return [FlatBuffer(label, held, groups(group), aligned) for (_, label, group), held in sorted(found.items(), key=lambda item: item[0])]


def layer_number(name: str) -> int | None:
    """The layer that a parameter of this name is of; ``None``: of the embedding or the head."""
    found = re.search(r"\blayers\.(\d+)\.", name)
    return int(found[1]) if found else None


def layer_of(flat: FlatBuffer) -> int | None:
    """The layer whose parameters these are; ``None``: of the embedding or the head."""
    found = re.fullmatch(r"layer (\d+)", flat.label)
    return int(found[1]) if found else None


def _up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple

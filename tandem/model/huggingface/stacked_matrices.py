"""Matrices that the folder of a family has as one, such as Phi-3's ``qkv_proj``, and that Tandem names one by one: splits and joins them. A tensor with
another name in the folder is a stack of one."""

import re
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from tandem.layout.parameters import parameters
from tandem.layout.shapes import ModelShapes
from tandem.model.family import family_named
from tandem.types import UserError

Item = TypeVar("Item")


class Part(NamedTuple):
    """A matrix or bias by its name here, and the number of its rows in the stack."""

    name: str
    rows: int


class MatrixStacks:
    """The stacks in the folder of a model of ``shapes``; none for most families. A stack has the rows of its parts in order."""

    def __init__(self, shapes: ModelShapes) -> None:
        self._stacks = dict(family_named(shapes.architecture).stacked) if shapes.transformers is None else {}
        self._rows = {name: shape[0] for name, shape in parameters(shapes.exported)} if self._stacks else {}
        self._stack_of = {part: stack for stack, parts in self._stacks.items() for part in parts}
        self._stack, self._part = _pattern(self._stacks), _pattern(self._stack_of)

    def parts(self, name: str) -> tuple[Part, ...]:
        """Returns the parts of the tensor ``name`` of a folder: itself, with 0 rows, if it is not a stack."""
        match = self._stack.fullmatch(name) if self._stacks else None
        if match is None:
            return (Part(name, 0),)
        at, stack, kind = match.groups()
        names = [f"{at}{part}.{kind}" for part in self._stacks[stack]]
        # A model that was saved without a head has names without ``model.``.
        return tuple(Part(each, self._rows[f"model.{each.removeprefix('model.')}"]) for each in names)

    def wanted(self, is_wanted: Callable[[str], bool] | None) -> Callable[[str], bool] | None:
        """Returns ``is_wanted`` of a parameter as a condition on a tensor of a folder."""
        if is_wanted is None or not self._stacks:
            return is_wanted
        return lambda name: any(is_wanted(part.name) for part in self.parts(name))

    def split(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yields the ``tensors`` of a folder by the names of ``layout.shapes``. Raises ``UserError`` for a stack of another number of rows."""
        for name, tensor in tensors:
            parts = self.parts(name)
            if len(parts) == 1:
                yield parts[0].name, tensor
                continue
            rows = [part.rows for part in parts]
            if tensor.ndim == 0 or len(tensor) != sum(rows):
                raise UserError(f"tensor '{name}' has shape {list(tensor.shape)}; config.json requires {sum(rows)} rows")
            yield from zip((part.name for part in parts), tensor.split(rows), strict=True)

    def join(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yields ``tensors`` by the names of a folder; the parts of a stack follow each other. One stack is in memory at a time."""
        for name, parts in self.grouped(tensors):
            yield name, parts[0] if len(parts) == 1 else torch.cat(parts)

    def join_shapes(self, shapes: Iterable[tuple[str, tuple[int, ...]]]) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Does ``join`` for names and shapes."""
        for name, parts in self.grouped(shapes):
            yield name, (sum(part[0] for part in parts), *parts[0][1:])

    def renamed(self, items: Iterable[tuple[str, Item]]) -> Iterator[tuple[str, Item]]:
        """Yields ``items``, by names of ``layout.shapes``, those by the names of a folder that have another one there; the parts of stacks stay apart."""
        for name, item in items:
            match = self._part.fullmatch(name) if self._stacks else None
            if match is not None and len(self._stacks[stack := self._stack_of[match[2]]]) == 1:
                yield f"{match[1]}{stack}.{match[3]}", item
            else:
                yield name, item

    def grouped(self, items: Iterable[tuple[str, Item]]) -> Iterator[tuple[str, list[Item]]]:
        """Yields ``items``, by names of ``layout.shapes``, by the names of a folder; the parts of a stack follow each other."""
        held: list[Item] = []
        for name, item in items:
            held.append(item)
            match = self._part.fullmatch(name) if self._stacks else None
            if match is None:
                assert len(held) == 1, f"'{name}' is between the parts of a stack"
                yield name, held
                held = []
            elif len(held) == len(self._stacks[stack := self._stack_of[match[2]]]):
                yield f"{match[1]}{stack}.{match[3]}", held
                held = []


def _pattern(names: Iterable[str]) -> re.Pattern[str]:
    return re.compile(rf"((?:model\.)?layers\.\d+\.)({'|'.join(map(re.escape, names))})\.(weight|bias)")

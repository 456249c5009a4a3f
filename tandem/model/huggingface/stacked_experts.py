"""Mixtures whose folder has the matrices of all experts of a layer in one tensor, as gpt-oss: splits them into those that Tandem names one by one, and joins
them.

``gate_up_proj[E, H, 2 F]`` has a column of gate, one of up and so on, ``down_proj`` is [E, F, H]; both are transposed. Their biases, ``gate_up_proj_bias[E,
2 F]`` and ``down_proj_bias[E, H]``, are in the same order. In MXFP4 a matrix is two tensors, ``_blocks`` and ``_scales`` (see ``quantization.mxfp4``).
"""

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor

from tandem.layout.shapes import ModelShapes
from tandem.model.family import family_named
from tandem.model.huggingface.stacked_matrices import Item, MatrixStacks, Part
from tandem.model.quantization.mxfp4 import decode
from tandem.types import UserError

BLOCKS, SCALES, BIAS = "_blocks", "_scales", "_bias"


def stacks_of_folder(shapes: ModelShapes) -> "MatrixStacks | ExpertStacks":
    """Returns the stacks in the folder of a model of ``shapes``."""
    # A module of transformers has the names of its folder, whose family may not be declared.
    experts = None if shapes.transformers is not None else family_named(shapes.architecture).experts
    return ExpertStacks(shapes) if experts is not None and experts.stacked else MatrixStacks(shapes)


class ExpertStacks:
    """The stacks in the folder of a model of ``shapes``, with the methods of ``MatrixStacks``."""

    def __init__(self, shapes: ModelShapes) -> None:
        assert shapes.experts is not None
        names, self._count = shapes.experts.names, shapes.experts.num_experts
        hidden, inner = shapes.hidden_size, shapes.experts.intermediate_size
        # By the name of a stack: those of its parts, and what one expert has of it, [N, K].
        before = names.gate.partition("{}.")[0]
        self._parts = {f"{before}gate_up_proj": (names.gate, names.up), f"{before}down_proj": (names.down,)}
        self._sizes = {f"{before}gate_up_proj": (2 * inner, hidden), f"{before}down_proj": (hidden, inner)}
        self._stack_of = {part: stack for stack, parts in self._parts.items() for part in parts}
        at, stacks = r"((?:model\.)?layers\.\d+\.)", "|".join(map(re.escape, self._parts))
        self._stack = re.compile(rf"{at}({stacks})({BLOCKS}|{SCALES}|{BIAS}|)")
        parts = "|".join(re.escape(part).replace(re.escape("{}"), r"\d+") for part in self._stack_of)
        self._part = re.compile(rf"{at}({parts})\.(weight|bias)")

    def parts(self, name: str) -> tuple[Part, ...]:
        """Returns the parts of the tensor ``name`` of a folder: itself, with 0 rows, if it is not a stack."""
        match = self._stack.fullmatch(name)
        if match is None:
            return (Part(name, 0),)
        at, stack, kind = match.groups()
        parts, rows = self._parts[stack], self._sizes[stack][0]
        suffix = "bias" if kind == BIAS else "weight"
        return tuple(Part(f"{at}{part.format(expert)}.{suffix}", rows // len(parts)) for expert in range(self._count) for part in parts)

    def wanted(self, is_wanted: Callable[[str], bool] | None) -> Callable[[str], bool] | None:
        """Does ``MatrixStacks.wanted``."""
        return None if is_wanted is None else lambda name: any(is_wanted(part.name) for part in self.parts(name))

    def split(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yields the ``tensors`` of a folder by the names of ``layout.shapes``; those in MXFP4 in bf16, which has all their values. Raises ``UserError`` for a
        stack of another shape, and for blocks without scales."""
        halves: dict[str, Tensor] = {}
        for name, tensor in tensors:
            match = self._stack.fullmatch(name)
            if match is None:
                yield name, tensor
                continue
            _, stack, kind = match.groups()
            rows, columns = self._sizes[stack]
            if kind in (BLOCKS, SCALES):
                base = name.removesuffix(kind)
                other = base + (SCALES if kind == BLOCKS else BLOCKS)
                if other not in halves:
                    halves[name] = tensor
                    continue
                both = {name: tensor, other: halves.pop(other)}
                blocks, scales = both[base + BLOCKS], both[base + SCALES]
                # The last block of a row may be filled up.
                _check(base + BLOCKS, blocks, (self._count, rows, -(-columns // 32), 16))
                _check(base + SCALES, scales, (self._count, rows, -(-columns // 32)))
                each: Iterable[Tensor] = (decode(*pair, columns) for pair in zip(blocks, scales, strict=True))
            elif kind == BIAS:
                _check(name, tensor, (self._count, rows))
                each = tensor
            else:
                _check(name, tensor, (self._count, columns, rows))
                each = tensor.transpose(1, 2)
            yield from self._of_experts(name, each)
        if halves:
            name = next(iter(halves))
            missing = name.replace(BLOCKS, SCALES) if name.endswith(BLOCKS) else name.replace(SCALES, BLOCKS)
            raise UserError(f"tensor '{missing}' is missing from the weights, which have '{name}'; download the folder again")

    def join(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yields ``tensors`` by the names of a folder. The stacks of one layer are in memory at a time."""

        def put(stack: Tensor | None, part: Tensor, index: int, form: tuple[int, ...], every: int) -> Tensor:
            stack = part.new_empty(form) if stack is None else stack
            stack[index // every, ..., index % every :: every] = part.t() if part.ndim == 2 else part
            return stack

        yield from self._joined(tensors, put)

    def grouped(self, items: Iterable[tuple[str, Item]]) -> Iterator[tuple[str, list[Item]]]:
        """Yields ``items`` by their names: a quantized folder has the matrices of each expert apart."""
        for name, item in items:
            yield name, [item]

    def join_shapes(self, shapes: Iterable[tuple[str, tuple[int, ...]]]) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Does ``join`` for names and shapes."""
        yield from self._joined(shapes, lambda stack, part, index, form, every: form)

    def _of_experts(self, name: str, each: Iterable[Tensor]) -> Iterator[tuple[str, Tensor]]:
        parts = iter(self.parts(name))
        every = len(self.parts(name)) // self._count
        for of_expert in each:
            for place in range(every):
                yield next(parts).name, of_expert[place::every]

    def _joined(self, items: Iterable[tuple[str, Any]], put: Callable[..., Any]) -> Iterator[tuple[str, Any]]:
        held: dict[str, tuple[Any, int]] = {}
        for name, item in items:
            match = self._part.fullmatch(name)
            if match is None:
                yield name, item
                continue
            at, part, kind = match.groups()
            stack = self._stack_of[re.sub(r"\.\d+\.", ".{}.", part)]
            full, (rows, columns), every = f"{at}{stack}{BIAS if kind == 'bias' else ''}", self._sizes[stack], len(self._parts[stack])
            value, index = held.pop(full, (None, 0))
            form = (self._count, rows) if kind == "bias" else (self._count, columns, rows)
            value = put(value, item, index, form, every)
            if index + 1 == self._count * every:
                yield full, value
            else:
                held[full] = value, index + 1
        assert not held, f"a part of '{next(iter(held))}' is missing"


def _check(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise UserError(f"tensor '{name}' has shape {list(tensor.shape)}; config.json requires {list(shape)}")

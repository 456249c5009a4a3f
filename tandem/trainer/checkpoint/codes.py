"""Moments in 8 bits in a checkpoint: codes and scales stay those of the blocks that a rank has them in.

Where the rank holds a parameter whole, or a run of it at block borders, they lie under the parameter's own name, and any such rank reads
them bit for bit. Where matrices are cut between ranks, blocks are of a rank's own part; the name says of which. Another cut decodes the
parts that it needs and codes them again, so its moments are within the rounding of a block.
"""

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from tandem.layout.shapes import parameters
from tandem.layout.shard_offsets import ShardOffsets, intersection, is_covered
from tandem.layout.sharding import WHOLE, ShardSpec, cut_slices
from tandem.model.decoder import Decoder
from tandem.trainer.checkpoint.read import Contents
from tandem.trainer.checkpoint.shard import Key, Shard
from tandem.trainer.optimizers.blockwise import BLOCK, CODES, SCALES, Coded, codebook
from tandem.types import UserError


class Part(NamedTuple):
    """The run of ``box.numel`` numbers from ``first`` on in the memory of the decoder's ``parameter`` is the part ``box`` of the
    tensor ``name``."""

    parameter: str
    first: int
    name: str
    whole: tuple[int, ...]
    box: ShardOffsets


def coded_shard(decoder: Decoder, kind: str, parameter: str, first: int, values: Tensor) -> Shard:
    """``values[n]``: the codes or scales that this rank has of ``parameter``, from ``first`` on."""
    count = decoder.get_parameter(parameter).numel()
    whole = count if kind.endswith(CODES) else -(-count // BLOCK)
    return Shard(Key(kind, parameter + _mark(_cut_of(decoder, parameter))), (whole,), ShardOffsets((first,), (first + len(values),)), values)


class StoredCodes:
    """The moments in 8 bits of ``contents``, as ``decoder`` holds them; ``parts``: what its parameters are made of."""

    def __init__(self, contents: Contents, decoder: Decoder, parts: Sequence[Part]) -> None:
        self._contents, self._decoder = contents, decoder
        self._parts: dict[str, list[Part]] = defaultdict(list)
        for part in sorted(parts, key=lambda part: part.first):
            self._parts[part.parameter].append(part)
        self._cuts: dict[tuple[str, str], list[tuple[ShardSpec, Key]]] = defaultdict(list)
        for key in contents.held:
            if key.state.endswith(CODES):
                parameter, cut = _unmarked(key.name)
                self._cuts[key.state.removesuffix(CODES), parameter].append((cut, key))

    @property
    def moments(self) -> list[tuple[str, str]]:
        """(Which moment, of which parameter), where the decoder has the parameter."""
        return sorted((moment, parameter) for moment, parameter in self._cuts if parameter in self._parts)

    def read(self, moment: str, parameter: str, first: int = 0, count: int | None = None) -> Coded:
        """``count`` (``None``: all) numbers from ``first`` on, a multiple of ``BLOCK``. Raises ``UserError`` where they are not there."""
        own = self._decoder.get_parameter(parameter)
        count = own.numel() if count is None else count
        device = own.device
        if coded_shard(self._decoder, moment + CODES, parameter, 0, torch.empty(0)).key in self._contents.stored:
            codes = torch.empty(count, dtype=torch.uint8, device=device)
            scales = torch.empty(-(-count // BLOCK), device=device)
            read = (CODES, first, codes), (SCALES, first // BLOCK, scales)
            self._contents.read([coded_shard(self._decoder, moment + ending, parameter, at, values) for ending, at, values in read])
            return Coded(codes, scales)
        return codebook(moment, device).encode(self._decoded(moment, parameter).to(device)[first : first + count])

    def _decoded(self, moment: str, parameter: str) -> Tensor:
        """The numbers [n] fp32 that this rank holds of a parameter, of whatever cuts are stored."""
        if (moment, parameter) not in self._cuts:
            raise UserError(f"it has no '{moment}{CODES}/{parameter}'")
        found = torch.empty(self._decoder.get_parameter(parameter).numel())
        covered: dict[str, list[ShardOffsets]] = defaultdict(list)
        book = codebook(moment, found.device)
        for cut, key in self._cuts[moment, parameter]:
            theirs = self._under(parameter, cut)
            common = [(a, b, both) for a in self._parts[parameter] for b in theirs if a.name == b.name and (both := intersection(a.box, b.box))]
            if not common:
                continue
            flat = book.decode(Coded(self._contents.tensor(key), self._contents.tensor(Key(moment + SCALES, key.name))))
            for own, their, both in common:
                source, target = (x[p.first : p.first + p.box.numel].view(p.box.shape) for x, p in ((flat, their), (found, own)))
                target[both.within(own.box).slices] = source[both.within(their.box).slices]
                covered[own.name].append(both)
        if not all(is_covered(part.box, covered[part.name]) for part in self._parts[parameter]):
            raise UserError(f"its '{moment}{CODES}/{parameter}' is not there whole")
        return found

    def _under(self, parameter: str, cut: ShardSpec) -> list[Part]:
        """What the rank of ``cut`` has of a parameter."""
        shapes, names = self._decoder.shapes, [part.name for part in self._parts[parameter]]
        if _is_of_experts(parameter):
            assert shapes.experts is not None
            count, own = shapes.experts.num_experts // cut.expert_size, f".experts.{_expert(names[0])}."
            of_one = [name for name in names if own in name]
            numbers = range(cut.expert_rank * count, (cut.expert_rank + 1) * count)
            names = [name.replace(own, f".experts.{number}.") for number in numbers for name in of_one]
        wholes, found, at = dict(parameters(shapes)), [], 0
        for name in names:
            slices = cut_slices(shapes, name, wholes[name], cut)
            box = ShardOffsets(tuple(s.start for s in slices), tuple(s.stop for s in slices))
            found.append(Part(parameter, at, name, wholes[name], box))
            at += box.numel
        return found


def _cut_of(decoder: Decoder, parameter: str) -> ShardSpec:
    """How ranks cut a matrix of a layer between them."""
    return decoder.cut if _is_of_experts(parameter) else replace(decoder.cut, expert_rank=0, expert_size=1)


def _mark(cut: ShardSpec) -> str:
    tensor = f"@tensor-{cut.rank}-of-{cut.size}{'-by-outputs' if cut.deterministic else ''}" if cut.size > 1 else ""
    return tensor + (f"@expert-{cut.expert_rank}-of-{cut.expert_size}" if cut.expert_size > 1 else "")


def _unmarked(name: str) -> tuple[str, ShardSpec]:
    """The parameter and the cut of a name that ``_mark`` ends. Raises ``UserError`` for another end."""
    parameter, *marks = name.split("@")
    cut = WHOLE
    for mark in marks:
        found = re.fullmatch(r"(tensor|expert)-(\d+)-of-(\d+)(-by-outputs)?", mark)
        if found is None:
            raise UserError(f"its '{name}' is of a cut that this version does not know")
        rank, size = int(found[2]), int(found[3])
        if found[1] == "tensor":
            cut = replace(cut, rank=rank, size=size, deterministic=found[4] is not None)
        else:
            cut = replace(cut, expert_rank=rank, expert_size=size)
    return parameter, cut


def _is_of_experts(parameter: str) -> bool:
    return ".experts." in parameter


def _expert(name: str) -> int:
    found = re.search(r"\.experts\.(\d+)\.", name)
    assert found is not None, name
    return int(found[1])

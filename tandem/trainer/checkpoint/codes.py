"""Stores 8-bit moments in a checkpoint: codes and scales keep the blocks in which the rank holds them.

If a rank holds a parameter whole, or a run of it that begins and ends at block borders, the codes are stored under the parameter's name and
any such rank reads them bit for bit. If tensor or expert parallelism shards matrices, blocks belong to a rank's shard and the name says
which one. A different sharding decodes the shards it overlaps and encodes them again, so its moments agree within the rounding of a block.
"""

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from tandem.layout.parameters import parameters
from tandem.layout.shard_offsets import ShardOffsets, intersection, is_covered
from tandem.layout.sharding import WHOLE, ShardSpec, shard_slices
from tandem.model.decoder import Decoder
from tandem.trainer.checkpoint.format.shard import Key, Shard
from tandem.trainer.checkpoint.read import Contents
from tandem.trainer.optimizers.blockwise import BLOCK, CODES, SCALES, Coded, codebook
from tandem.types import UserError


class Part(NamedTuple):
    """Places a shard in memory: the ``offsets.numel`` elements from ``first`` on of the decoder's ``parameter`` are the shard ``offsets`` of the
    tensor ``name``."""

    parameter: str
    first: int
    name: str
    whole: tuple[int, ...]
    offsets: ShardOffsets


def coded_shard(decoder: Decoder, kind: str, parameter: str, first: int, values: Tensor) -> Shard:
    """Returns the shard of ``values[n]``, this rank's codes or scales of ``parameter`` from ``first`` on."""
    count = decoder.get_parameter(parameter).numel()
    whole = count if kind.endswith(CODES) else -(-count // BLOCK)
    key = Key(kind, parameter + _mark(_shard_spec_of(decoder, parameter)))
    return Shard(key, (whole,), ShardOffsets((first,), (first + len(values),)), values)


class StoredCodes:
    """Reads the 8-bit moments of ``contents`` as ``decoder`` holds them. ``parts``: where the decoder's parameters hold the tensors of the
    whole model."""

    def __init__(self, contents: Contents, decoder: Decoder, parts: Sequence[Part]) -> None:
        self._contents, self._decoder = contents, decoder
        self._parts: dict[str, list[Part]] = defaultdict(list)
        for part in sorted(parts, key=lambda part: part.first):
            self._parts[part.parameter].append(part)
        self._shard_specs: dict[tuple[str, str], list[tuple[ShardSpec, Key]]] = defaultdict(list)
        for key in contents.held:
            if key.state.endswith(CODES):
                parameter, shard_spec = _unmarked(key.name)
                self._shard_specs[key.state.removesuffix(CODES), parameter].append((shard_spec, key))

    @property
    def moments(self) -> list[tuple[str, str]]:
        """Returns the stored (moment, parameter) pairs of parameters that the decoder has."""
        return sorted((moment, parameter) for moment, parameter in self._shard_specs if parameter in self._parts)

    def read(self, moment: str, parameter: str, first: int = 0, count: int | None = None) -> Coded:
        """Returns ``count`` (``None``: all) elements from ``first`` on, a multiple of ``BLOCK``. Raises ``UserError`` if they are not
        stored."""
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
        """Returns the elements [n] fp32 of a parameter that this rank holds, assembled from whichever shards are stored."""
        if (moment, parameter) not in self._shard_specs:
            raise UserError(f"it has no '{moment}{CODES}/{parameter}'")
        decoded = torch.empty(self._decoder.get_parameter(parameter).numel())
        covered: dict[str, list[ShardOffsets]] = defaultdict(list)
        book = codebook(moment, decoded.device)
        for shard_spec, key in self._shard_specs[moment, parameter]:
            theirs = self._under(parameter, shard_spec)
            common = [(a, b, both) for a in self._parts[parameter] for b in theirs if a.name == b.name and (both := intersection(a.offsets, b.offsets))]
            if not common:
                continue
            flat = book.decode(Coded(self._contents.tensor(key), self._contents.tensor(Key(moment + SCALES, key.name))))
            for own, their, both in common:
                source, target = (x[p.first : p.first + p.offsets.numel].view(p.offsets.shape) for x, p in ((flat, their), (decoded, own)))
                target[both.within(own.offsets).slices] = source[both.within(their.offsets).slices]
                covered[own.name].append(both)
        if not all(is_covered(part.offsets, covered[part.name]) for part in self._parts[parameter]):
            raise UserError(f"its '{moment}{CODES}/{parameter}' is incomplete")
        return decoded

    def _under(self, parameter: str, shard_spec: ShardSpec) -> list[Part]:
        """Returns the parts of a parameter that the rank of ``shard_spec`` holds."""
        shapes, names = self._decoder.shapes, [part.name for part in self._parts[parameter]]
        if _is_of_experts(parameter):
            assert shapes.experts is not None
            count, own = shapes.experts.num_experts // shard_spec.expert_size, f".experts.{_expert(names[0])}."
            of_one = [name for name in names if own in name]
            numbers = range(shard_spec.expert_rank * count, (shard_spec.expert_rank + 1) * count)
            names = [name.replace(own, f".experts.{number}.") for number in numbers for name in of_one]
        wholes, parts, at = dict(parameters(shapes)), [], 0
        for name in names:
            slices = shard_slices(shapes, name, wholes[name], shard_spec)
            offsets = ShardOffsets(tuple(s.start for s in slices), tuple(s.stop for s in slices))
            parts.append(Part(parameter, at, name, wholes[name], offsets))
            at += offsets.numel
        return parts


def _shard_spec_of(decoder: Decoder, parameter: str) -> ShardSpec:
    """Returns how ranks shard a layer's matrix."""
    return decoder.shard_spec if _is_of_experts(parameter) else replace(decoder.shard_spec, expert_rank=0, expert_size=1)


def _mark(shard_spec: ShardSpec) -> str:
    by_outputs = "-by-outputs" if shard_spec.deterministic else ""
    tensor = f"@tensor-{shard_spec.rank}-of-{shard_spec.size}{by_outputs}" if shard_spec.size > 1 else ""
    return tensor + (f"@expert-{shard_spec.expert_rank}-of-{shard_spec.expert_size}" if shard_spec.expert_size > 1 else "")


def _unmarked(name: str) -> tuple[str, ShardSpec]:
    """Returns the parameter and the shard spec encoded in a name by ``_mark``. Raises ``UserError`` for an unknown suffix."""
    parameter, *marks = name.split("@")
    shard_spec = WHOLE
    for mark in marks:
        match = re.fullmatch(r"(tensor|expert)-(\d+)-of-(\d+)(-by-outputs)?", mark)
        if match is None:
            raise UserError(f"its '{name}' has a sharding that this version does not know")
        rank, size = int(match[2]), int(match[3])
        if match[1] == "tensor":
            shard_spec = replace(shard_spec, rank=rank, size=size, deterministic=match[4] is not None)
        else:
            shard_spec = replace(shard_spec, expert_rank=rank, expert_size=size)
    return parameter, shard_spec


def _is_of_experts(parameter: str) -> bool:
    return ".experts." in parameter


def _expert(name: str) -> int:
    match = re.search(r"\.experts\.(\d+)\.", name)
    assert match is not None, name
    return int(match[1])

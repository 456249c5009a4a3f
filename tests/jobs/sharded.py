"""Assembles a sharded checkpoint from the names in its safetensors files, without Tandem's reader."""

from pathlib import Path

import torch
from safetensors.torch import load_file


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """Returns every whole tensor of ``folder`` as ``STATE/NAME``. Each element must be in exactly one file."""
    parts: dict[str, list[tuple[list[tuple[int, int]], torch.Tensor]]] = {}
    for path in sorted(folder.glob("rank-*.safetensors")):
        for label, tensor in load_file(path).items():
            name, _, where = label[:-1].partition("[")
            ends = [(int(a), int(b)) for a, b in (end.split(":") for end in where.split(",") if end)]
            parts.setdefault(name, []).append((ends, tensor))
    whole = {}
    for name, held in parts.items():
        shape = [max(ends[axis][1] for ends, _ in held) for axis in range(len(held[0][0]))]
        whole[name] = torch.empty(shape, dtype=held[0][1].dtype)
        assert sum(tensor.numel() for _, tensor in held) == whole[name].numel(), name
        for ends, tensor in held:
            whole[name][tuple(slice(a, b) for a, b in ends)] = tensor
    return whole


def is_same(a: Path, b: Path) -> bool:
    """Returns whether two checkpoints have the same bits, however they are sharded."""
    ours, theirs = tensors_of(a), tensors_of(b)
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)

"""Random tensors that depend only on a seed and their name."""

import hashlib
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from tandem.layout.parameters import is_of_adapter, parameters
from tandem.layout.shapes import ModelShapes


def generator_of(seed: int, name: str) -> torch.Generator:
    """Returns the generator of ``seed`` and ``name``."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little"))


def new_adapter(shapes: ModelShapes, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Yields the fp32 tensors of a new low-rank adapter as PEFT initialises one, so that the model computes what it did: A uniform in +-1 / sqrt(K)
    (``kaiming_uniform_`` with a = sqrt(5)), drawn by the generator of ``seed`` and its name, and B 0."""
    for name, shape in parameters(shapes):
        if name.endswith(".lora_A.weight"):
            bound = 1 / math.sqrt(shape[1])
            yield name, torch.empty(shape, dtype=torch.float32).uniform_(-bound, bound, generator=generator_of(seed, name))
        elif is_of_adapter(name):
            yield name, torch.zeros(shape)

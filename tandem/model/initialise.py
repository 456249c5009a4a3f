"""Random initial weights."""

import hashlib
import math

import torch

from tandem.layout.shapes import parameters
from tandem.model.decoder import Decoder
from tandem.model.huggingface import part_of, to_huggingface

_RESIDUAL = ("o_proj.weight", "down_proj.weight", ".w2.weight")
"""Endings of the matrices that write to the residual stream; Mixtral calls an expert's last one w2."""


@torch.no_grad()
def initialise(decoder: Decoder, seed: int, standard_deviation: float = 0.02) -> None:
    """Fill every parameter: norms with 1, biases with 0, matrices from a normal distribution of the given standard
    deviation, and those that write to the residual stream of that over sqrt(2 layers) (Radford et al., 2019, section 2.3).

    Each matrix has a generator of its own, seeded with ``seed`` and its Hugging Face name, and is drawn in fp32 on
    one CPU thread: the values do not depend on fusing, order, device or thread count, and a rank's part is the part of the
    whole.
    """
    whole = dict(parameters(decoder.shapes))
    residual = standard_deviation / math.sqrt(2 * decoder.shapes.num_hidden_layers)
    for name, tensor in to_huggingface(decoder):
        if name.endswith("norm.weight"):
            tensor.fill_(1.0)
        elif name.endswith(".bias"):
            tensor.fill_(0.0)
        else:
            generator = torch.Generator().manual_seed(_seed_of(seed, name))
            deviation = residual if name.endswith(_RESIDUAL) else standard_deviation
            drawn = torch.empty(whole[name], dtype=torch.float32).normal_(0.0, deviation, generator=generator)
            tensor.copy_(part_of(decoder, name, drawn))


def _seed_of(seed: int, name: str) -> int:
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")

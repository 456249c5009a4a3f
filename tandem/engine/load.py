"""A decoder that is ready for an engine: from a folder, or with random weights of a folder's shapes."""

from pathlib import Path
from typing import Literal

import torch

from tandem.kernels import KernelChoice, select
from tandem.model.decoder import Decoder
from tandem.model.huggingface import load_model, read_shapes
from tandem.model.initialise import initialise
from tandem.model.tensor_parallel import RankGroup

LoadFormat = Literal["auto", "dummy"]


def load_decoder(
    model: str | Path, kernels: KernelChoice, dtype: torch.dtype, device: torch.device, load_format: LoadFormat, seed: int,
    group: RankGroup | None = None, pack: bool = False,
) -> Decoder:
    """The model in the folder ``model``, or with ``dummy`` its shapes and random weights; with a ``group`` one rank's
    part. ``pack``: weights of a folder are packed for inference as they are read."""
    chosen = select(kernels, dtype)
    if load_format == "auto":
        return load_model(model, chosen, dtype=dtype, device=device, group=group, pack=pack)
    decoder = Decoder(read_shapes(model), chosen, dtype=dtype, device=device, group=group)
    initialise(decoder, seed)
    return decoder

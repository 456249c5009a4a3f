"""The factor of the embedding's rows."""

import torch

from tandem.layout.shapes import ModelShapes


def embedding_factor(shapes: ModelShapes, dtype: torch.dtype) -> float:
    """Returns what the rows of an embedding of ``dtype`` are multiplied with. sqrt(hidden_size) is rounded to it, as the models were trained: in bf16 the
    square root of 3072 is 55.5, not 55.4256."""
    factor = shapes.multipliers.embedding
    return factor * float(torch.tensor(shapes.hidden_size**0.5).to(dtype)) if shapes.scaled_embedding else factor

"""Sums over the rows of each sequence."""

import torch
from torch import Tensor


def sequence_sums(values: Tensor, sequence_of_row: Tensor, sequences: int) -> Tensor:
    """``values[R]`` summed by ``sequence_of_row[R]`` (int64) -> [S], in the order of the rows."""
    return torch.zeros(sequences, dtype=values.dtype, device=values.device).index_add(0, sequence_of_row, values)

"""Draws draft tokens with the random numbers that the model draws the same positions with."""

import torch
from torch import Tensor

from tandem.engine.executor.input_batch import SelectedRows
from tandem.engine.executor.row_tensors import to_device
from tandem.engine.sample.random_numbers import uniforms
from tandem.kernels.api import Kernels


def draw_drafts(kernels: Kernels, logits: Tensor, selected: SelectedRows, positions: list[int]) -> list[int]:
    """Returns a token for each row of ``selected`` from its ``logits[R, V]``, with its sampling settings and the number of its position, ``positions[R]``."""
    uniform = uniforms(selected.random_key, to_device(torch.tensor(positions), logits.device))
    drawn = kernels.sample_rows(logits, selected.temperature, selected.top_k, selected.top_p, selected.min_p, uniform)
    tokens: list[int] = drawn.tokens.tolist()
    return tokens

"""What a step needs to know of the rows, kept on the device, so that a step can follow another before the host has seen what that one drew."""

from collections.abc import Sequence as Series

import torch
from torch import Tensor

from tandem.engine.executor.flat_batch import last_of
from tandem.engine.executor.input_batch import RowTable
from tandem.engine.kv_cache.block_table import BlockChange
from tandem.engine.sample.random_numbers import uniforms
from tandem.kernels.api import Kernels, PagedBatch, SampledRows


class DeviceRows:
    """The rows of ``table`` on ``device``, and one more, ``padding``, which fills up batches: one token long, in the block ``scratch``, which
    belongs to nobody. Tensors keep their memory, so that a captured graph finds them."""

    def __init__(self, table: RowTable, device: torch.device, scratch: int) -> None:
        rows, width = table.block_tables.shape
        self.padding = rows
        self._integers = torch.zeros(4, rows + 1, dtype=torch.int64, device=device)
        self._numbers = torch.zeros(3, rows + 1, dtype=torch.float32, device=device)
        self.last_token, self.length, self.random_key, self.top_k = self._integers
        self.temperature, self.top_p, self.min_p = self._numbers
        self.top_p[rows] = 1.0
        self.length[rows] = 1
        self.block_tables = torch.zeros(rows + 1, width, dtype=torch.int32, device=device)
        self.block_tables[rows] = scratch

    def upload(self, table: RowTable, rows: Series[int]) -> None:
        """Take over ``rows`` as the host has them."""
        if not rows:
            return
        index = torch.tensor(rows)
        integers = torch.stack([x[index] for x in (table.last_token, table.length, table.random_key, table.top_k)])
        numbers = torch.stack([x[index] for x in (table.temperature, table.top_p, table.min_p)])
        at = to_device(index, self.last_token.device)
        self._integers.index_copy_(1, at, to_device(integers, at.device))
        self._numbers.index_copy_(1, at, to_device(numbers, at.device))
        self.block_tables.index_copy_(0, at, to_device(table.block_tables[index], at.device))

    def change_blocks(self, changes: Series[BlockChange]) -> None:
        """As ``RowTable.change_blocks``."""
        if changes:
            row, column, block = to_device(torch.tensor(changes), self.last_token.device).unbind(1)
            self.block_tables[row, column] = block.int()

    def next_tokens(self, index: Tensor, width: int) -> tuple[Tensor, Tensor, PagedBatch]:
        """The tokens and positions that the rows ``index[R]`` feed next, and where they stand; block tables of ``width`` columns."""
        lengths = self.length.index_select(0, index)
        positions, batch = last_of(lengths, self.block_tables[:, :width].index_select(0, index))
        return self.last_token.index_select(0, index), positions, batch

    def draw(self, kernels: Kernels, index: Tensor, logits: Tensor) -> SampledRows:
        """Draw a token for each of the rows ``index[R]`` from ``logits[R, V]``, with the number of its own position, and move the rows on."""
        lengths = self.length.index_select(0, index)
        temperature, top_p, min_p = self._numbers.index_select(1, index)
        uniform = uniforms(self.random_key.index_select(0, index), lengths)
        drawn = kernels.sample_rows(logits, temperature, self.top_k.index_select(0, index), top_p, min_p, uniform)
        self.last_token.index_copy_(0, index, drawn.tokens)
        self.length.index_copy_(0, index, lengths + (index != self.padding))
        return drawn


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """``x`` on ``device``, without waiting for what the device does: through page-locked memory, which a copy may read later."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)

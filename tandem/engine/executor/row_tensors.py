"""The part of the input batch that a step reads on its device: one row per sequence, one tensor per property."""

from collections.abc import Sequence as Series
from ctypes import c_int64

import torch
from torch import Tensor

from tandem.engine.kv_cache.block_pool import BlockChange
from tandem.engine.sample.random_numbers import uniforms
from tandem.engine.sample.sampler import SamplingMetadata
from tandem.kernels.api import BLOCK_TOKENS, PagedBatch
from tandem.kernels.decode_step import DecodeRows


class RowTensors:
    """``rows`` sequences, each with a block table of ``columns`` entries.

    ``length[r]``: known tokens of row r, prompt included; the last one, ``last_token[r]``, is fed next. The tensors keep their addresses for
    captured graphs. With ``scratch_block`` there is one more row, ``padding``, that pads batches: it stays one token long, in that block,
    which no sequence owns.
    """

    def __init__(self, rows: int, columns: int, device: torch.device, scratch_block: int | None = None) -> None:
        self.device = device
        self.padding = rows
        rows += scratch_block is not None
        self._integers = torch.zeros(4, rows, dtype=torch.int64, device=device)
        self._numbers = torch.zeros(3, rows, dtype=torch.float32, device=device)
        self.last_token, self.length, self.random_key, self.top_k = self._integers
        self.temperature, self.top_p, self.min_p = self._numbers
        self._lengths = (c_int64 * rows).from_address(self.length.data_ptr()) if device.type == "cpu" else None
        self.block_tables = torch.zeros(rows, columns, dtype=torch.int32, device=device)
        if scratch_block is not None:
            self.top_p[self.padding] = 1.0
            self.length[self.padding] = 1
            self.block_tables[self.padding] = scratch_block

    @property
    def decode_rows(self) -> DecodeRows:
        """The state as the kernels' decoding step reads it."""
        numbers = self.temperature, self.top_p, self.min_p
        return DecodeRows(self.last_token, self.length, self.random_key, self.top_k, *numbers, self.block_tables)

    def lengths_of(self, rows: Series[int]) -> list[int]:
        """Returns the lengths of ``rows``, which are in host memory. Between two steps each operation of torch takes longer than all rows do here."""
        assert self._lengths is not None
        return [self._lengths[row] for row in rows]

    def fill(self, index: Tensor, integers: Tensor, numbers: Tensor) -> None:
        """Sets the rows ``index[R]`` to ``integers[4, R]`` int64 (last token, length, random key, top-k) and ``numbers[3, R]`` fp32
        (temperature, top-p, min-p)."""
        self._integers.index_copy_(1, index, integers)
        self._numbers.index_copy_(1, index, numbers)

    def copy_rows(self, source: "RowTensors", rows: Series[int]) -> None:
        """Copies ``rows`` from ``source``, which is in host memory."""
        if rows:
            index = torch.tensor(rows)
            integers, numbers = source.gather(index)
            tables = source.block_tables.index_select(0, index)
            at = to_device(index, self.device)
            self.fill(at, to_device(integers, self.device), to_device(numbers, self.device))
            self.block_tables.index_copy_(0, at, to_device(tables, self.device))

    def gather(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the integers [4, R] and the numbers [3, R] of the rows ``index[R]``, as ``fill`` takes them."""
        return self._integers.index_select(1, index), self._numbers.index_select(1, index)

    def change_blocks(self, changes: Series[BlockChange]) -> None:
        """Applies ``changes`` to the block tables."""
        if changes:
            row, column, block = to_device(torch.tensor(changes), self.device).unbind(1)
            self.block_tables[row, column] = block.int()

    def next_tokens(self, index: Tensor, width: int) -> tuple[Tensor, Tensor, PagedBatch]:
        """Returns the tokens and positions [R] int64 that the rows ``index[R]`` feed next, and their slots; block tables are cut to
        ``width`` columns."""
        lengths = self.length.index_select(0, index)
        tables = self.block_tables[:, :width].index_select(0, index)
        positions = lengths - 1
        blocks = tables.gather(1, (positions // BLOCK_TOKENS).unsqueeze(1)).squeeze(1)
        slots = blocks.long() * BLOCK_TOKENS + positions % BLOCK_TOKENS
        starts = torch.arange(len(lengths) + 1, dtype=torch.int32, device=self.device)
        return self.last_token.index_select(0, index), positions, PagedBatch(starts, lengths.int(), tables, slots, index)

    def sampling_metadata(self, index: Tensor, offsets: Tensor | int = 0) -> SamplingMetadata:
        """Returns the sampling settings of the rows ``index[R]``, with the random number of each row's position, or of the one ``offsets[R]`` further."""
        temperature, top_p, min_p = self._numbers.index_select(1, index)
        uniform = uniforms(self.random_key.index_select(0, index), self.length.index_select(0, index) + offsets)
        return SamplingMetadata(temperature, self.top_k.index_select(0, index), top_p, min_p, uniform)

    def append(self, index: Tensor, tokens: Tensor) -> None:
        """Appends ``tokens[R]`` to the rows ``index[R]``; the padding row keeps its length."""
        self.last_token.index_copy_(0, index, tokens)
        self.length.index_copy_(0, index, self.length.index_select(0, index) + (index != self.padding))

    def set_ends(self, index: Tensor, last_token: Tensor, length: Tensor) -> None:
        """Sets the last token and the length of the rows ``index[R]``."""
        self.last_token.index_copy_(0, index, last_token)
        self.length.index_copy_(0, index, length)


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """Returns ``x`` on ``device`` without waiting for the device: the copy to a GPU goes through page-locked memory."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" and not x.is_cuda else x.to(device)

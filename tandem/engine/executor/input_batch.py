"""The flat state of everything that decodes: one row a sequence, one tensor a property.

A step reads and writes these with a handful of vector operations; Python looks at a single sequence only when it joins,
leaves or crosses a block.
"""

from collections.abc import Sequence as Series
from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.engine.core.request import Sequence
from tandem.engine.kv_cache.block_table import BlockChange, blocks_for
from tandem.types import WeightVersion


@dataclass(frozen=True, slots=True)
class Selection:
    """Rows of one step with what sampling needs of them, each tensor [R]. ``stop_tokens[R, K]`` is padded with -1."""

    rows: tuple[int, ...]
    index: Tensor
    start: Tensor
    limit: Tensor
    random_key: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    stop_tokens: Tensor
    is_greedy: bool


class RowTable:
    """``rows`` sequences of up to ``max_model_len`` tokens.

    ``length[r]``: tokens known of row r, prompt included; its last one, ``last_token[r]``, is the next to be fed.
    ``start[r]``: its length when it joined; token ``start + i`` stands in column i of the ``drawn`` buffers until it is
    read back. ``limit[r]``: the length at which it ends.
    """

    def __init__(self, rows: int, max_model_len: int, logprob_dtype: torch.dtype = torch.float32) -> None:
        self._integers = torch.zeros(6, rows, dtype=torch.int64)
        self._numbers = torch.zeros(3, rows, dtype=torch.float32)
        self.last_token, self.length, self.start, self.limit, self.random_key, self.top_k = self._integers
        self.temperature, self.top_p, self.min_p = self._numbers
        self.stop_tokens = torch.full((rows, 1), -1, dtype=torch.int64)
        self.block_tables = torch.zeros(rows, blocks_for(max_model_len), dtype=torch.int32)
        # Not zeroed: memory that no sequence reaches is never touched.
        self.drawn_tokens = torch.empty(rows, max_model_len, dtype=torch.int64)
        self.drawn_logprobs = torch.empty(2, rows, max_model_len, dtype=logprob_dtype)
        self._drawn_raw, self._drawn_sampling = self.drawn_logprobs
        self.adjusted: dict[int, Sequence] = {}
        self.with_top_logprobs: dict[int, Sequence] = {}
        self.with_text_watch: dict[int, Sequence] = {}
        self.streamed: dict[int, Sequence] = {}
        self.speculating: dict[int, Sequence] = {}
        self.with_adapter: dict[int, Sequence] = {}

    def join(self, sequences: Series[Sequence], lengths: Series[int]) -> None:
        """Fill the rows of sequences of which ``lengths[i]`` tokens are known, and which are about to draw their first token
        here or, swapped in, to feed their last one."""
        index = torch.tensor([sequence.row for sequence in sequences])
        integers, numbers, stops = [], [], []
        for sequence, length in zip(sequences, lengths, strict=True):
            request, params = sequence.request, sequence.request.params
            last = sequence.token_ids[-1] if sequence.token_ids else 0
            integers.append((last, length, length, request.max_length, sequence.random_key, params.top_k))
            numbers.append((params.temperature, params.top_p, params.min_p))
            stops.append(request.stop_token_ids)
            if request.rules is not None:
                self.adjusted[sequence.row] = sequence
            if params.logprobs is not None:
                self.with_top_logprobs[sequence.row] = sequence
            if sequence.text_watch is not None:
                self.with_text_watch[sequence.row] = sequence
            if params.is_streamed:
                self.streamed[sequence.row] = sequence
            if request.draft_tokens:
                self.speculating[sequence.row] = sequence
            if request.adapter:
                self.with_adapter[sequence.row] = sequence
        self._integers[:, index] = torch.tensor(integers).t()
        self._numbers[:, index] = torch.tensor(numbers, dtype=torch.float32).t()
        self._set_stops(index, stops)
        self._set_tables(index, [sequence.blocks for sequence in sequences])

    def _set_stops(self, index: Tensor, stops: list[tuple[int, ...]]) -> None:
        width = self.stop_tokens.shape[1]
        widest = max(map(len, stops))
        if widest > width:
            wider = torch.full((len(self.stop_tokens), widest), -1, dtype=torch.int64)
            wider[:, :width] = self.stop_tokens
            self.stop_tokens, width = wider, widest
        self.stop_tokens[index] = torch.tensor([stop + (-1,) * (width - len(stop)) for stop in stops])

    def _set_tables(self, index: Tensor, tables: list[list[int]]) -> None:
        width = max(map(len, tables))
        self.block_tables[index, :width] = padded_tables(tables, width)

    def change_blocks(self, changes: Series[BlockChange]) -> None:
        row, column, block = torch.tensor(changes).unbind(1)
        self.block_tables[row, column] = block.int()

    def select(self, rows: tuple[int, ...]) -> Selection:
        index = torch.tensor(rows, dtype=torch.int64)
        _, _, start, limit, random_key, top_k = self._integers.index_select(1, index)
        temperature, top_p, min_p = self._numbers.index_select(1, index)
        return Selection(
            rows=rows,
            index=index,
            start=start,
            limit=limit,
            random_key=random_key,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            stop_tokens=self.stop_tokens.index_select(0, index),
            is_greedy=not bool(temperature.any()),
        )

    def narrow(self, selection: Selection, places: list[int]) -> Selection:
        """The selected rows at ``places`` of ``selection``."""
        return self.select(tuple(selection.rows[place] for place in places))

    def outputs_of(self, sequences: Series[Sequence]) -> list[Tensor]:
        """The tokens [L] that each of some sequences in rows has drawn: those that were read back and those in its row."""
        index = torch.tensor([sequence.row for sequence in sequences])
        counts = (self.length[index] - self.start[index]).tolist()
        drawn = self.drawn_tokens[:, : max(counts)].index_select(0, index).unbind(0)
        return [
            torch.cat((torch.tensor(sequence.token_ids), tokens[:count])) if sequence.token_ids else tokens[:count]
            for sequence, tokens, count in zip(sequences, drawn, counts, strict=True)
        ]

    def record(self, selection: Selection, tokens: Tensor, raw: Tensor, sampling: Tensor) -> Tensor:
        """Take down one drawn token for each selected row; returns which rows [R] have ended by length or stop
        token."""
        index = selection.index
        length = self.length.index_select(0, index)
        column = length - selection.start
        # ``put_`` by the place in the flat buffer takes a third of the time of an index for each dimension.
        place = index * self.drawn_tokens.shape[1] + column
        self.drawn_tokens.put_(place, tokens)
        self._drawn_raw.put_(place, raw)
        self._drawn_sampling.put_(place, sampling)
        self.last_token.put_(index, tokens)
        length += 1
        # The length comes last: an interrupted step leaves the rows as they were before it.
        self.length.put_(index, length)
        ended: Tensor = (length >= selection.limit) | (tokens.unsqueeze(1) == selection.stop_tokens).any(1)
        return ended

    def read_back(self, sequences: Series[Sequence], version: WeightVersion) -> None:
        """Move what the rows have drawn since they joined, all under ``version``, to the sequences' lists. The rows
        have no sequence afterwards."""
        if not sequences:
            return
        index = torch.tensor([sequence.row for sequence in sequences])
        counts = (self.length[index] - self.start[index]).tolist()
        # Whoever joins next and is interrupted before its row is filled must find nothing drawn in it.
        self.start[index] = self.length[index]
        width = max(counts)
        tokens = self.drawn_tokens[:, :width].index_select(0, index).tolist()
        raw, sampling = self.drawn_logprobs[:, :, :width].index_select(1, index).tolist()
        specials = (
            self.adjusted, self.with_top_logprobs, self.with_text_watch, self.streamed, self.speculating, self.with_adapter,
        )
        for i, (sequence, count) in enumerate(zip(sequences, counts, strict=True)):
            sequence.token_ids += tokens[i][:count]
            sequence.raw_logprobs += raw[i][:count]
            sequence.sampling_logprobs += sampling[i][:count]
            sequence.weight_versions += [version] * count
            del sequence.top_logprobs[len(sequence.token_ids) :]
            for special in specials:
                special.pop(sequence.row, None)

    def drawn_since(
        self, sequences: Series[Sequence], first: Series[int]
    ) -> list[tuple[list[int], list[float], list[float]]]:
        """Tokens, raw and sampling log-probabilities of the completions ``sequences``, which have rows, from token number
        ``first[i]`` on. Nothing is read back."""
        index = torch.tensor([sequence.row for sequence in sequences])
        counts = (self.length[index] - self.start[index]).tolist()
        columns = [max(0, at - len(sequence.token_ids)) for sequence, at in zip(sequences, first, strict=True)]
        width = max(count - column for count, column in zip(counts, columns, strict=True))
        last = self.drawn_tokens.shape[1] - 1
        place = (torch.tensor(columns).unsqueeze(1) + torch.arange(width)).clamp_(max=last)
        tokens = self.drawn_tokens[index.unsqueeze(1), place].tolist()
        raw, sampling = self.drawn_logprobs[:, index.unsqueeze(1), place].tolist()
        found = []
        for i, (sequence, at) in enumerate(zip(sequences, first, strict=True)):
            new = counts[i] - columns[i]
            found.append(
                (
                    sequence.token_ids[at:] + tokens[i][:new],
                    sequence.raw_logprobs[at:] + raw[i][:new],
                    sequence.sampling_logprobs[at:] + sampling[i][:new],
                )
            )
        return found


def padded_tables(tables: Series[Series[int]], width: int) -> Tensor:
    """Block tables as [S, width] int32, short ones padded with 0."""
    padded = [[*table, *[0] * (width - len(table))] for table in tables]
    # A block that was given back is never read; its number must be one all the same.
    return torch.tensor(padded, dtype=torch.int32).clamp_(min=0)

"""The input batch: the state of the decoding sequences, one row per sequence.

A step reads and writes it with a few vector operations; Python handles a single sequence only when it joins, leaves or enters another block.
"""

import math
from collections.abc import Sequence as Series
from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.engine.core.request import Sequence
from tandem.engine.executor.model_input import padded_tables
from tandem.engine.executor.row_tensors import RowTensors, to_device
from tandem.engine.kv_cache.block_pool import BlockChange, blocks_for
from tandem.engine.sample.logits_processors import Position
from tandem.engine.sample.logprobs import top_logprobs
from tandem.kernels.api import BLOCK_TOKENS, Kernels, SampledRows
from tandem.kernels.decode_step import DrawnRows, RowRecorder, row_recorder
from tandem.types import RunError, WeightVersion

NOT_FINITE = "the model's logits are not finite numbers; check the weights that were loaded last"


@dataclass(frozen=True, slots=True)
class SelectedRows:
    """The rows that draw in a step, and their sequences. On the CPU: ``index``, ``start``, ``limit`` [R] and ``stop_tokens[R, K]``, padded
    with -1. On the device: ``device_index`` and what sampling needs, [R] each."""

    rows: tuple[int, ...]
    sequences: tuple[Sequence, ...]
    index: Tensor
    start: Tensor
    limit: Tensor
    stop_tokens: Tensor
    device_index: Tensor
    random_key: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    is_greedy: bool


class InputBatch:
    """State of ``rows`` sequences of up to ``max_model_len`` tokens, in host memory and, if a step reads it, on ``device``.

    ``host`` is the state that the host knows, without the tokens of an in-flight step. ``on_device`` is the state that the next step feeds;
    on a CPU without steps launched ahead it is ``host`` itself. ``start[r]``: the length of row r when it joined; token ``start + i`` is in
    column i of the ``drawn`` buffers until it is read back. ``limit[r]``: the length at which it ends.

    Args:
        rows: Maximum number of sequences that decode at once.
        max_model_len: Maximum tokens of a sequence.
        logprob_dtype: The dtype of recorded log-probabilities.
        device: The device that steps run on.
        scratch_block: A block that no sequence owns, for the padding row of steps that are launched ahead; ``None``: none are.
    """

    def __init__(
        self, rows: int, max_model_len: int, logprob_dtype: torch.dtype = torch.float32, device: torch.device | None = None,
        scratch_block: int | None = None,
    ) -> None:
        cpu = torch.device("cpu")
        columns = blocks_for(max_model_len)
        self.host = RowTensors(rows, columns, cpu)
        is_mirrored = scratch_block is not None or (device is not None and device.type != "cpu")
        self.on_device = RowTensors(rows, columns, device or cpu, scratch_block) if is_mirrored else self.host
        self.start, self.limit = torch.zeros(2, rows, dtype=torch.int64)
        self.stop_tokens = torch.full((rows, 1), -1, dtype=torch.int64)
        # Not zeroed, so that memory that no sequence reaches is never touched.
        self.drawn_tokens = torch.empty(rows, max_model_len, dtype=torch.int64)
        self.drawn_logprobs = torch.empty(2, rows, max_model_len, dtype=logprob_dtype)
        self._drawn_raw, self._drawn_sampling = self.drawn_logprobs
        self._recorder: RowRecorder | None = None
        self.sequences: dict[int, Sequence] = {}
        self.with_logits_processors: dict[int, Sequence] = {}
        self.with_top_logprobs: dict[int, Sequence] = {}
        self.with_stop_checker: dict[int, Sequence] = {}
        self.with_repetition: dict[int, Sequence] = {}
        self.streamed: dict[int, Sequence] = {}
        self.speculating: dict[int, Sequence] = {}
        self.with_adapter: dict[int, Sequence] = {}

    @property
    def is_mirrored(self) -> bool:
        """Whether steps read separate tensors, not those of the host."""
        return self.on_device is not self.host

    @property
    def needs_host(self) -> bool:
        """Whether a row's next token needs more than logits and sampling settings."""
        return bool(self.with_logits_processors or self.with_top_logprobs or self.with_adapter)

    def join(self, sequences: Series[Sequence], lengths: Series[int]) -> None:
        """Fills the rows of ``sequences``, which next draw a token or, after a swap-in, feed their last one. ``lengths[i]``: known tokens of
        sequence i."""
        index = torch.tensor([sequence.row for sequence in sequences])
        integers, numbers, stops, limits = [], [], [], []
        for sequence, length in zip(sequences, lengths, strict=True):
            request, params = sequence.request, sequence.request.params
            last = sequence.token_ids[-1] if sequence.token_ids else 0
            integers.append((last, length, sequence.random_key, params.top_k))
            numbers.append((params.temperature, params.top_p, params.min_p))
            limits.append((length, request.max_length))
            stops.append(request.stop_token_ids)
            self.sequences[sequence.row] = sequence
            if request.logits_processors is not None:
                self.with_logits_processors[sequence.row] = sequence
            if params.logprobs is not None:
                self.with_top_logprobs[sequence.row] = sequence
            if sequence.stop_checker is not None:
                self.with_stop_checker[sequence.row] = sequence
            if sequence.repetition is not None:
                self.with_repetition[sequence.row] = sequence
            if params.is_streamed:
                self.streamed[sequence.row] = sequence
            if request.draft_tokens:
                self.speculating[sequence.row] = sequence
            if request.adapter:
                self.with_adapter[sequence.row] = sequence
        self.host.fill(index, torch.tensor(integers).t(), torch.tensor(numbers, dtype=torch.float32).t())
        self.start[index], self.limit[index] = torch.tensor(limits).unbind(1)
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
        self.host.block_tables[index, :width] = padded_tables(tables, width)

    def update(self, changes: Series[BlockChange], joined: tuple[int, ...]) -> None:
        """Applies a step's changes to the block tables, and copies the rows that ``joined`` with it to the device."""
        self.host.change_blocks(changes)
        if self.is_mirrored:
            self.on_device.copy_rows(self.host, joined)
            self.on_device.change_blocks([change for change in changes if change.row not in joined])

    def append_on_device(self, selected: SelectedRows, tokens: Tensor) -> None:
        """Appends ``tokens[R]`` on the device, so that the next step can feed them before the host has recorded them."""
        if self.is_mirrored:
            self.on_device.append(selected.device_index, tokens)

    def width(self, index: Tensor) -> int:
        """Returns the number of block-table columns that the next step of the decoding rows ``index[R]``, which is on the CPU, needs."""
        if not len(index):
            return 1
        longest = int(self.host.length.index_select(0, index).max()) + self.is_mirrored
        return min((longest - 1) // BLOCK_TOKENS + 1, self.host.block_tables.shape[1])

    def select(self, rows: tuple[int, ...]) -> SelectedRows:
        """Gathers what a step needs of ``rows``."""
        index, device = torch.tensor(rows, dtype=torch.int64), self.on_device.device
        (_, _, random_key, top_k), (temperature, top_p, min_p) = self.host.gather(index)
        return SelectedRows(
            rows=rows,
            sequences=tuple(map(self.sequences.__getitem__, rows)),
            index=index,
            start=self.start.index_select(0, index),
            limit=self.limit.index_select(0, index),
            stop_tokens=self.stop_tokens.index_select(0, index),
            device_index=to_device(index, device),
            random_key=to_device(random_key, device),
            temperature=to_device(temperature, device),
            top_k=to_device(top_k, device),
            top_p=to_device(top_p, device),
            min_p=to_device(min_p, device),
            is_greedy=not bool(temperature.any()),
        )

    def narrow(self, selected: SelectedRows, places: Series[int]) -> SelectedRows:
        """Returns the selected rows at ``places`` of ``selected``."""
        return self.select(tuple(selected.rows[place] for place in places))

    def outputs_of(self, sequences: Series[Sequence]) -> list[Tensor]:
        """Returns the tokens [L] that each of ``sequences``, which have rows, has drawn: those that were read back and those in its row."""
        index = torch.tensor([sequence.row for sequence in sequences])
        counts = (self.host.length[index] - self.start[index]).tolist()
        drawn = self.drawn_tokens[:, : max(counts)].index_select(0, index).unbind(0)
        return [
            torch.cat((torch.tensor(sequence.token_ids), tokens[:count])) if sequence.token_ids else tokens[:count]
            for sequence, tokens, count in zip(sequences, drawn, counts, strict=True)
        ]

    def positions_to_process(self, selected: SelectedRows) -> list[Position]:
        """Returns the positions of the selected rows with logits processors."""
        if not self.with_logits_processors:
            return []
        processed = [(i, self.with_logits_processors[row]) for i, row in enumerate(selected.rows) if row in self.with_logits_processors]
        outputs = self.outputs_of([sequence for _, sequence in processed]) if processed else []
        return [
            Position(i, sequence.request.logits_processors, sequence.cursor, output)
            for (i, sequence), output in zip(processed, outputs, strict=True)
            if sequence.request.logits_processors is not None
        ]

    def note_top_logprobs(self, logits: Tensor, sampled: SampledRows, selected: SelectedRows) -> None:
        """Records the most likely tokens of the selected rows whose requests ask for them."""
        if not self.with_top_logprobs:
            return
        asking = [(i, self.with_top_logprobs[row]) for i, row in enumerate(selected.rows) if row in self.with_top_logprobs]
        if asking:
            index = torch.tensor([i for i, _ in asking], device=logits.device)
            counts = [sequence.request.params.logprobs or 0 for _, sequence in asking]
            rows = top_logprobs(logits[index], sampled.tokens[index], sampled.raw[index], counts)
            for (_, sequence), entries in zip(asking, rows, strict=True):
                sequence.top_logprobs.append(entries)

    def use_recorder(self, kernels: Kernels) -> None:
        """Records from now on with what ``kernels`` have for it."""
        rows = DrawnRows(self.host.length, self.host.last_token, self.start, self.limit, self.drawn_tokens, self._drawn_raw, self._drawn_sampling)
        self._recorder = row_recorder(kernels, rows)

    def record(self, selected: SelectedRows, sampled: SampledRows) -> list[int]:
        """Records one drawn token, on the CPU, for each selected row; returns the rows that have ended by length or stop token. Raises ``RunError``, and
        records nothing, where a log-probability is not finite."""
        if self._recorder is not None:
            recorded = self._recorder.record(selected.index, self.stop_tokens, sampled)
            if recorded is None:
                raise RunError(NOT_FINITE)
            return recorded
        check_finite(sampled)
        tokens, raw, sampling = sampled
        index = selected.index
        length = self.host.length.index_select(0, index)
        column = length - selected.start
        # ``put_`` at flat offsets takes a third of the time of indexing by two dimensions.
        place = index * self.drawn_tokens.shape[1] + column
        self.drawn_tokens.put_(place, tokens)
        self._drawn_raw.put_(place, raw)
        self._drawn_sampling.put_(place, sampling)
        self.host.last_token.put_(index, tokens)
        length += 1
        # The length is written last, so that an interrupted step leaves the rows unchanged.
        self.host.length.put_(index, length)
        ended = (length >= selected.limit) | (tokens.unsqueeze(1) == selected.stop_tokens).any(1)
        at_end: list[int] = index[ended].tolist() if ended.any() else []
        return at_end

    def record_spans(self, selected: SelectedRows, spans: Series[Series[int]], first: Series[int], sampled: SampledRows) -> None:
        """Records ``spans[i]``, the tokens that row i of ``selected`` has drawn in one step. ``sampled``: of all positions; those of row i begin at
        ``first[i]``."""
        index = selected.index
        length = self.host.length.index_select(0, index)
        counts = [len(span) for span in spans]
        source = torch.tensor([at + i for at, count in zip(first, counts, strict=True) for i in range(count)])
        begin = (index * self.drawn_tokens.shape[1] + length - selected.start).tolist()
        place = torch.tensor([at + i for at, count in zip(begin, counts, strict=True) for i in range(count)])
        self.drawn_tokens.put_(place, sampled.tokens.index_select(0, source))
        self._drawn_raw.put_(place, sampled.raw.index_select(0, source))
        self._drawn_sampling.put_(place, sampled.sampling.index_select(0, source))
        last, length = torch.tensor([span[-1] for span in spans]), length + torch.tensor(counts)
        self.host.last_token.put_(index, last)
        if self.is_mirrored:
            device = self.on_device.device
            self.on_device.set_ends(selected.device_index, to_device(last, device), to_device(length, device))
        # The length is written last, so that an interrupted step leaves the rows unchanged.
        self.host.length.put_(index, length)

    def shorten(self, row: int, count: int) -> None:
        """Removes the last ``count`` tokens of ``row``, which has ended before them."""
        self.host.length[row] -= count

    def read_back(self, sequences: Series[Sequence], version: WeightVersion) -> None:
        """Moves the tokens that the rows have drawn since they joined, all with the weights ``version``, to the sequences' lists. The rows have
        no sequence afterwards."""
        if not sequences:
            return
        index = torch.tensor([sequence.row for sequence in sequences])
        counts = (self.host.length[index] - self.start[index]).tolist()
        # The next sequence in this row may be interrupted before the row is filled; then it must read back no tokens.
        self.start[index] = self.host.length[index]
        width = max(counts)
        tokens = self.drawn_tokens[:, :width].index_select(0, index).tolist()
        raw, sampling = self.drawn_logprobs[:, :, :width].index_select(1, index).tolist()
        every = (
            self.with_logits_processors, self.with_top_logprobs, self.with_stop_checker, self.with_repetition, self.streamed, self.speculating,
            self.with_adapter,
        )
        specials = [special for special in every if special]
        for i, (sequence, count) in enumerate(zip(sequences, counts, strict=True)):
            sequence.token_ids += tokens[i][:count]
            sequence.raw_logprobs += raw[i][:count]
            sequence.sampling_logprobs += sampling[i][:count]
            sequence.weight_versions += [version] * count
            del sequence.top_logprobs[len(sequence.token_ids) :]
            self.sequences.pop(sequence.row, None)
            for special in specials:
                special.pop(sequence.row, None)

    def drawn_since(
        self, sequences: Series[Sequence], first: Series[int]
    ) -> list[tuple[list[int], list[float], list[float]]]:
        """Returns the tokens, raw and sampling log-probabilities of ``sequences``, which have rows, from completion token ``first[i]`` on,
        without reading them back."""
        index, place, counts = self._unread(sequences, first)
        tokens = self.drawn_tokens[index, place].tolist()
        raw, sampling = self.drawn_logprobs[:, index, place].tolist()
        return [
            (
                sequence.token_ids[at:] + tokens[i][: counts[i]],
                sequence.raw_logprobs[at:] + raw[i][: counts[i]],
                sequence.sampling_logprobs[at:] + sampling[i][: counts[i]],
            )
            for i, (sequence, at) in enumerate(zip(sequences, first, strict=True))
        ]

    def tokens_since(self, sequences: Series[Sequence], first: Series[int]) -> list[list[int]]:
        """Returns the tokens of ``drawn_since``."""
        if not sequences:
            return []
        index, place, counts = self._unread(sequences, first)
        tokens = self.drawn_tokens[index, place].tolist()
        return [sequence.token_ids[at:] + tokens[i][: counts[i]] for i, (sequence, at) in enumerate(zip(sequences, first, strict=True))]

    def _unread(self, sequences: Series[Sequence], first: Series[int]) -> tuple[Tensor, Tensor, list[int]]:
        """Returns where the tokens of ``sequences`` from completion token ``first[i]`` on are in ``drawn_tokens``: rows [R, 1] and columns [R, W], of which
        the first ``counts[i]`` are valid."""
        index = torch.tensor([sequence.row for sequence in sequences])
        columns = [max(0, at - len(sequence.token_ids)) for sequence, at in zip(sequences, first, strict=True)]
        starts = torch.tensor(columns)
        counts: list[int] = (self.host.length[index] - self.start[index] - starts).tolist()
        place = (starts.unsqueeze(1) + torch.arange(max(counts))).clamp_(max=self.drawn_tokens.shape[1] - 1)
        return index.unsqueeze(1), place, counts


def check_finite(sampled: SampledRows) -> None:
    """Raises ``RunError`` where a log-probability is not finite."""
    if not math.isfinite(float(sampled.raw.sum())):
        raise RunError(NOT_FINITE)

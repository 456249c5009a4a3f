"""Steps that are launched before the one before has been looked at, so that planning overlaps the device's work.

What a plan needs of a step under way it knows without its tokens: that each row is one token longer. A row that turns out to have ended is
computed once more, for nothing, in the block that it holds until then; what comes of it is void. Work of one device runs in the order in which
it was launched, so whoever gets that block next writes after it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.engine.core.request import Sequence
from tandem.engine.core.scheduler import Chunk, Decision
from tandem.engine.executor.cuda_graphs import Bucket, DecodeGraphs, Replay
from tandem.engine.executor.device_rows import DeviceRows, to_device
from tandem.engine.executor.flat_batch import chunk_batch
from tandem.engine.executor.input_batch import Selection
from tandem.engine.executor.model_runner import Runner, StopCheck
from tandem.engine.kv_cache.block_copies import Moves, apply_moves
from tandem.engine.settings import EngineSettings
from tandem.kernels.api import BLOCK_TOKENS, PagedBatch, SampledRows
from tandem.model.attention import PagedContext
from tandem.types import UserError


@dataclass(slots=True)
class Flight:
    """A step that was launched. ``sequences``: whose the rows of ``selection`` were then; ``drawn``: what it drew, in host memory once ``landed``
    has happened."""

    decision: Decision
    selection: Selection | None = None
    sequences: tuple[Sequence, ...] = ()
    drawn: SampledRows | None = None
    landed: torch.cuda.Event | None = None


class Overlap:
    """Launches steps of ``runner`` and collects them. The tokens that a step feeds never leave the device in between.

    ``graphs``, where given, replays steps in which everybody decodes."""

    def __init__(self, runner: Runner, rows: DeviceRows, graphs: DecodeGraphs | None = None) -> None:
        self.runner = runner
        self.rows = rows
        self.graphs = graphs
        self._is_current = False
        self._index: tuple[Selection | None, Tensor] = (None, torch.empty(0, dtype=torch.int64))

    def forget(self) -> None:
        """The rows have changed on the host: take them over before the next step."""
        self._is_current = False

    @torch.inference_mode()
    def launch(self, decision: Decision, decoding: Mapping[int, Sequence]) -> Flight:
        """Start one step; ``decoding``: whose the rows are."""
        runner, rows = self.runner, self.rows
        apply_moves(runner.caches, runner.host, Moves(decision.swap_outs, decision.swap_ins, decision.copies))
        if decision.changes:
            runner.table.change_blocks(decision.changes)
        joined = tuple(row for chunk in decision.prefill for row in chunk.rows)
        fresh = joined + decision.resumed + (() if self._is_current else decision.decode)
        rows.upload(runner.table, fresh)
        rows.change_blocks([change for change in decision.changes if change.row not in fresh])
        self._is_current = True
        if not (decision.decode or decision.prefill):
            return Flight(decision)
        selection = runner.select(decision.decode, joined)
        index = self._index_of(selection)
        width = self._width(decision)
        if decision.prefill:
            logits = self._mixed(decision.prefill, index[: len(decision.decode)], width)
            drawn = None if logits is None else rows.draw(runner.decoder.kernels, index, logits)
        elif self.graphs is not None:
            drawn = self.graphs.run(index, width)
        else:
            drawn = self.decode(index, width)
        if drawn is None:
            return Flight(decision)
        landing, landed = _to_host(drawn)
        return Flight(decision, selection, tuple(decoding[row] for row in selection.rows), landing, landed)

    def collect(self, flight: Flight, ended: list[int], stopped: StopCheck) -> None:
        """Wait for ``flight`` and take down what it drew; rows that end are added to ``ended``."""
        if flight.drawn is None or flight.selection is None:
            return
        if flight.landed is not None:
            flight.landed.synchronize()
        drawn, selection = flight.drawn, flight.selection
        held = [place for place, (row, sequence) in enumerate(zip(selection.rows, flight.sequences, strict=True)) if sequence.row == row]
        if len(held) < len(selection.rows):
            if not held:
                return
            selection = self.runner.table.narrow(selection, held)
            places = torch.tensor(held)
            drawn = SampledRows(*(values.index_select(0, places) for values in drawn))
        self.runner.take_down(selection, drawn, ended, stopped)

    def decode(self, index: Tensor, width: int) -> SampledRows:
        """A step in which each of the rows ``index[R]`` feeds one token. Asks the host nothing: this is what a graph holds."""
        decoder, rows = self.runner.decoder, self.rows
        tokens, positions, batch = rows.next_tokens(index, width)
        hidden = decoder(tokens, positions, PagedContext(batch, self.runner.caches))
        return rows.draw(decoder.kernels, index, decoder.logits(hidden))

    def _mixed(self, chunks: tuple[Chunk, ...], index: Tensor, width: int) -> Tensor | None:
        """The logits of the rows ``index``, which feed a token each, and of those that ``chunks`` end with; ``None`` where there are neither."""
        runner, device = self.runner, index.device
        added = chunk_batch(runner.table, chunks)
        tokens, positions, fed = self.rows.next_tokens(index, max(width, added.paged.block_tables.shape[1]))
        count, own = len(index), added.paged
        tables = torch.nn.functional.pad(own.block_tables, (0, fed.block_tables.shape[1] - own.block_tables.shape[1]))
        batch = PagedBatch(
            torch.cat((fed.query_start, to_device(own.query_start[1:] + count, device))),
            torch.cat((fed.context_lens, to_device(own.context_lens, device))),
            torch.cat((fed.block_tables, to_device(tables, device))),
            torch.cat((fed.slots, to_device(own.slots, device))),
        )
        assert added.logit_rows is not None
        # A group draws from one row; which rows are distinct is known here, so that the device need not be asked.
        distinct, inverse = torch.unique(torch.cat((torch.arange(count), added.logit_rows + count)), return_inverse=True)
        hidden = runner.decoder(
            torch.cat((tokens, to_device(added.tokens, device))), torch.cat((positions, to_device(added.positions, device))),
            PagedContext(batch, runner.caches, to_device(distinct, device)),
        )  # fmt: skip
        if not len(distinct):
            return None
        logits = runner.decoder.logits(hidden)
        return logits if len(distinct) == len(inverse) else logits.index_select(0, to_device(inverse, device))

    def _index_of(self, selection: Selection) -> Tensor:
        if self._index[0] is not selection:
            self._index = selection, to_device(selection.index, self.rows.length.device)
        return self._index[1]

    def _width(self, decision: Decision) -> int:
        """Columns of block tables that cover every row that decodes; the host may know one token less of a row than it has."""
        if not decision.decode:
            return 1
        longest = int(self.runner.table.length[list(decision.decode)].max()) + 1
        return min((longest - 1) // BLOCK_TOKENS + 1, self.rows.block_tables.shape[1])


def overlaps_steps(settings: EngineSettings, device: torch.device, has_ranks: bool, has_speculation: bool) -> bool:
    """Whether an engine launches steps ahead. Raises ``UserError`` where that is asked for and cannot be."""
    why = "speculation needs each token before the next step" if has_speculation else "other ranks follow each step" if has_ranks else ""
    if settings.async_scheduling and why:
        raise UserError(f"engine async_scheduling is on and {why}; leave it out")
    return device.type == "cuda" and not why if settings.async_scheduling is None else settings.async_scheduling


def make_overlap(runner: Runner, settings: EngineSettings) -> Overlap:
    """For an engine whose caches have a block more than ``settings.num_blocks``."""
    rows = DeviceRows(runner.table, runner.device, scratch=settings.num_blocks)
    overlap = Overlap(runner, rows)
    if runner.device.type == "cuda" and not settings.enforce_eager:
        overlap.graphs = decode_graphs(overlap, settings)
    return overlap


def decode_graphs(overlap: Overlap, settings: EngineSettings, capture: Callable[[Replay], Replay] | None = None) -> DecodeGraphs:
    """Graphs of the decoding steps of ``overlap``. ``capture``: as ``DecodeGraphs`` has it."""
    runner, rows = overlap.runner, overlap.rows
    most = Bucket(settings.max_num_seqs, rows.block_tables.shape[1])
    return DecodeGraphs(overlap.decode, rows.padding, most, runner.device, lambda: (*runner.decoder.packed, runner.caches), capture)


def _to_host(drawn: SampledRows) -> tuple[SampledRows, torch.cuda.Event | None]:
    """``drawn`` on its way to host memory, and when it is there."""
    if not drawn.tokens.is_cuda:
        return drawn, None
    landing = SampledRows(*(torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True) for x in drawn))
    landed = torch.cuda.Event()
    landed.record()
    return landing, landed

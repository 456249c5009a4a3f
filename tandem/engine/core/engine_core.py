"""One step of the engine: planned, computed, and what came of it passed on."""

import time
from collections.abc import Sequence as Series

from tandem.engine.core import batches, decode, preemption, prefill
from tandem.engine.core.lifecycle import Transition
from tandem.engine.core.parts import Parts
from tandem.engine.core.scheduler import Decision, schedule
from tandem.engine.executor.model_runner import Guessed
from tandem.engine.executor.overlap import Flight
from tandem.engine.metrics.stats_logger import Meter
from tandem.engine.processing.answers import Answer, is_hidden_stop
from tandem.engine.processing.output_processor import OutputProcessor
from tandem.engine.spec_decode import draft_plan


class StepExecutor:
    """Executes the scheduler's decisions. ``flight``: the step that was launched ahead and not looked at yet. ``num_tokens``: computed by the
    last step."""

    def __init__(self, parts: Parts, outputs: OutputProcessor, meter: Meter) -> None:
        self.flight: Flight | None = None
        self.num_tokens = 0
        self._state, self._runner, self._overlap = parts
        self._table = parts.runner.table
        self._outputs = outputs
        self._meter = meter

    def run(self) -> None:
        """One step. Where it raises, what it ended has ended, and the rest is computed again."""
        began = time.perf_counter()
        is_ahead = self._overlap is not None and not self._outputs.attended
        if not is_ahead or preemption.may_preempt(self._state):
            self.land()
        decision = schedule(self._state)
        self.num_tokens = len(decision.decode) + sum(len(chunk.tokens) for chunk in decision.prefill)
        self._outputs.note_scheduled(decision.prefill)
        if is_ahead:
            self._launch(decision, began)
        elif decision.has_work:
            self._compute(decision, began)

    def _compute(self, decision: Decision, began: float) -> None:
        """From a plan to its tokens."""
        if self._overlap is not None:
            self._overlap.forget()
        ended: list[int] = []
        try:
            self._fill_rows(decision)
            guessed = self._runner.run(decision, ended, self._stopped_by_text)
        except BaseException:
            self._fail(ended)
            raise
        for row, proposed, accepted in guessed:
            draft_plan.advance(self._state, row, proposed, accepted)
            self.num_tokens += proposed
        self._finish(decision, guessed, ended, began)

    def _launch(self, decision: Decision, began: float) -> None:
        """Start one step, and only then look at the one before."""
        assert self._overlap is not None
        launched: Flight | None = None
        if decision.has_work:
            try:
                self._fill_rows(decision)
                launched = self._overlap.launch(decision, self._state.decoding)
            except BaseException:
                self._fail([])
                raise
        before, self.flight = self.flight, launched
        if before is not None:
            self._collect(before, began)
        if not self._outputs.answers:
            self.land()

    def land(self) -> None:
        """Wait for the step that was launched last: nothing is under way on the device afterwards."""
        flight, self.flight = self.flight, None
        if flight is not None:
            self._collect(flight, time.perf_counter())

    def _collect(self, flight: Flight, began: float) -> None:
        assert self._overlap is not None
        ended: list[int] = []
        try:
            self._overlap.collect(flight, ended, self._stopped_by_text)
        except BaseException:
            self._fail(ended)
            raise
        self._finish(flight.decision, [], ended, began)

    def _finish(self, decision: Decision, guessed: list[Guessed], ended: list[int], began: float) -> None:
        self._meter.stepped(self._state, decision, guessed, time.perf_counter() - began)
        self._outputs.note_first_tokens(decision.prefill)
        self._end(ended)
        self._outputs.note_running()

    def _fail(self, ended: list[int]) -> None:
        self.flight = None
        if self._overlap is not None:
            self._overlap.forget()
        self._end(ended)
        # What the step wrote of keys and values is unknown.
        preemption.preempt_all(self._state, Transition.FAIL)
        self._state.allocator.forget_all()

    def _fill_rows(self, decision: Decision) -> None:
        """Fill the table's rows for sequences whose last chunk stands in this step or that are swapped in."""
        joined = [row for chunk in decision.prefill for row in chunk.rows]
        joined += decision.resumed
        if joined:
            sequences = [self._state.decoding[row] for row in joined]
            self._table.join(sequences, [len(sequence.known_tokens) for sequence in sequences])

    def _stopped_by_text(self, rows: Series[int]) -> list[int]:
        """Those of ``rows``, each of which has just drawn a token, whose stop text is complete with it."""
        drew = set(rows) if self._table.with_text_watch else set()
        watched = [(row, sequence) for row, sequence in self._table.with_text_watch.items() if row in drew]
        if not watched:
            return []
        tokens = self._table.last_token[[row for row, _ in watched]].tolist()
        return [
            row
            for (row, sequence), token in zip(watched, tokens, strict=True)
            if not is_hidden_stop(sequence.request, token) and sequence.text_watch is not None and sequence.text_watch.push(token)
        ]

    def _end(self, rows: list[int]) -> None:
        if not rows:
            return
        ended = [self._state.decoding[row] for row in dict.fromkeys(rows)]
        self._state.read_back(ended)
        decode.leave(self._state, ended, has_ended=True)
        for sequence in ended:
            self._outputs.end(sequence)
        batches.settle(self._state)

    def abort(self, answer: Answer) -> None:
        """End what is open of a request, wherever it stands, while no step is under way."""
        state = self._state
        running = [sequence for sequence in answer.open if sequence.row >= 0]
        state.read_back(running)
        decode.leave(state, running, has_ended=True)
        preemption.drop_swapped(state, lambda waiting: waiting.sequences[0] in answer.open)
        if state.prefilling is not None and state.prefilling.sequences[0] in answer.open:
            prefill.give_up(state, state.prefilling)
        for sequence in list(answer.open):
            self._outputs.abort(sequence)
        batches.settle(state)

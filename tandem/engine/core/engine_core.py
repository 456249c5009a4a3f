"""The inner loop of the engine: schedules a step, executes it, and passes its results on."""

import time
from collections.abc import Sequence as Series

from torch import Tensor

from tandem.engine.core.components import EngineComponents, allocate_kv_cache
from tandem.engine.core.integrity import check_scheduler
from tandem.engine.core.lifecycle import Transition
from tandem.engine.core.request import Sequence
from tandem.engine.core.scheduler_output import SchedulerOutput
from tandem.engine.executor.in_flight_step import DraftOutput, InFlightStep
from tandem.engine.metrics.stats_logger import StatsLogger
from tandem.engine.processing.output_processor import OutputProcessor
from tandem.engine.processing.request_state import RequestState, is_hidden_stop
from tandem.engine.settings import EngineSettings
from tandem.engine.spec_decode.draft_model import DraftModel
from tandem.engine.spec_decode.state_proposer import StateProposer


class EngineCore:
    """Runs the steps of the scheduler on the model runner. ``in_flight``: the step that was launched ahead and is not synchronized yet.
    ``num_tokens``: tokens computed by the last step."""

    def __init__(self, components: EngineComponents, settings: EngineSettings, outputs: OutputProcessor, logger: StatsLogger) -> None:
        self.in_flight: InFlightStep | None = None
        self.num_tokens = 0
        self._scheduler, self._runner, self._launches_ahead, self._cost_meter = components
        self._batch = components.runner.batch
        self._settings = settings
        self._outputs = outputs
        self._logger = logger

    def step(self) -> None:
        """Computes one step. If it raises, the sequences that it ended are completed, and the others are preempted and recomputed."""
        began, switch = time.perf_counter(), self._scheduler.draft_switch
        if switch is not None:
            switch.begin()
        is_ahead = self._launches_ahead and not self._outputs.synchronous
        if not is_ahead or self._scheduler.may_preempt():
            self.synchronize()
        output = self._scheduler.schedule()
        self.num_tokens = output.total_num_scheduled_tokens
        self._outputs.record_scheduled(output.prefills)
        before, self.in_flight = self.in_flight, self._launch(output) if output.has_work else None
        if before is not None:
            self._collect(before, began)
        if not is_ahead or not self._outputs.request_states:
            self.synchronize(began)

    def synchronize(self, began: float | None = None) -> None:
        """Waits for the in-flight step, after which the device is idle. ``began``: when that step began, by ``time.perf_counter``."""
        step, self.in_flight = self.in_flight, None
        if step is not None:
            self._collect(step, time.perf_counter() if began is None else began)

    def check_integrity(self) -> None:
        """Raises ``AssertionError`` unless blocks, rows, tables, swap space and states are consistent."""
        self.synchronize()
        check_scheduler(self._scheduler)

    def _launch(self, output: SchedulerOutput) -> InFlightStep:
        try:
            joined = [self._scheduler.running.by_row[row] for row in output.joined_rows + output.resumed_rows]
            if joined:
                self._batch.join(joined, [sequence.num_known_tokens for sequence in joined])
            return self._runner.execute_model(output)
        except BaseException:
            self._fail([])
            raise

    def _collect(self, step: InFlightStep, began: float) -> None:
        ended: list[int] = []
        try:
            drafts = self._runner.synchronize(step, ended, self._stopped)
        except BaseException:
            self._fail(ended)
            raise
        self._finish(step.output, drafts, ended, time.perf_counter() - began)

    def _finish(self, output: SchedulerOutput, drafts: list[DraftOutput], ended: list[int], seconds: float) -> None:
        steps = self._scheduler.steps_saved(output.decode_rows, {draft.row: draft.num_accepted for draft in drafts}) if drafts else None
        for row, num_proposed, num_accepted in drafts:
            self._scheduler.accept_drafts(row, num_proposed, num_accepted)
            self.num_tokens += num_proposed
        self._logger.record_step(self._scheduler, output, drafts, seconds)
        num_decoded, num_tokens = len(output.decode_rows), output.total_num_scheduled_tokens
        if self._scheduler.step_costs is not None and num_decoded:
            self._scheduler.step_costs.observe(num_decoded + sum(draft.num_proposed for draft in drafts), seconds, num_tokens == num_decoded)
        if self._scheduler.draft_switch is not None and 0 < num_decoded == num_tokens:
            proposed, accepted = sum(draft.num_proposed for draft in drafts), sum(draft.num_accepted for draft in drafts)
            self._scheduler.draft_switch.observe(num_decoded, proposed, accepted, self._scheduler.draft_switch.elapsed_s, steps)
        if self._scheduler.prefill_budget is not None:
            self._scheduler.prefill_budget.observe(num_decoded, num_tokens - num_decoded, seconds)
        if num_tokens > 2 * num_decoded:
            self._cost_meter.observe_prefill(num_tokens, seconds)
        self._outputs.record_first_tokens(output.prefills)
        self._end([*ended, *output.pooled_rows])
        self._outputs.collect_running()

    def _fail(self, ended: list[int]) -> None:
        self.in_flight = None
        self._end(ended)
        # The content of the blocks that the step wrote to is undefined.
        self._scheduler.preemption.preempt_all(Transition.FAIL)
        self._scheduler.kv_cache.reset_prefix_cache()

    def _stopped(self, rows: Series[int], tokens: Tensor) -> list[int]:
        """Returns those of ``rows``, each of which has just drawn its token of ``tokens[R]``, whose stop text the token completes or that repeat
        themselves."""
        watched = self._batch.with_stop_checker | self._batch.with_repetition
        checked = [(place, watched[row]) for place, row in enumerate(rows) if row in watched] if watched else []
        if not checked:
            return []
        drawn = tokens.tolist()
        return [rows[place] for place, sequence in checked if _ends_with(sequence, drawn[place])]

    def _end(self, rows: list[int]) -> None:
        if rows:
            ended = [self._scheduler.running.by_row[row] for row in dict.fromkeys(rows)]
            self._scheduler.finish(ended)
            for sequence in ended:
                self._outputs.finish(sequence)

    def abort(self, state: RequestState) -> None:
        """Aborts the unfinished sequences of a request, in any state, while no step is in flight."""
        self._scheduler.abort(state.unfinished)
        for sequence in list(state.unfinished):
            self._outputs.abort(sequence)

    # -- sleeping ------------------------------------------------------------------------------------------------------

    @property
    def is_sleeping(self) -> bool:
        """Whether the memory of the KV cache is freed."""
        return not self._runner.caches

    @property
    def kv_cache_bytes(self) -> int:
        """The bytes of this rank's KV cache."""
        return sum(tensor.nbytes for layer in self._runner.caches for tensor in layer if tensor is not None)

    def sleep(self, frees_weights: bool = False) -> None:
        """Frees the memory of the KV cache, and of the packed weights if it ``frees_weights``. Running requests are preempted and recomputed after
        ``wake_up``."""
        self.synchronize()
        runner = self._runner
        self._scheduler.preemption.preempt_all(Transition.UPDATE)
        self._scheduler.kv_cache.reset_prefix_cache()
        runner.caches = []
        if runner.graphs is not None:
            runner.graphs.clear()
        if isinstance(runner.proposer, DraftModel | StateProposer):
            runner.proposer.caches = []
        if frees_weights:
            # What is allocated here is filled by the next update, and takes no memory before.
            runner.decoder.unpack(in_one_layer=True)

    def wake_up(self) -> None:
        """Allocates the memory of the KV cache again, if it was freed."""
        if not self.is_sleeping:
            return
        runner = self._runner
        runner.caches = allocate_kv_cache(runner.decoder, self._settings, self._launches_ahead)
        if isinstance(runner.proposer, DraftModel | StateProposer):
            runner.proposer.allocate(self._settings.num_blocks)


def _ends_with(sequence: Sequence, token: int) -> bool:
    """Returns whether ``token``, which ``sequence`` has just drawn, completes a stop text or a repetition."""
    if is_hidden_stop(sequence.request, token):
        return False
    has_stop = sequence.stop_checker is not None and sequence.stop_checker.push(token) is not None
    repeats = sequence.repetition is not None and sequence.repetition.push(token)
    return has_stop or repeats

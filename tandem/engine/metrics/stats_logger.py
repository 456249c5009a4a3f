"""The stats logger: collects the statistics of an engine step by step."""

from collections import Counter, deque
from collections.abc import Iterable

from tandem.engine.core.lifecycle import ENDS, State, Transition
from tandem.engine.core.request import Sequence
from tandem.engine.core.scheduler import Scheduler
from tandem.engine.core.scheduler_output import SchedulerOutput
from tandem.engine.metrics.stats import CumulativeStats, EngineStats, SpecDecodeStats
from tandem.kernels.api import BLOCK_TOKENS

_SAMPLE_EVERY = 4
"""Steps between two samples of the cache, whose cost grows with the number of sequences."""
_REMEMBERED = 4096


class StatsLogger:
    """Collects ``CumulativeStats``."""

    def __init__(self) -> None:
        self._steps = self._computed = self._drawn = self._padding = self._slots = self._unused = 0
        self._proposals = self._proposed = self._accepted = 0
        self._busy_s = 0.0
        self._first_token_s: deque[float] = deque(maxlen=_REMEMBERED)
        self._prompts: list[int] = []

    def record_first_token(self, seconds: float) -> None:
        """Records that a request has drawn its first token, ``seconds`` after its arrival."""
        self._first_token_s.append(seconds)

    def record_step(self, scheduler: Scheduler, output: SchedulerOutput, drafts: Iterable[tuple[int, int, int]], seconds: float) -> None:
        """Records a step of ``seconds`` before the sequences that ended in it leave; ``drafts``: (row, proposed, accepted)."""
        self._steps += 1
        self._busy_s += seconds
        self._computed += output.total_num_scheduled_tokens
        self._drawn += len(output.decode_rows)
        for chunk in output.prefills:
            self._drawn += len(chunk.rows)
        for _, proposed, accepted in drafts:
            self._proposals += 1
            self._proposed += proposed
            self._accepted += accepted
            self._computed += proposed
            self._drawn += accepted
        if scheduler.batching.kind == "static":
            self._note_padding(scheduler, output)
        if self._steps % _SAMPLE_EVERY == 0:
            self._sample_cache(scheduler)

    @property
    def speculation(self) -> SpecDecodeStats:
        return SpecDecodeStats(self._proposals, self._proposed, self._accepted)

    def cumulative_stats(self) -> CumulativeStats:
        return CumulativeStats(
            steps=self._steps,
            computed_tokens=self._computed,
            drawn_tokens=self._drawn,
            busy_s=self._busy_s,
            padding_tokens=self._padding,
            kv_slots=self._slots,
            kv_unused=self._unused,
            first_token_s=tuple(self._first_token_s),
            speculation=self.speculation,
        )

    def _note_padding(self, scheduler: Scheduler, output: SchedulerOutput) -> None:
        self._padding += len(scheduler.batching.held)
        if not output.decode_rows and self._prompts and output.prefills:
            self._prompts.clear()
        before = max(self._prompts, default=0)
        new = [chunk.start + len(chunk.tokens) for chunk in output.prefills if chunk.rows]
        longest = max([before, *new])
        # Earlier prompts are padded to a new longest one, the new ones to it from their own lengths.
        self._padding += len(self._prompts) * (longest - before) + sum(longest - length for length in new)
        self._prompts += new

    def _sample_cache(self, scheduler: Scheduler) -> None:
        pool, running = scheduler.kv_cache.block_pool, scheduler.running
        unused = sum([len(s.blocks) * BLOCK_TOKENS - s.offset for s in running.by_row.values()]) - len(running) * (scheduler.step + 1)
        unused += sum(len(table) * BLOCK_TOKENS for _, table in scheduler.batching.held)
        if running.prefilling is not None:
            unused += len(running.prefilling.blocks) * BLOCK_TOKENS - running.prefilling.num_computed_tokens
        self._slots += (pool.num_blocks - pool.num_free_blocks) * BLOCK_TOKENS
        self._unused += unused


def engine_stats(scheduler: Scheduler, num_unfinished: int, num_requests: int, step_tokens: int, speculation: SpecDecodeStats) -> EngineStats:
    """Returns the statistics of an engine in which ``num_unfinished`` sequences of ``num_requests`` requests are not finished."""
    prefilling = scheduler.running.prefilling
    running = len(scheduler.running) + (len(prefilling.sequences) if prefilling is not None else 0)
    return EngineStats(
        num_requests_running=running,
        num_requests_waiting=num_unfinished - running,
        kv_cache_usage=scheduler.kv_cache.block_pool.usage,
        num_preemptions=scheduler.counts[Transition.SWAP_OUT] + scheduler.counts[Transition.RECOMPUTE],
        step_tokens=step_tokens,
        num_requests=num_requests,
        num_swaps=scheduler.counts[Transition.SWAP_OUT],
        num_drafts=speculation.proposals,
        num_draft_tokens=speculation.proposed,
        num_accepted_tokens=speculation.accepted,
    )


def counts_of(scheduler: Scheduler, unfinished_sequences: Iterable[Sequence]) -> dict[State, int]:
    """Returns the number of sequences in each state; ``completed`` counts all since the start."""
    counts = Counter(sequence.state for sequence in unfinished_sequences)
    counts[State.COMPLETED] = sum(scheduler.counts[transition] for transition in ENDS.values())
    return {state: counts[state] for state in State}

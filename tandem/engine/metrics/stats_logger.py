"""What an engine has done, how well its memory was used, and what it does now."""

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from tandem.engine.core.lifecycle import ENDS, State, Transition
from tandem.engine.core.request import Sequence
from tandem.engine.core.scheduler import Decision
from tandem.engine.core.state import SchedulerState
from tandem.engine.metrics.stats import EngineStats
from tandem.engine.spec_decode.speculative import SpeculationFigures
from tandem.kernels.api import BLOCK_TOKENS

_SAMPLE_EVERY = 4
"""Steps between two looks at the cache: a look costs as much as there are sequences."""
_REMEMBERED = 4096


@dataclass(frozen=True, slots=True)
class EngineFigures:
    """Since the engine started. ``computed_tokens`` went through the model, ``drawn_tokens`` were drawn from it. ``busy_s``: wall time
    of all steps. ``padding_tokens``: those that a static batch spends on prompts shorter than its longest and on rows that ended
    before it; they are counted, not computed. ``kv_slots``: token slots of the cache that were given to sequences, summed over samples,
    and ``kv_unused`` those of them that hold nothing. ``first_token_s``: from a request's arrival to its first token, the latest
    4,096."""

    steps: int = 0
    computed_tokens: int = 0
    drawn_tokens: int = 0
    busy_s: float = 0.0
    padding_tokens: int = 0
    kv_slots: int = 0
    kv_unused: int = 0
    first_token_s: tuple[float, ...] = ()
    speculation: SpeculationFigures = field(default_factory=SpeculationFigures)

    @property
    def padding(self) -> float:
        """The share of padding in all tokens that a padded batch computes."""
        return self.padding_tokens / max(1, self.padding_tokens + self.computed_tokens)

    @property
    def kv_waste(self) -> float:
        """The share of the given slots that hold nothing."""
        return self.kv_unused / self.kv_slots if self.kv_slots else 0.0


class Meter:
    """Counts what goes into ``EngineFigures``."""

    def __init__(self) -> None:
        self._steps = self._computed = self._drawn = self._padding = self._slots = self._unused = 0
        self._proposals = self._proposed = self._accepted = 0
        self._busy_s = 0.0
        self._first_token_s: deque[float] = deque(maxlen=_REMEMBERED)
        self._prompts: list[int] = []

    def first_token(self, seconds: float) -> None:
        """A request has drawn its first token, so long after its arrival."""
        self._first_token_s.append(seconds)

    def stepped(self, state: SchedulerState, decision: Decision, guessed: Iterable[tuple[int, int, int]], seconds: float) -> None:
        """Take in a step of ``seconds`` before those that ended in it leave; ``guessed``: (row, proposed, accepted)."""
        self._steps += 1
        self._busy_s += seconds
        joined = 0
        for chunk in decision.prefill:
            self._computed += len(chunk.tokens)
            joined += len(chunk.rows)
        self._computed += len(decision.decode)
        self._drawn += len(decision.decode) + joined
        for _, proposed, accepted in guessed:
            self._proposals += 1
            self._proposed += proposed
            self._accepted += accepted
            self._computed += proposed
            self._drawn += accepted
        if state.limits.joins == "static":
            self._note_padding(state, decision)
        if self._steps % _SAMPLE_EVERY == 0:
            self._sample_cache(state)

    @property
    def speculation(self) -> SpeculationFigures:
        return SpeculationFigures(self._proposals, self._proposed, self._accepted)

    def figures(self) -> EngineFigures:
        return EngineFigures(
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

    def _note_padding(self, state: SchedulerState, decision: Decision) -> None:
        self._padding += len(state.ended)
        if not decision.decode and self._prompts and decision.prefill:
            self._prompts.clear()
        before = max(self._prompts, default=0)
        new = [chunk.start + len(chunk.tokens) for chunk in decision.prefill if chunk.rows]
        longest = max([before, *new])
        # Those of before are padded up to a new longest one, the new ones to it from their own lengths.
        self._padding += len(self._prompts) * (longest - before) + sum(longest - length for length in new)
        self._prompts += new

    def _sample_cache(self, state: SchedulerState) -> None:
        held = state.allocator.count - state.allocator.free_count
        unused = sum(len(s.blocks) * BLOCK_TOKENS - (s.offset + state.step + 1) for s in state.decoding.values())
        unused += sum(len(table) * BLOCK_TOKENS for _, table in state.ended)
        if state.prefilling is not None:
            unused += len(state.prefilling.blocks) * BLOCK_TOKENS - state.prefilling.computed
        self._slots += held * BLOCK_TOKENS
        self._unused += unused


def stats_of(state: SchedulerState, num_open: int, num_requests: int, step_tokens: int, guesses: SpeculationFigures) -> EngineStats:
    """The numbers of an engine with ``state``, in which ``num_open`` sequences of ``num_requests`` requests are not answered."""
    prefilling = len(state.prefilling.sequences) if state.prefilling is not None else 0
    running = len(state.decoding) + prefilling
    return EngineStats(
        num_requests_running=running,
        num_requests_waiting=num_open - running,
        kv_cache_usage=1 - state.allocator.free_count / state.allocator.count,
        num_preemptions=state.counts[Transition.SWAP_OUT] + state.counts[Transition.RECOMPUTE],
        step_tokens=step_tokens,
        num_requests=num_requests,
        num_swaps=state.counts[Transition.SWAP_OUT],
        num_drafts=guesses.proposals,
        num_draft_tokens=guesses.proposed,
        num_accepted_tokens=guesses.accepted,
    )


def counts_of(state: SchedulerState, open_sequences: Iterable[Sequence]) -> dict[State, int]:
    """How many sequences are in each state; all that were ever ``completed`` count."""
    found = Counter(sequence.state for sequence in open_sequences)
    found[State.COMPLETED] = sum(state.counts[transition] for transition in ENDS.values())
    return {state: found[state] for state in State}

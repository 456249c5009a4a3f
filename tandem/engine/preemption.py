"""Preemption by recompute: a sequence gives up its row and its blocks and waits to be prefilled again."""

from tandem.engine import decode, prefill
from tandem.engine.request import Prefill, Sequence
from tandem.engine.state import SchedulerState


def preempt_last(state: SchedulerState) -> list[tuple[str, int]]:
    """Preempt whatever goes last in order among all that hold blocks; returns the (request id, index) of its
    sequences."""
    last = max(state.decoding.values(), key=lambda sequence: sequence.order, default=None)
    waiting = state.prefilling
    if waiting is not None and (last is None or waiting.order > last.order):
        return _preempt_prefill(state, waiting)
    assert last is not None, "no blocks are left and nobody holds any"
    return _preempt_decoding(state, [last], keep_cache=True)


def preempt_all(state: SchedulerState) -> list[tuple[str, int]]:
    """Preempt everything that holds blocks, under weights that no key may speak of again."""
    names = _preempt_decoding(state, list(state.decoding.values()), keep_cache=False)
    return names + (_preempt_prefill(state, state.prefilling) if state.prefilling is not None else [])


def _preempt_decoding(state: SchedulerState, sequences: list[Sequence], keep_cache: bool) -> list[tuple[str, int]]:
    state.read_back(sequences)
    decode.leave(state, sequences, keep_cache)
    for sequence in sequences:
        prefill.queue(state, Prefill([sequence], sequence.known_tokens))
    return [(sequence.request.id, sequence.index) for sequence in sequences]


def _preempt_prefill(state: SchedulerState, waiting: Prefill) -> list[tuple[str, int]]:
    prefill.give_up(state, waiting)
    prefill.queue(state, waiting)
    return [(sequence.request.id, sequence.index) for sequence in waiting.sequences]

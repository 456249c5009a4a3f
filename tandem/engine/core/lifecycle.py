"""The states of a sequence and the named transitions between them, as plain data.

A sequence waits (it holds no blocks), is prefilled, decodes and is completed. Preempted, it holds no blocks of the cache:
they stand in host memory and come back (``swap_in``), or its tokens are computed again (``admit``).
"""

from collections import Counter
from enum import StrEnum
from typing import Protocol

from tandem.types import FinishReason


class State(StrEnum):
    WAITING = "waiting"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    PREEMPTED = "preempted"
    COMPLETED = "completed"


class Transition(StrEnum):
    """Why a sequence changes its state. ``SWAP_OUT`` and ``RECOMPUTE``: blocks ran out or somebody more urgent came.
    ``UPDATE``: the weights changed. ``FAIL``: a step failed, and what it wrote is unknown. ``BUDGET_STOP``: the limit of its tokens was
    reached; ``STOP``: a stop token or text."""

    ADMIT = "admit"
    JOIN = "join"
    SWAP_OUT = "swap_out"
    SWAP_IN = "swap_in"
    RECOMPUTE = "recompute"
    UPDATE = "update"
    FAIL = "fail"
    STOP = "stop"
    BUDGET_STOP = "budget_stop"
    ABORT = "abort"


_ON_BLOCKS = frozenset((State.PREFILLING, State.DECODING))
_OPEN = frozenset(State) - {State.COMPLETED}

TRANSITIONS: dict[Transition, tuple[frozenset[State], State]] = {
    Transition.ADMIT: (frozenset((State.WAITING, State.PREEMPTED)), State.PREFILLING),
    Transition.JOIN: (frozenset((State.PREFILLING,)), State.DECODING),
    Transition.SWAP_OUT: (frozenset((State.DECODING,)), State.PREEMPTED),
    Transition.SWAP_IN: (frozenset((State.PREEMPTED,)), State.DECODING),
    Transition.RECOMPUTE: (_ON_BLOCKS, State.PREEMPTED),
    Transition.UPDATE: (_ON_BLOCKS, State.PREEMPTED),
    Transition.FAIL: (_ON_BLOCKS, State.PREEMPTED),
    Transition.STOP: (frozenset((State.DECODING,)), State.COMPLETED),
    Transition.BUDGET_STOP: (frozenset((State.DECODING,)), State.COMPLETED),
    Transition.ABORT: (_OPEN, State.COMPLETED),
}
"""From which states to which."""

ENDS = {FinishReason.STOP: Transition.STOP, FinishReason.LENGTH: Transition.BUDGET_STOP, FinishReason.ABORT: Transition.ABORT}
"""How a sequence is completed, by the reason that its answer gives."""


class HasState(Protocol):
    state: State


def move(sequence: HasState, transition: Transition, counts: Counter[Transition]) -> None:
    """Take ``sequence`` through ``transition`` and count it. ``AssertionError`` where its state does not allow that."""
    sources, target = TRANSITIONS[transition]
    assert sequence.state in sources, f"a sequence that is {sequence.state} cannot {transition}"
    sequence.state = target
    counts[transition] += 1

"""The life cycle of a sequence: its states and the named transitions between them, as plain data.

A sequence waits without blocks, is prefilled, decodes and is completed. A preempted sequence frees its row and its blocks in that step and
waits again from the next step on: its keys and values are swapped in from host memory (``swap_in``), or recomputed (``admit``).
``docs/inference.md`` draws the life cycle.
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
    """Why a sequence changes its state.

    ``SWAP_OUT`` and ``RECOMPUTE``: no block was free, or a request of higher priority took its place. ``UPDATE``: the weights changed.
    ``FAIL``: a step failed, and the content of its blocks is undefined. ``REQUEUE``: a preempted sequence waits again. ``BUDGET_STOP``: it
    reached its maximum number of tokens. ``STOP``: it drew a stop token, completed a stop text or repeats itself.
    """

    ADMIT = "admit"
    JOIN = "join"
    SWAP_OUT = "swap_out"
    RECOMPUTE = "recompute"
    UPDATE = "update"
    FAIL = "fail"
    REQUEUE = "requeue"
    SWAP_IN = "swap_in"
    STOP = "stop"
    BUDGET_STOP = "budget_stop"
    ABORT = "abort"


_HOLDS_BLOCKS = frozenset((State.PREFILLING, State.DECODING))
_OPEN = frozenset(State) - {State.COMPLETED}

TRANSITIONS: dict[Transition, tuple[frozenset[State], State]] = {
    Transition.ADMIT: (frozenset((State.WAITING,)), State.PREFILLING),
    Transition.JOIN: (frozenset((State.PREFILLING,)), State.DECODING),
    Transition.SWAP_OUT: (frozenset((State.DECODING,)), State.PREEMPTED),
    Transition.RECOMPUTE: (_HOLDS_BLOCKS, State.PREEMPTED),
    Transition.UPDATE: (_HOLDS_BLOCKS, State.PREEMPTED),
    Transition.FAIL: (_HOLDS_BLOCKS, State.PREEMPTED),
    Transition.REQUEUE: (frozenset((State.PREEMPTED,)), State.WAITING),
    Transition.SWAP_IN: (frozenset((State.WAITING,)), State.DECODING),
    Transition.STOP: (frozenset((State.DECODING,)), State.COMPLETED),
    Transition.BUDGET_STOP: (frozenset((State.DECODING,)), State.COMPLETED),
    Transition.ABORT: (_OPEN, State.COMPLETED),
}
"""The source states and the target state of each transition."""

ENDS = {
    FinishReason.STOP: Transition.STOP, FinishReason.REPETITION: Transition.STOP, FinishReason.LENGTH: Transition.BUDGET_STOP,
    FinishReason.ABORT: Transition.ABORT,
}  # fmt: skip
"""The transition that completes a sequence, by finish reason."""


class HasState(Protocol):
    state: State


def move(sequence: HasState, transition: Transition, counts: Counter[Transition]) -> None:
    """Applies ``transition`` to ``sequence`` and counts it. Raises ``AssertionError`` if its state does not allow the transition."""
    sources, target = TRANSITIONS[transition]
    assert sequence.state in sources, f"a sequence that is {sequence.state} cannot {transition}"
    sequence.state = target
    counts[transition] += 1

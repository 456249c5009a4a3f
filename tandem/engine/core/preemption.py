"""Preemption: a sequence gives up its row and its blocks, by swapping or to be computed again, and waits.

The victim is of the lowest priority, and of those the one with the least work to lose; among equals the last in order. So of the
most urgent sequences the one that is furthest is never preempted while another holds blocks: somebody always gets to an end.
"""

from collections import Counter
from collections.abc import Callable

from tandem.engine.core import decode, prefill
from tandem.engine.core.lifecycle import Transition, move
from tandem.engine.core.request import Prefill, Sequence
from tandem.engine.core.state import SchedulerState
from tandem.engine.kv_cache.block_table import RELEASED, BlockCopy, blocks_for
from tandem.kernels.api import BLOCK_TOKENS

Name = tuple[str, int]
"""A sequence: the id of its request and its index."""


def preempt_one(state: SchedulerState, less_urgent_than: int | None = None) -> list[Name]:
    """Preempt the sequence, or the group under prefill, that loses least; returns the names of its sequences, none where nobody
    holds blocks. ``less_urgent_than``: only one with a higher value of priority."""
    victim = min(
        (v for v in _holders(state) if less_urgent_than is None or v.order[0] > less_urgent_than),
        key=lambda v: (-v.order[0], _lost_tokens(state, v), tuple(-part for part in v.order)),
        default=None,
    )
    if victim is None:
        return []
    if isinstance(victim, Prefill):
        return _preempt_prefill(state, victim, Transition.RECOMPUTE)
    return _preempt_decoding(state, victim)


def may_preempt(state: SchedulerState) -> bool:
    """Whether the next step may preempt somebody: those that come to the end of a block could find none, or somebody more urgent waits."""
    if len(state.due.get(state.step + 1, ())) + len(state.speculating) > state.allocator.free_count:
        return True
    first = prefill.head(state) if state.waiting else None
    return first is not None and _is_outranked(state, first.order[0])


def preempt_all(state: SchedulerState, why: Transition) -> list[Name]:
    """Preempt everything that holds blocks or stands in host memory, all of which is void from now on."""
    names = _requeue(state, list(state.decoding.values()), why, keep_cache=False)
    if state.prefilling is not None:
        names += _preempt_prefill(state, state.prefilling, why)
    drop_swapped(state)
    return names


def make_room(state: SchedulerState) -> list[Name]:
    """Where the prefill that goes first lacks rows or blocks, preempt less urgent sequences until it has them; nobody, where that
    would not suffice."""
    first = prefill.head(state)
    if first is None or state.pause is not None or not _is_outranked(state, first.order[0]):
        return []
    place = prefill.look(state, first)
    state.allocator.release_all(place.found)
    urgent = first.order[0]
    lower = [v for v in _holders(state) if v.order[0] > urgent]
    rows = sum(len(v.rows) if isinstance(v, Prefill) else 1 for v in lower)
    held = Counter(block for v in lower for block in v.blocks if block != RELEASED)
    blocks = sum(state.allocator.references(block) == count for block, count in held.items())
    others = len(state.decoding) - sum(isinstance(v, Sequence) for v in lower)
    needed = place.missing + prefill.margin(state, first, others)
    if rows + len(state.free_rows) < len(first.sequences) or blocks + state.allocator.free_count < needed:
        return []
    names: list[Name] = []
    while len(state.free_rows) < len(first.sequences) or state.allocator.free_count < place.missing + prefill.margin(state, first, len(state.decoding)):
        more = preempt_one(state, less_urgent_than=urgent)
        if not more:
            break
        names += more
    return names


def drop_swapped(state: SchedulerState, is_void: Callable[[Prefill], bool] = lambda _: True) -> None:
    """Give up the space in host memory of those that wait and are void. They are computed again."""
    if state.host.free_count < state.host.count:
        for _, waiting in state.waiting:
            if waiting.host_blocks and is_void(waiting):
                prefill.drop_host_blocks(state, waiting)


def _is_outranked(state: SchedulerState, urgent: int) -> bool:
    return any(holder.order[0] > urgent for holder in _holders(state))


def _holders(state: SchedulerState) -> list[Sequence | Prefill]:
    under_way: list[Sequence | Prefill] = [] if state.prefilling is None else [state.prefilling]
    return under_way + list(state.decoding.values())


def _lost_tokens(state: SchedulerState, victim: Sequence | Prefill) -> int:
    """Tokens in blocks that nobody else holds."""
    return BLOCK_TOKENS * sum(block != RELEASED and state.allocator.references(block) == 1 for block in victim.blocks)


def _preempt_decoding(state: SchedulerState, sequence: Sequence) -> list[Name]:
    state.read_back([sequence])
    host = _swap_out(state, sequence) if _swaps(state, sequence) else []
    return _requeue(state, [sequence], Transition.SWAP_OUT if host else Transition.RECOMPUTE, keep_cache=True, host_blocks=host)


def _swaps(state: SchedulerState, sequence: Sequence) -> bool:
    computed = len(sequence.known_tokens) - 1
    held = sum(block != RELEASED for block in sequence.blocks[: blocks_for(computed)])
    if state.limits.preemption == "recompute" or held > state.host.free_count or not held:
        return False
    if state.limits.preemption == "swap" or state.costs is None:
        return True
    lost = min(computed, _lost_tokens(state, sequence))
    return state.costs.swap_s(held * BLOCK_TOKENS) < state.costs.recompute_s(lost, computed)


def _swap_out(state: SchedulerState, sequence: Sequence) -> list[int]:
    """Blocks of host memory for all that ``sequence`` has computed; the copies are made before the step writes anything."""
    table = sequence.blocks[: blocks_for(len(sequence.known_tokens) - 1)]
    host = [block if block == RELEASED else state.host.allocate() for block in table]
    state.swap_outs += [BlockCopy(a, b) for a, b in zip(table, host, strict=True) if a != RELEASED]
    return host


def _requeue(
    state: SchedulerState, sequences: list[Sequence], why: Transition, keep_cache: bool, host_blocks: list[int] | None = None
) -> list[Name]:
    """``sequences`` wait again with all their tokens."""
    state.read_back(sequences)
    decode.leave(state, sequences, keep_cache)
    for sequence in sequences:
        move(sequence, why, state.counts)
        sequence.preemptions += 1
        sequence.is_mixed = sequence.is_mixed and bool(host_blocks)
        prefill.queue(state, Prefill([sequence], sequence.known_tokens, host_blocks=list(host_blocks or ())))
    return [(sequence.request.id, sequence.index) for sequence in sequences]


def _preempt_prefill(state: SchedulerState, waiting: Prefill, why: Transition) -> list[Name]:
    prefill.give_up(state, waiting)
    for sequence in waiting.sequences:
        move(sequence, why, state.counts)
        sequence.is_mixed = False
        sequence.preemptions += 1
    prefill.queue(state, waiting)
    return [(sequence.request.id, sequence.index) for sequence in waiting.sequences]

"""Prefills: their queue, their admission and their chunks."""

import heapq

from tandem.engine.block_table import blocks_for
from tandem.engine.prefix_cache import root_key
from tandem.engine.request import Prefill
from tandem.engine.state import SchedulerState
from tandem.kernels.api import BLOCK_TOKENS


def queue(state: SchedulerState, prefill: Prefill) -> None:
    """Add ``prefill`` to those that wait."""
    heapq.heappush(state.waiting, (prefill.order, prefill))


def head(state: SchedulerState) -> Prefill | None:
    """The prefill that goes first; what an abort has made void (a prefill is of one request) is dropped on the way."""
    while state.waiting and state.waiting[0][1].sequences[0].is_done:
        heapq.heappop(state.waiting)
    return state.waiting[0][1] if state.waiting else None


def admit(state: SchedulerState, budget: int) -> Prefill | None:
    """Give the prefill that goes first its rows and all its blocks; ``None`` where they do not suffice.

    Every running sequence may want a block soon, and so may every fork. Without that margin preemption would undo an
    admission at once; whatever runs alone is admitted without it.
    """
    prefill = head(state)
    if prefill is None or len(prefill.sequences) > len(state.free_rows):
        return None
    allocator, forks, length = state.allocator, len(prefill.sequences), len(prefill.tokens)
    request = prefill.sequences[0].request
    root = root_key(state.version, state.adapter_key(request.adapter), request.cache_salt)
    if prefill.root != root:
        # Once, however often admission is tried.
        prefill.root, prefill.keys = root, state.prefix_cache.keys(root, prefill.tokens)
    found = [] if prefill.is_scored else state.prefix_cache.match(prefill.keys, length)
    computed = len(found) * BLOCK_TOKENS
    missing = blocks_for(length) - len(found)
    margin = len(state.decoding) + forks if state.decoding else 0
    must_wait = not state.limits.chunked_prefill and length - computed > budget
    if must_wait or missing + margin > allocator.free_count:
        allocator.release_all(found)
        return None
    heapq.heappop(state.waiting)
    prefill.computed = prefill.cached = computed
    prefill.blocks = found + [allocator.allocate() for _ in range(missing)]
    prefill.rows = [state.free_rows.pop() for _ in range(forks)]
    return prefill


def take(state: SchedulerState, prefill: Prefill, budget: int) -> tuple[int, list[int]]:
    """The next chunk, at most ``budget`` tokens, as (start, tokens). Its full blocks can be found at once: a step
    writes all its keys and values before it reads any."""
    start = prefill.computed
    tokens = prefill.tokens[start : start + budget]
    prefill.computed += len(tokens)
    state.prefix_cache.register(prefill.keys, prefill.blocks, prefill.computed)
    return start, tokens


def give_up(state: SchedulerState, prefill: Prefill) -> None:
    """Take back the rows and blocks of the prefill under way."""
    assert state.prefilling is prefill
    state.prefilling = None
    state.allocator.release_all(prefill.blocks)
    state.free_rows.extend(reversed(prefill.rows))
    prefill.blocks, prefill.rows, prefill.computed = [], [], 0

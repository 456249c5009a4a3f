"""Prefills: their queue, their admission and their chunks."""

import heapq
from typing import NamedTuple

from tandem.engine.core import batches
from tandem.engine.core.lifecycle import Transition, move
from tandem.engine.core.request import Prefill, Request, Sequence
from tandem.engine.core.state import SchedulerState
from tandem.engine.kv_cache.block_table import RELEASED, BlockCopy, blocks_for, release_behind
from tandem.engine.kv_cache.prefix_cache import root_key
from tandem.kernels.api import BLOCK_TOKENS


class Place(NamedTuple):
    """What a prefill would find: ``found`` blocks of the prefix cache, each with a reference of its own, and the count of
    ``missing`` ones."""

    found: list[int]
    missing: int


def queue(state: SchedulerState, prefill: Prefill) -> None:
    """Add ``prefill`` to those that wait."""
    heapq.heappush(state.waiting, (prefill.order, prefill))


def queue_group(state: SchedulerState, sequences: list[Sequence], is_scored: bool) -> None:
    """Add the prompt that ``sequences`` share. A group takes its rows at once; what no step could hold goes in parts, each of which shares
    the prompt. Static reservations share nothing. ``is_scored``: as ``Prefill`` has it."""
    size = 1 if state.limits.reservation else state.limits.max_num_seqs
    for first in range(0, len(sequences), size):
        part = sequences[first : first + size]
        queue(state, Prefill(part, part[0].request.prompt_token_ids, is_scored=is_scored and first == 0))


def head(state: SchedulerState) -> Prefill | None:
    """The prefill that goes first; what an abort has made void (a prefill is of one request) is dropped on the way."""
    while state.waiting and state.waiting[0][1].sequences[0].is_done:
        heapq.heappop(state.waiting)
    return state.waiting[0][1] if state.waiting else None


def root(state: SchedulerState, request: Request) -> bytes:
    """Where the chain of keys of a request's blocks starts."""
    return root_key(state.version, state.adapter_key(request.adapter), request.cache_salt)


def look(state: SchedulerState, prefill: Prefill) -> Place:
    """What ``prefill`` would find now."""
    if state.limits.reservation:
        return Place([], state.limits.reservation)
    start = root(state, prefill.sequences[0].request)
    if prefill.root != start:
        # Once, however often admission is tried.
        prefill.root, prefill.keys = start, state.prefix_cache.keys(start, prefill.tokens)
    length = len(prefill.tokens)
    found = [] if prefill.is_scored else state.prefix_cache.match(prefill.keys, length)
    behind = sum(block == RELEASED for block in prefill.host_blocks[len(found) :])
    return Place(found, blocks_for(length) - len(found) - behind)


def margin(state: SchedulerState, prefill: Prefill, decoding: int) -> int:
    """Blocks that must stay free when ``prefill`` is admitted beside ``decoding`` running sequences.

    Every running sequence may want a block soon, and so may every fork. Without that margin preemption would undo an
    admission at once; whatever runs alone is admitted without it. A sequence asks for twice as much with every preemption, up
    to all that it can still come to hold, so that in a storm those that run get to their ends.
    """
    if not decoding or state.limits.reservation:
        return 0
    first = prefill.sequences[0]
    still = blocks_for(first.request.max_length) - blocks_for(len(prefill.tokens))
    patience = min((1 << min(first.preemptions, 30)) - 1, max(0, still))
    return decoding + len(prefill.sequences) + state.limits.watermark + patience


def admit(state: SchedulerState, budget: int) -> Prefill | None:
    """Give the prefill that goes first its rows and all its blocks; ``None`` where they do not suffice."""
    prefill = head(state)
    if prefill is None or not batches.may_join(state, prefill) or len(prefill.sequences) > len(state.free_rows):
        batches.close(state)
        return None
    length, place = len(prefill.tokens), look(state, prefill)
    computed = len(place.found) * BLOCK_TOKENS
    is_whole = state.limits.joins != "chunked" and not prefill.host_blocks
    if is_whole and length - computed > budget:
        # In a step of its own: the batch goes on forming.
        state.allocator.release_all(place.found)
        return None
    has_room = place.missing + margin(state, prefill, len(state.decoding)) <= state.allocator.free_count
    blocks = _take_blocks(state, prefill, place) if has_room else None
    if blocks is None:
        state.allocator.release_all(place.found)
        batches.close(state)
        return None
    heapq.heappop(state.waiting)
    prefill.computed = prefill.cached = computed
    prefill.blocks = blocks
    prefill.rows = [state.free_rows.pop() for _ in prefill.sequences]
    for sequence in prefill.sequences:
        move(sequence, Transition.SWAP_IN if prefill.host_blocks else Transition.ADMIT, state.counts)
    return prefill


def _take_blocks(state: SchedulerState, prefill: Prefill, place: Place) -> list[int] | None:
    if state.limits.reservation:
        return state.allocator.allocate_run(state.limits.reservation)
    blocks = list(place.found)
    for column in range(len(place.found), blocks_for(len(prefill.tokens))):
        is_behind = column < len(prefill.host_blocks) and prefill.host_blocks[column] == RELEASED
        blocks.append(RELEASED if is_behind else state.allocator.allocate())
    return blocks


def swap_in(state: SchedulerState, prefill: Prefill) -> list[BlockCopy]:
    """The copies that bring back what is not found in the cache; the space in host memory is free from now on."""
    first = prefill.computed // BLOCK_TOKENS
    copies = [
        BlockCopy(host, block)
        for host, block in zip(prefill.host_blocks[first:], prefill.blocks[first:], strict=False)
        if host != RELEASED
    ]
    drop_host_blocks(state, prefill)
    return copies


def drop_host_blocks(state: SchedulerState, prefill: Prefill) -> None:
    """Give up what ``prefill`` holds of the swap space: it is computed again, where it is not back."""
    state.host.release_all(prefill.host_blocks)
    prefill.host_blocks = []


def take(state: SchedulerState, prefill: Prefill, budget: int) -> tuple[int, list[int]]:
    """The next chunk, at most ``budget`` tokens, as (start, tokens). Its full blocks can be found at once: a step
    writes all its keys and values before it reads any."""
    start = prefill.computed
    if state.limits.window and not state.limits.reservation:
        release_behind(state.allocator, prefill.blocks, max(0, start - state.limits.window + 1))
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

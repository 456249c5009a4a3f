"""One scheduler for all kinds of batching: which tokens the next step computes, as a plain value that a test can compare."""

from typing import NamedTuple

from tandem.engine.core import decode, growth, preemption, prefill
from tandem.engine.core.state import SchedulerState
from tandem.engine.kv_cache.block_table import BlockChange, BlockCopy
from tandem.engine.spec_decode.draft_plan import plan_drafts


class Chunk(NamedTuple):
    """Tokens ``start .. start + len(tokens) - 1`` of a prefill. With its last chunk ``rows`` draw their next token
    from it (one row for each sequence of the group); before that ``rows`` is empty. ``adapter``: the name of the request's
    LoRA adapter, empty for none."""

    request_id: str
    start: int
    tokens: tuple[int, ...]
    blocks: tuple[int, ...]
    rows: tuple[int, ...]
    adapter: str = ""


class Decision(NamedTuple):
    """One step. ``decode``: rows that feed one token each. ``drafts``: how many more tokens each of them may feed as a guess;
    empty where nobody may. Before anything is computed ``swap_outs`` (to host memory), ``swap_ins`` (from there), ``copies`` and
    then ``changes`` are applied to the caches and to the block tables. ``resumed``: rows that are swapped in and decode from the
    next step on. ``preempted``: (request id, index) of sequences that lost their cache."""

    decode: tuple[int, ...] = ()
    prefill: tuple[Chunk, ...] = ()
    changes: tuple[BlockChange, ...] = ()
    copies: tuple[BlockCopy, ...] = ()
    preempted: tuple[tuple[str, int], ...] = ()
    swap_outs: tuple[BlockCopy, ...] = ()
    swap_ins: tuple[BlockCopy, ...] = ()
    resumed: tuple[int, ...] = ()
    drafts: tuple[int, ...] = ()

    @property
    def has_work(self) -> bool:
        return bool(self.decode or self.prefill or self.swap_outs or self.resumed)


def schedule(state: SchedulerState) -> Decision:
    """The next step: every decoding sequence advances, then prefill chunks fill what is left of the budget. Where blocks or rows
    run out, sequences are preempted; nothing new is admitted in such a step."""
    state.step += 1
    outranked = preemption.make_room(state)
    changes, copies, short = growth.give_blocks(state)
    preempted = outranked + short
    rows = decode.rows(state)
    budget = state.limits.max_num_batched_tokens - len(rows)
    drafts, more_changes = plan_drafts(state, rows, budget)
    budget -= sum(drafts)
    chunks: list[Chunk] = []
    swap_ins: list[BlockCopy] = []
    resumed: list[int] = []
    while budget > 0:
        if state.prefilling is None and not preempted:
            state.prefilling = prefill.admit(state, budget)
        current = state.prefilling
        if current is None:
            break
        if current.host_blocks:
            swap_ins += prefill.swap_in(state, current)
            decode.resume(state, current)
            resumed += current.rows
            state.prefilling = None
            continue
        start, tokens = prefill.take(state, current, budget)
        budget -= len(tokens)
        is_last = current.computed == len(current.tokens)
        chunks.append(
            Chunk(
                request_id=current.sequences[0].request.id,
                start=start,
                tokens=tuple(tokens),
                blocks=tuple(current.blocks),
                rows=tuple(current.rows) if is_last else (),
                adapter=current.sequences[0].request.adapter,
            )
        )
        if is_last:
            decode.join(state, current)
            state.prefilling = None
    swap_outs, state.swap_outs = tuple(state.swap_outs), []
    return Decision(
        rows, tuple(chunks), tuple(changes + more_changes), tuple(copies), tuple(preempted), swap_outs, tuple(swap_ins), tuple(resumed),
        drafts,
    )

"""Continuous batching: which tokens the next step computes, as a plain value that a test can compare."""

from typing import NamedTuple

from tandem.engine import decode, growth, prefill
from tandem.engine.block_table import BlockChange, BlockCopy
from tandem.engine.state import SchedulerState


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
    """One step. ``decode``: rows that feed one token each. ``copies`` and then ``changes`` are applied to the cache
    and to the block tables before anything is computed. ``preempted``: (request id, index) of sequences that lost
    their cache."""

    decode: tuple[int, ...] = ()
    prefill: tuple[Chunk, ...] = ()
    changes: tuple[BlockChange, ...] = ()
    copies: tuple[BlockCopy, ...] = ()
    preempted: tuple[tuple[str, int], ...] = ()

    @property
    def has_work(self) -> bool:
        return bool(self.decode or self.prefill)


def schedule(state: SchedulerState) -> Decision:
    """The next step: every decoding sequence advances by one token, then prefill chunks fill what is left of the
    budget. Where blocks run out, the sequences that go last lose theirs; nothing new is admitted in such a step."""
    state.step += 1
    changes, copies, preempted = growth.give_blocks(state)
    rows = decode.rows(state)
    budget = state.limits.max_num_batched_tokens - len(rows)
    chunks = []
    while budget > 0:
        if state.prefilling is None and not preempted:
            state.prefilling = prefill.admit(state, budget)
        current = state.prefilling
        if current is None:
            break
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
    return Decision(rows, tuple(chunks), tuple(changes), tuple(copies), tuple(preempted))

"""Decoding sequences: how they join and leave."""

from collections.abc import Iterable

from tandem.engine.core import batches
from tandem.engine.core.lifecycle import Transition, move
from tandem.engine.core.prefill import root
from tandem.engine.core.request import Prefill, Sequence
from tandem.engine.core.state import SchedulerState
from tandem.engine.kv_cache.block_table import fork
from tandem.engine.kv_cache.prefix_cache import chain
from tandem.kernels.api import BLOCK_TOKENS


def rows(state: SchedulerState) -> tuple[int, ...]:
    """The rows that decode, the same tuple until somebody joins or leaves."""
    if state.decode_rows is None:
        state.decode_rows = tuple(state.decoding)
    return state.decode_rows


def join(state: SchedulerState, prefill: Prefill) -> None:
    """The sequences of a prefill whose last chunk stands in this step decode from the next one on, all over its
    blocks."""
    _enter(state, prefill, first_fed=len(prefill.tokens))
    for sequence in prefill.sequences:
        move(sequence, Transition.JOIN, state.counts)
        if sequence.cached < 0:
            sequence.cached = prefill.cached


def resume(state: SchedulerState, prefill: Prefill) -> None:
    """A sequence that is swapped in decodes from the next step on; its last token was never fed."""
    _enter(state, prefill, first_fed=len(prefill.tokens) - 1)


def _enter(state: SchedulerState, prefill: Prefill, first_fed: int) -> None:
    tables = [prefill.blocks] + [fork(state.allocator, prefill.blocks) for _ in prefill.sequences[1:]]
    for sequence, row, table in zip(prefill.sequences, prefill.rows, tables, strict=True):
        sequence.row, sequence.blocks, sequence.keys = row, table, prefill.keys
        sequence.offset = first_fed - state.step - 1
        sequence.due = state.step + 1
        state.decoding[row] = sequence
        if sequence.request.draft_tokens:
            state.speculating[row] = sequence
    state.due.setdefault(state.step + 1, []).extend(prefill.sequences)
    state.decode_rows = None


def leave(state: SchedulerState, sequences: Iterable[Sequence], keep_cache: bool = True, has_ended: bool = False) -> None:
    """Take the rows and blocks of decoding sequences whose tokens were read back. With ``keep_cache`` their full
    blocks can be found again. The last token's keys and values were never computed. ``has_ended``: they do not come back."""
    for sequence in sequences:
        computed = len(sequence.request.prompt_token_ids) + len(sequence.token_ids) - 1
        keep = keep_cache and state.prefix_cache.enabled and not sequence.is_mixed
        if keep and computed // BLOCK_TOKENS > len(sequence.keys):
            keys = chain(root(state, sequence.request), sequence.known_tokens[:computed], sequence.keys)
            state.prefix_cache.register(keys, sequence.blocks, computed)
        row, blocks = sequence.row, sequence.blocks
        del state.decoding[row]
        state.speculating.pop(row, None)
        sequence.row, sequence.blocks, sequence.keys = -1, [], []
        if has_ended:
            batches.give_back(state, row, blocks)
        else:
            state.allocator.release_all(blocks)
            state.free_rows.append(row)
    state.decode_rows = None

"""Decoding sequences: how they join and leave."""

from collections.abc import Iterable

from tandem.engine.block_table import fork
from tandem.engine.prefix_cache import chain, root_key
from tandem.engine.request import Prefill, Sequence
from tandem.engine.state import SchedulerState
from tandem.kernels.api import BLOCK_TOKENS


def rows(state: SchedulerState) -> tuple[int, ...]:
    """The rows that decode, the same tuple until somebody joins or leaves."""
    if state.decode_rows is None:
        state.decode_rows = tuple(state.decoding)
    return state.decode_rows


def join(state: SchedulerState, prefill: Prefill) -> None:
    """The sequences of a prefill whose last chunk stands in this step decode from the next one on, all over its
    blocks."""
    tables = [prefill.blocks] + [fork(state.allocator, prefill.blocks) for _ in prefill.sequences[1:]]
    for sequence, row, table in zip(prefill.sequences, prefill.rows, tables, strict=True):
        sequence.row, sequence.blocks, sequence.keys = row, table, prefill.keys
        sequence.offset = len(prefill.tokens) - state.step - 1
        sequence.due = state.step + 1
        if sequence.cached < 0:
            sequence.cached = prefill.cached
        state.decoding[row] = sequence
    state.due.setdefault(state.step + 1, []).extend(prefill.sequences)
    state.decode_rows = None


def leave(state: SchedulerState, sequences: Iterable[Sequence], keep_cache: bool = True) -> None:
    """Take the rows and blocks of decoding sequences whose tokens were read back. With ``keep_cache`` their full
    blocks can be found again. The last token's keys and values were never computed."""
    for sequence in sequences:
        computed = len(sequence.request.prompt_token_ids) + len(sequence.token_ids) - 1
        if keep_cache and state.prefix_cache.enabled and computed // BLOCK_TOKENS > len(sequence.keys):
            request = sequence.request
            root = root_key(state.version, state.adapter_key(request.adapter), request.cache_salt)
            keys = chain(root, sequence.known_tokens[:computed], sequence.keys)
            state.prefix_cache.register(keys, sequence.blocks, computed)
        state.allocator.release_all(sequence.blocks)
        del state.decoding[sequence.row]
        state.free_rows.append(sequence.row)
        sequence.row, sequence.blocks, sequence.keys = -1, [], []
    state.decode_rows = None

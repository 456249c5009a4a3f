"""What an update of the weights leaves as it is: requests that go on over keys and values of the old ones."""

from collections.abc import Sequence as Series

from tandem.engine.request import Sequence
from tandem.engine.row_table import RowTable
from tandem.engine.state import SchedulerState


def keep(state: SchedulerState, table: RowTable, sequences: Series[Sequence]) -> None:
    """Let what is under way go on with the keys and values it has, which nobody else may find: the decoding ``sequences``, whose tokens
    were read back, the prefill under way, and what stands in host memory."""
    held = list(sequences)
    if state.prefilling is not None:
        state.prefilling.keys = []
        held += state.prefilling.sequences
    held += [sequence for _, waiting in state.waiting if waiting.host_blocks for sequence in waiting.sequences]
    for sequence in held:
        sequence.is_mixed = True
    if sequences:
        table.join(sequences, [len(sequence.known_tokens) for sequence in sequences])
    # The runner keeps what it selected as long as this tuple is the same.
    state.decode_rows = None
